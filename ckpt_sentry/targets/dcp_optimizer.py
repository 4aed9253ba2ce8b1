"""
An optimizer that is loaded without its state.

`Optimizer.state_dict()` has no state before the first step, and DCP loads what is asked for: the groups come in, with
the learning rate, the moments do not, and nothing is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckpt_sentry.audit.findings import keys, listing, verb
from ckpt_sentry.audit.fold import folds
from ckpt_sentry.audit.report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

_GROUPS: Final = "param_groups"
_STEP: Final = (
    "An optimizer that has made no step has no state to ask for: take its state dict by "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), which makes it."
)


def not_filled(wanted: Iterable[str], unexpected: Iterable[str]) -> Finding | None:
    """
    Say which states of optimizers the checkpoint has and nobody asked for, of optimizers whose groups were asked for.

    Args:
        wanted: the keys that the program asks for.
        unexpected: those of the checkpoint that it does not ask for.
    """
    wanted = tuple(wanted)
    groups = {before for before, found, _ in (key.partition(_GROUPS) for key in wanted) if found}
    states = {f"{before}state." for before in groups if not before or before.endswith(".")}
    states = {state for state in states if not any(key.startswith(state) for key in wanted)}
    lost = [key for key in unexpected if key.startswith(tuple(states))] if states else []
    if not lost:
        return None
    were = verb(len(lost), "was", "were")
    text = f"{keys(len(lost))} of the optimizer's state {were} not asked for: {listing(tuple(folds(lost)))}."
    return Finding("optimizer_missing", "warning", text, _STEP)
