"""
An optimizer that is loaded without its state.

`Optimizer.state_dict()` has no state before the first step, and DCP loads what is asked for: the groups come in, with
the learning rate, the moments do not, and nothing is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.core.findings import keys, listing, verb
from ckpt_sentry.core.fold import folds
from ckpt_sentry.core.optimizer import GET
from ckpt_sentry.core.report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_GROUPS: Final = "param_groups"
_MAKES: Final = f"{GET}(model, optimizer)"
_BY_NAME: Final = (
    f"An optimizer that has made no step has no state to ask for: take its state dict by {_MAKES}, which makes it."
)
_BY_NUMBER: Final = (
    f"An optimizer that has made no step has no state to ask for: call {_MAKES}, which makes it, "
    "and take optimizer.state_dict() after that."
)
_ALIVE: Final = (
    "torch makes no optimizer state to ask for while a parameter has a gradient: "
    "call optimizer.zero_grad() before the state dict is taken."
)


def not_filled(wanted: Mapping[str, Any], unexpected: Iterable[str]) -> Finding | None:
    """
    Say which states of optimizers the checkpoint has and nobody asked for, of optimizers whose groups were asked for.

    Args:
        wanted: the keys that the program asks for, with the values that it gives.
        unexpected: those of the checkpoint that it does not ask for.
    """
    groups = {before for before, found, _ in (key.partition(_GROUPS) for key in wanted) if found}
    states = {f"{before}state." for before in groups if not before or before.endswith(".")}
    states = {state for state in states if not any(key.startswith(state) for key in wanted)}
    lost = [key for key in unexpected if key.startswith(tuple(states))] if states else []
    if not lost:
        return None
    were = verb(len(lost), "was", "were")
    text = f"{keys(len(lost))} of the optimizer's state {were} not asked for: {listing(tuple(folds(lost)))}."
    return Finding("optimizer_missing", "warning", text, _step(wanted, lost, states))


def _step(wanted: Mapping[str, Any], lost: Iterable[str], states: Iterable[str]) -> str:
    """
    How the state is asked for, by the names that the checkpoint has and by who made the state dict.

    `get_optimizer_state_dict` names parameters, and makes the state by a step with gradients of zero, unless there are
    gradients already (torch/distributed/checkpoint/state_dict.py, `_init_optim_state`).
    """
    roots = {state.removesuffix("state.") for state in states if any(key.startswith(state) for key in lost)}
    owners = {key.removeprefix(f"{root}state.").partition(".")[0] for root in roots for key in lost}
    if all(map(str.isdecimal, owners)):
        return _BY_NUMBER
    is_by_name = any(_is_by_name(key.removeprefix(root), value) for root in roots for key, value in wanted.items())
    return _ALIVE if is_by_name else _BY_NAME


def _is_by_name(key: str, value: Any) -> bool:
    """
    Whether an option of a group tells parameters by their names: `param_groups.0.params` does, with a list of them, and
    `param_groups.layers.0.weight.lr`, of the flat form.
    """
    if not key.startswith(f"{_GROUPS}."):
        return False
    if key.endswith(".params"):
        return isinstance(value, list) and any(isinstance(name, str) for name in value)
    return not key.removeprefix(f"{_GROUPS}.").partition(".")[0].isdecimal()
