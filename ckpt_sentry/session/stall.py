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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckpt_sentry import config, identity, names
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


class Standing(NamedTuple):
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


_QUICK: Final = 0.02
"""Seconds: of loads that begin so soon after one another the thread stays, rather than to be started for each."""


class Alarm:
    """
    Calls `ring(event)` once if a load of the calling thread lasts too long.

    One thread waits for all alarms of the process. It ends with the last of them; where loads follow each other at
    once, some hundredths of a second later.
    """

    def __init__(self, who: Identity, load_id: str, seconds: float, ring: Callable[[LoadStalled], None]) -> None:
        self._who, self._load_id, self._ring = who, load_id, ring
        now = time.monotonic()
        # What is longer than the platform can wait for never comes.
        self.due = now + min(seconds, threading.TIMEOUT_MAX / 2)
        self.began = now
        _watch.add(self, now)

    def cancel(self) -> None:
        """
        The load has ended. May be called twice.
        """
        _watch.remove(self)

    @contained("stall.expire")
    def _expire(self) -> None:
        event = stalled(self._who, self._load_id, time.time())
        if event is not None:
            self._ring(event)


class _Watch:
    """
    The alarms that are set, and the thread that waits for them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._alarms: set[Alarm] = set()
        self._wake: Any = None
        """Held while the thread sleeps; None where there is no thread."""
        self._until = 0.0
        self._ended = -1.0
        """When the newest of the loads that are over ended."""
        self._is_quick = False

    def add(self, alarm: Alarm, now: float) -> None:
        with self._lock:
            self._is_quick = now - self._ended < _QUICK
            self._alarms.add(alarm)
            if self._wake is None:
                self._start()
            elif alarm.due < self._until:
                self._rouse()

    def remove(self, alarm: Alarm) -> None:
        with self._lock:
            if alarm not in self._alarms:
                return
            self._alarms.discard(alarm)
            self._ended = time.monotonic()
            self._is_quick = self._is_quick and self._ended - alarm.began < _QUICK
            if not self._alarms and not self._is_quick:
                self._rouse()

    def _start(self) -> None:
        wake = _thread.allocate_lock()
        wake.acquire()
        # A `threading.Thread` makes its starter wait until it runs, which a good load would have to pay for.
        with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
            self._wake, self._until = wake, -1.0
            _thread.start_new_thread(self._run, (wake,))
            return
        self._wake = None

    def _rouse(self) -> None:
        if self._wake is not None and self._wake.locked():
            self._wake.release()

    def _run(self, wake: Any) -> None:
        while (seconds := self._next(wake)) is not None:
            wake.acquire(timeout=seconds)

    def _next(self, wake: Any) -> float | None:
        """
        Ring what is due; how long to sleep then, or None where the thread is to end.
        """
        with self._lock:
            if self._wake is not wake:
                return None
            now = time.monotonic()
            due = [alarm for alarm in self._alarms if alarm.due <= now]
            self._alarms.difference_update(due)
            if not self._alarms and not due and not (self._is_quick and now - self._ended < _QUICK):
                self._wake = None
                return None
            # A load that takes its time is waited for as a single one is.
            self._is_quick = self._is_quick and all(now - alarm.began < _QUICK for alarm in self._alarms)
            soon = now + _QUICK
            self._until = min((alarm.due for alarm in self._alarms), default=soon)
            if self._is_quick:
                self._until = min(self._until, soon)
        for alarm in due:
            alarm._expire()  # noqa: SLF001
        return max(0.0, self._until - now)


_watch = _Watch()


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


def _after_fork_in_child() -> None:
    global _watch  # noqa: PLW0603 - its thread is not here, and its lock may be held
    _watch = _Watch()
    _standings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
