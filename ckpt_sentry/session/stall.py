"""
Loads that last too long: where each rank stands, with the Python stack of its thread.

Under a launcher it is the launcher that notices, since it alone knows who never came; it asks all of its workers
through their connections (`connect`). A process on its own has a timer for the time of each load (`Alarm`).

A stack is read from another thread of the process, while the one in question may be blocked in native code: that takes
the interpreter lock for a moment and nothing else. Names of files, lines and functions are read, and of the program's
own files the lines of code.
"""

from __future__ import annotations

import _thread
import contextlib
import linecache
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config, identity, names
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import FrameType

    from ckpt_sentry.core import frames
    from ckpt_sentry.core.report import Identity
    from ckpt_sentry.transport import connection
    from ckpt_sentry.transport.events import LoadStalled
else:
    frames = later("ckpt_sentry.core.frames")
    connection = later("ckpt_sentry.transport.connection")
    LoadStalled = later("ckpt_sentry.transport.events:LoadStalled")

MOST_FRAMES: Final = 40
LONGEST_LINE: Final = 200
SOURCE_SECONDS: Final = 0.5
"""What reading lines of source files may take."""
ANSWER_SECONDS: Final = 2.0
"""What one answer may take until the launcher has it."""


@dataclass(frozen=True, slots=True)
class Standing:
    """
    Where a load of this process is: its thread, its phase and when it came to it, in seconds since the epoch.
    """

    thread: int
    phase: str
    since: float


_standings: dict[str, Standing] = {}
_over: deque[str] = deque(maxlen=1024)


def stand(load_id: str, phase: str) -> None:
    """
    The load of the calling thread has come to a phase.
    """
    _standings[load_id] = Standing(threading.get_ident(), phase, time.time())


def leave(load_id: str) -> None:
    """
    The load has ended in this process.
    """
    if _standings.pop(load_id, None) is not None:
        _over.append(load_id)


def stalled(who: Identity, load_id: str, since: float) -> LoadStalled | None:
    """
    Where this process stands in a load: in a phase, or away from it since it began elsewhere. None if it is through.
    """
    standing = _standings.get(load_id)
    if standing is None and load_id in _over:
        return None
    thread = threading.main_thread().ident if standing is None else standing.thread
    return LoadStalled(
        identity=who,
        at=time.time(),
        load_id=load_id,
        phase=None if standing is None else standing.phase,
        since=since if standing is None else standing.since,
        stack=stack_of(thread),
    )


def stack_of(thread: int | None) -> str:
    """
    The Python frames of a thread, the outermost first, as Python prints them; those of this package are left out.

    The lines of code are shown for the program's own frames.
    """
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001 - the documented way
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < MOST_FRAMES:
        if not _is_own(frame):
            code = frame.f_code
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    lines = _code_lines({(file, number) for file, number, _ in found if not frames.is_library(file)})
    rows: list[str] = []
    for file, number, function in reversed(found):
        rows.append(f'File "{file}", line {number}, in {function}')
        if line := lines.get((file, number)):
            rows.append(f"  {line[:LONGEST_LINE]}")
    return "\n".join(rows)


def _code_lines(wanted: Collection[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """
    Lines of source files, by file and number. What cannot be read at once is left out: its disk may be what hangs.
    """
    found: dict[tuple[str, int], str] = {}

    @contained("stall.code_lines")
    def read() -> None:
        for file, number in sorted(wanted):
            found[file, number] = linecache.getline(file, number).strip()

    if wanted:
        reader = threading.Thread(target=read, name="ckpt_sentry-source", daemon=True)
        reader.start()
        reader.join(SOURCE_SECONDS)
    return dict(found)


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == names.SCOPE


class Alarm:
    """
    Calls `ring(event)` once if a load of the calling thread lasts too long; its thread lives until then or `cancel`.
    """

    def __init__(self, who: Identity, load_id: str, seconds: float, ring: Callable[[LoadStalled], None]) -> None:
        self._who, self._load_id, self._ring = who, load_id, ring
        self._over = _thread.allocate_lock()
        self._over.acquire()
        # What is longer than the platform can wait for never comes.
        seconds = min(seconds, threading.TIMEOUT_MAX)
        # A `threading.Thread` makes its starter wait until it runs, which a good load would have to pay for.
        with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
            _thread.start_new_thread(self._wait, (seconds,))

    def cancel(self) -> None:
        """
        The load has ended. May be called twice.
        """
        if self._over.locked():
            self._over.release()

    def _wait(self, seconds: float) -> None:
        if not self._over.acquire(timeout=seconds):
            self._expire()

    @contained("stall.expire")
    def _expire(self) -> None:
        event = stalled(self._who, self._load_id, time.time())
        if event is not None:
            self._ring(event)


@contained("stall.connect")
def connect() -> connection.Connection | None:
    """
    The connection to the launcher, if there is one that listens; it then knows this worker, and may ask it.
    """
    way = connection.connect() if config.settings().socket is not None else None
    if way is not None:
        way.introduce(identity.identity(), _answer)
    return way


def _answer(question: Mapping[str, Any]) -> None:
    """
    Answer the launcher's question, `{"loads": {load id: when it began}}`, by events.
    """
    way = connection.connect()
    who = identity.identity()
    for load_id, since in dict(question["loads"]).items():
        event = stalled(who, str(load_id), float(since))
        if way is not None and event is not None:
            way.send(event, ANSWER_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_standings.clear)
