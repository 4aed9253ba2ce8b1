"""
torch.distributed.checkpoint: a rank that had to take metadata of its own.

Where a rank cannot read the common `.metadata` and finds `__RANK.metadata`, it goes on alone (torch 2.13.0,
state_dict_loader.py:294, 313): it skips the gathering of plans and waits in a barrier, while the others wait for its
plan. So it says what it did before it enters that barrier, which is the only one in a load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.integrations.dcp import facts as dcp_facts
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import around, contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.session import loads

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ckpt_sentry.formats.dcp import diagnosis as files
    from ckpt_sentry.session.loads import Load
else:
    files = later("ckpt_sentry.formats.dcp.diagnosis")

TARGET = "dcp"
BARRIER: Final = "barrier"


def instrument(module: ModuleType) -> None:
    """
    Patch `torch.distributed.checkpoint.utils`.
    """
    ledger.patch(getattr(module, "_DistWrapper", None), "barrier", around(_waits, _waited), target=TARGET)


@contained("dcp.waits")
def _waits(_: Callable[..., Any], args: tuple[Any, ...], __: dict[str, Any]) -> Load | None:
    load = loads.current()
    path = dcp_facts.observed(load).path if load is not None else None
    if load is None or path is None or load.phase == BARRIER or not args:
        return None
    found = files.rank_local(path, getattr(args[0], "rank", None))
    load.enter(BARRIER, () if found is None else (found,))
    return load


@contained("dcp.waited")
def _waited(_: Load, __: BaseException | None) -> None:
    """
    The load goes on to its end.
    """
