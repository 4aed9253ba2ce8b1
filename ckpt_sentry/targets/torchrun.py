"""
torchrun: the launcher becomes the one who speaks for its workers.

`torch.distributed.launcher.api.launch_agent` is where `torchrun`, `accelerate launch` and `elastic_launch` from Python
meet (torch 2.13.0, launcher/api.py:221). Around it a receiver listens on loopback; the workers inherit its address
and a token. What the launcher knows of their ends comes from `ChildFailedError`.

torchrun prints its own failure table from the exception that `launch_agent` raises, after it has returned. The report
waits for that where the process is about to end, so that it stands last.
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_sentry import hooks, identity
from ckpt_sentry.audit.report import Identity
from ckpt_sentry.guard import around, contained
from ckpt_sentry.parent import Parent, has_parent
from ckpt_sentry.telemetry.events import RankEnded

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


TARGET = "torchrun"
NO_RUN_ID = ("", "none")
"""What `--rdzv-id` is where nobody has set it."""


def instrument(module: ModuleType) -> None:
    """
    Patch `torch.distributed.launcher.api`.
    """
    hooks.patch(module, "launch_agent", around(_begin, _end), target=TARGET)


@contained("torchrun.begin")
def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parent | None:
    if has_parent():
        return None
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    config, entrypoint, words = call["config"], call["entrypoint"], call["args"]
    parent = Parent(_run_id(config, entrypoint, words), int(config.nproc_per_node))
    parent.enter(os.environ)
    return parent


@contained("torchrun.end")
def _end(parent: Parent, error: BaseException | None) -> None:
    parent.leave(os.environ)
    ended = _ends(error, parent.run_id)
    if error is not None and _is_command():
        atexit.register(parent.close, ended, ok=False)
    else:
        parent.close(ended, ok=error is None)


def _run_id(config: Any, entrypoint: Any, args: Any) -> str:
    """
    The name of the run, the same on all its nodes: the program and a hash of what the launchers have in common.
    """
    if given := os.environ.get("CKPT_SENTRY_RUN_ID", "").strip():
        return given
    words = [entrypoint, *args] if isinstance(entrypoint, str) else []
    scripts = [str(word) for word in words if str(word).endswith(".py")]
    program = Path(scripts[0]).stem if scripts else getattr(entrypoint, "__name__", None)
    run_id = str(config.run_id)
    if run_id not in NO_RUN_ID:
        return identity.new_run_id(program, seed=run_id)
    # A static rendezvous: its address is all that the nodes share.
    several = int(config.max_nodes) > 1
    return identity.new_run_id(program, seed=str(config.rdzv_endpoint) if several else None)


def _ends(error: BaseException | None, run_id: str) -> list[RankEnded]:
    """
    How the workers ended, in the order in which the launcher saw it.
    """
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict):
        return []
    ended = sorted(failures.items(), key=lambda item: getattr(item[1], "timestamp", 0))
    return [_end_of(rank, failure, run_id) for rank, failure in ended]


def _end_of(rank: int, failure: Any, run_id: str) -> RankEnded:
    code = int(failure.exitcode)
    killed = code < 0
    return RankEnded(
        identity=Identity(run_id=run_id, rank=rank, local_rank=failure.local_rank, node=os.uname().nodename, pid=failure.pid),
        at=float(getattr(failure, "timestamp", 0) or time.time()),
        how="killed" if killed else "exited",
        exit_code=None if killed else code,
        signal=_signal_name(-code) if killed else None,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_command() -> bool:
    """
    Whether `launch_agent` was called by a launcher's command line, which ends with the exception that it raised.
    """
    frame = sys._getframe()  # noqa: SLF001 - the documented way to walk up
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "main" and (name == "torch.distributed.run" or _is_run_as_main(frame)):
            return True
        if name == "accelerate.commands.launch":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_run_as_main(frame: Any) -> bool:
    return frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename.endswith("torch/distributed/run.py")
