"""
torchrun: the launcher becomes the coordinator of its workers.

* `torch.distributed.launcher.api.launch_agent` (torch 2.13.0, launcher/api.py:221) is where `torchrun`, `accelerate
  launch` and `elastic_launch` from Python meet. Around it the coordinator listens on a Unix socket, the path of
  which the workers inherit. Where an outer coordinator listens already, that one is told what is known here.
* `PContext.wait` and `PContext.close` (elastic/multiprocessing/api.py:607, 648) tell how each worker ended, in each
  attempt: those that had ended before `close` did so by themselves, the others were stopped by it.

torchrun prints its own failure table from the exception that `launch_agent` raises, after it has returned. The report
waits for that where the process is about to end, so that it stands last.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import around, contained
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

    from ckpt_sentry import identity
    from ckpt_sentry.integrations.launchers import torchrun_workers
    from ckpt_sentry.launcher.coordinator import Coordinator, Relay, has_coordinator
else:
    Coordinator = later("ckpt_sentry.launcher.coordinator:Coordinator")
    Relay = later("ckpt_sentry.launcher.coordinator:Relay")
    has_coordinator = later("ckpt_sentry.launcher.coordinator:has_coordinator")
    torchrun_workers = later("ckpt_sentry.integrations.launchers.torchrun_workers")
    identity = later("ckpt_sentry.identity")

TARGET = "torchrun"
NO_RUN_ID = ("", "none")
"""What `--rdzv-id` is where nobody has set it."""

_launch: ContextVar[Coordinator | Relay | None] = ContextVar("ckpt_sentry_launch", default=None)


def instrument(module: ModuleType) -> None:
    """
    Patch `torch.distributed.launcher.api`.
    """
    ledger.patch(module, "launch_agent", around(_begin, _end), target=TARGET)


def instrument_processes(module: ModuleType) -> None:
    """
    Patch `torch.distributed.elastic.multiprocessing.api`.
    """
    context = getattr(module, "PContext", None)
    ledger.patch(context, "wait", around(_watched, _looked), target=TARGET)
    ledger.patch(context, "close", around(_closing, _closed), target=TARGET)


@contained("torchrun.begin")
def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coordinator | Relay:
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    config, entrypoint, words = call["config"], call["entrypoint"], call["args"]
    run_id = _run_id(config, entrypoint, words)
    launch = Relay(run_id) if has_coordinator() else Coordinator(run_id, int(config.nproc_per_node))
    launch.enter(os.environ)
    _launch.set(launch)
    return launch


@contained("torchrun.end")
def _end(launch: Coordinator | Relay, error: BaseException | None) -> None:
    _launch.set(None)
    launch.leave(os.environ)
    if error is not None and _is_command():
        atexit.register(_close, launch, ok=False)
    else:
        _close(launch, ok=error is None)


@contained("torchrun.close")
def _close(launch: Coordinator | Relay, *, ok: bool) -> None:
    launch.close(ok=ok)


@contained("torchrun.watched")
def _watched(_: Callable[..., Any], args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    return args[0] if _launch.get() is not None and args else None


@contained("torchrun.looked")
def _looked(context: Any, _: BaseException | None) -> None:
    """
    The launcher has looked after its workers: some may have ended well while others go on.
    """
    _report_ends(context, torchrun_workers.ended(context))


@contained("torchrun.closing")
def _closing(_: Callable[..., Any], args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    if _launch.get() is None or not args:
        return None
    # Whoever lives now is stopped by this very call.
    _report_ends(args[0], torchrun_workers.ended(args[0], closing=True))
    return args[0]


@contained("torchrun.closed")
def _closed(context: Any, _: BaseException | None) -> None:
    _report_ends(context, torchrun_workers.ended(context, closed=True))


def _report_ends(context: Any, workers: list[torchrun_workers.Worker]) -> None:
    launch = _launch.get()
    if launch is None:
        return
    told: set[int] = context.__dict__.setdefault("_ckpt_sentry_told", set())
    for worker in workers:
        if worker.local_rank not in told:
            told.add(worker.local_rank)
            launch.on_event(worker.end(launch.run_id))


def _run_id(config: Any, entrypoint: Any, args: Any) -> str:
    """
    The name of the run, the same on all its nodes: the program and a hash of what the launchers have in common.
    """
    given = os.environ.get("CKPT_SENTRY_RUN_ID", "").strip()
    # A launcher that is started by a worker begins another run, and the worker's is not what the user has set.
    if given and "TORCHELASTIC_RUN_ID" not in os.environ:
        return given
    words = [entrypoint, *args] if isinstance(entrypoint, str) else []
    scripts = [str(word) for word in words if str(word).endswith(".py")]
    program = Path(scripts[0]).stem if scripts else getattr(entrypoint, "__name__", None)
    run_id = str(config.run_id)
    if run_id not in NO_RUN_ID:
        return identity.new_run_id(program, seed=run_id)
    if int(config.max_nodes) <= 1:
        return identity.new_run_id(program)
    # A static rendezvous: its address is all that the nodes share, beside the job of a scheduler.
    job = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")]
    return identity.new_run_id(program, seed="/".join((str(config.rdzv_endpoint), *job)))


def _is_command() -> bool:
    """
    Whether `launch_agent` was called by a launcher's command line, which ends with the exception that it raised.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "main" and (name == "torch.distributed.run" or _is_run_as_main(frame)):
            return True
        if name == "accelerate.commands.launch":
            return True
        frame = frame.f_back
    return False


def _is_run_as_main(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return frame.f_globals.get("__name__") == "__main__" and file.endswith("torch/distributed/run.py")
