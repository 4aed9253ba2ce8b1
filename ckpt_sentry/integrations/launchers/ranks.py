"""
Workers of a distributed job, apart from their loads: a connection once they have a process group, and last words.

* `torch.distributed.distributed_c10d.init_process_group`: from there on others may wait for this rank.
* `torch.multiprocessing.spawn._wrap` (spawn.py:78): what a spawned worker ends by never comes to the interpreter's top.
* `torch.multiprocessing.spawn.ProcessContext.join` (spawn.py:112): the one place that knows how a spawned worker ended.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config, identity
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import around, contained
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ckpt_sentry.core.report import Identity
    from ckpt_sentry.integrations.launchers.torchrun_workers import signal_name
    from ckpt_sentry.session import exit_hook, stall
    from ckpt_sentry.transport.events import RankEnded
else:
    exit_hook = later("ckpt_sentry.session.exit_hook")
    stall = later("ckpt_sentry.session.stall")
    signal_name = later("ckpt_sentry.integrations.launchers.torchrun_workers:signal_name")
    RankEnded = later("ckpt_sentry.transport.events:RankEnded")
    Identity = later("ckpt_sentry.core.report:Identity")

TARGET = "ranks"


def instrument_group(module: ModuleType) -> None:
    """
    Patch `torch.distributed.distributed_c10d`.
    """
    if config.settings().socket is not None:
        exit_hook.listen()
    ledger.patch(module, "init_process_group", around(_watched, _grouped), target=TARGET)


def instrument_spawn(module: ModuleType) -> None:
    """
    Patch `torch.multiprocessing.spawn`.
    """
    ledger.patch(module, "_wrap", around(_watched, _spawned_ended), target=TARGET)
    ledger.patch(getattr(module, "ProcessContext", None), "join", around(_watched, _joined), target=TARGET)


@contained("ranks.watched")
def _watched(_: Callable[..., Any], args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    return args or True if config.settings().socket is not None else None


@contained("ranks.grouped")
def _grouped(_: Any, error: BaseException | None) -> None:
    if error is None:
        stall.connect()


@contained("ranks.spawned_ended")
def _spawned_ended(_: Any, error: BaseException | None) -> None:
    # torch turns an exception of the worker into SystemExit, in its `except` block.
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if cause is not None and identity.identity().world_size > 1:
        exit_hook.report(cause)


@contained("ranks.joined")
def _joined(args: Any, error: BaseException | None) -> None:
    """
    A spawned worker has failed, `error.error_index`, and the others have been stopped.
    """
    first = getattr(error, "error_index", None)
    if not isinstance(first, int):
        return
    context = args[0]
    _report_end(first, context.processes[first], stopped=False)
    for index, process in enumerate(context.processes):
        if index != first and process.exitcode:
            _report_end(index, process, stopped=process.sentinel in context.sentinels)


def _report_end(index: int, process: Any, *, stopped: bool) -> None:
    """
    How one spawned worker ended. Its rank is what it has called itself; to us it is known by its pid.
    """
    code = int(process.exitcode or 0)
    node = identity.identity().node
    exit_hook.send(
        RankEnded(
            identity=Identity(run_id="", rank=index, local_rank=index, node=node, pid=process.pid or 0),
            at=time.time(),
            how="exited" if code >= 0 else "stopped" if stopped else "killed",
            exit_code=code if code >= 0 else None,
            signal=signal_name(-code) if code < 0 else None,
        )
    )
