"""
The workers of torchrun's `PContext` that have ended, and how.

Read from what the context holds of them (torch 2.13.0, elastic/multiprocessing/api.py): `subprocess_handlers` of a
`SubprocessContext`, the processes of a `MultiprocessContext`, and the environment and error file of each.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_sentry.core.report import Identity, LoadError
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.formats.regular import regular
from ckpt_sentry.masking import mask_text
from ckpt_sentry.transport.events import RankEnded

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_MESSAGE = 2_000
LARGEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Worker:
    """
    A worker that has ended. `code` is its exit code, or minus the number of the signal that ended it.
    """

    local_rank: int
    pid: int
    code: int
    stopped: bool
    environment: dict[str, str]
    error: LoadError | None

    def end(self, run_id: str) -> RankEnded:
        """
        The same as an event.
        """
        killed = self.code < 0
        how: Literal["exited", "killed", "raised", "stopped"] = "killed" if killed else "exited"
        if killed and self.stopped:
            how = "stopped"
        elif self.error is not None:
            how = "raised"
        return RankEnded(
            identity=self._identity(run_id),
            at=time.time(),
            how=how,
            exit_code=None if killed else self.code,
            signal=signal_name(-self.code) if killed else None,
            error=self.error if how == "raised" else None,
        )

    def _identity(self, run_id: str) -> Identity:
        def number(name: str, default: int) -> int:
            text = str(self.environment.get(name, ""))
            return int(text) if text.isascii() and text.isdigit() else default

        return Identity(
            run_id=run_id,
            rank=number("RANK", self.local_rank),
            local_rank=self.local_rank,
            world_size=number("WORLD_SIZE", 1),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node=os.uname().nodename,
            pid=self.pid,
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        )


def ended(context: Any, *, closing: bool = False, closed: bool = False) -> list[Worker]:
    """
    The workers of a `PContext` that are known to have ended.

    Args:
        closing: the launcher is about to stop those that live: see who has ended up to now.
        closed: it has stopped them: whom a signal has ended since, it has sent it.
    """
    found = []
    for local_rank, pid, code, stopped in _codes(context, closing=closing or closed):
        if code is not None:
            environment = dict(context.envs.get(local_rank) or {})
            error = _written(context.error_files.get(local_rank)) if code else None
            found.append(Worker(local_rank, pid, code, stopped or closed, environment, error))
    # Of those that ended between two looks, one that was killed is the likelier cause.
    return sorted(found, key=lambda worker: (worker.stopped, worker.code > 0, worker.local_rank))


def signal_name(number: int) -> str:
    """
    Such as "SIGKILL".
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _codes(context: Any, *, closing: bool) -> Iterator[tuple[int, int, int | None, bool]]:
    """
    Local rank, pid, exit code (None: lives) of each worker, and whether it is known to have been stopped.
    """
    for local_rank, handler in (getattr(context, "subprocess_handlers", None) or {}).items():
        yield local_rank, handler.proc.pid, handler.proc.poll() if closing else handler.proc.returncode, False
    spawned: Any = getattr(context, "_pc", None)
    for local_rank, process in enumerate(getattr(spawned, "processes", None) or ()):
        # `ProcessContext.join` takes out the sentinel of each end that it sees, and stops all others at the first bad
        # one (multiprocessing/spawn.py:149).
        seen = process.sentinel not in spawned.sentinels
        yield local_rank, process.pid or 0, process.exitcode if seen or closing else None, not seen


def _written(path: Any) -> LoadError | None:
    """
    The exception that a program decorated with `record` has left in its error file (error_handler.py:76), if any.
    """
    try:
        file = Path(str(path))
        if file.stat().st_size > LARGEST_FILE:
            return None
        with open(file, encoding="utf-8", errors="replace", opener=regular) as written:
            message = json.load(written)["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kind, colon, rest = str(text).partition(": ")
    if not (colon and kind.replace(".", "").isidentifier()):
        kind, rest = "Exception", str(text)
    return LoadError(kind, mask_text(rest)[:LONGEST_MESSAGE])
