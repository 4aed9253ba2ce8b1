"""
torch's own planner, watched while it makes a plan.

Both sides of a key are at hand then and in the cache; when the plan is made they are not any more, and a walk over them
takes three times as long. So each key is looked at when its read items have been created: by `_create_read_items`,
which `create_default_local_load_plan` calls for one key after another, once it has compared the sizes
(torch 2.13.0, default_planner.py:500).

What was seen counts where the plan that is read is the one that was seen being made; else `dcp_whole` looks itself.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.integrations.dcp.fast_compare import NOTHING, Whole, agreed
from ckpt_sentry.integrations.dcp.reads import items_of, volume
from ckpt_sentry.integrations.dcp.stock import changes_plans, is_torchs
from ckpt_sentry.model.tensors import PLAIN
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    import torch

    from ckpt_sentry.integrations.dcp.step import Step
    from ckpt_sentry.patching.ledger import Patch

TARGET = "dcp"
SEAM: Final = "_create_read_items"
_PLANNING: Final = "create_default_local_load_plan"
_PARAMETERS: Final = ("fqn", "md", "obj")


class Look:
    """
    What was seen of the keys that a planner has gone through.
    """

    __slots__ = ("agrees", "elements", "items", "others", "single")

    def __init__(self) -> None:
        self.agrees = True
        """Whether both sides of each key agree, and the rank reads all that it holds of it."""
        self.single = 0
        """Plain tensors that are read as one item."""
        self.elements: dict[torch.dtype, int] = {}
        """Theirs, in all."""
        self.others = NOTHING
        """All other keys."""
        self.items = 0
        """Theirs."""

    def other(self, told: Any, value: Any, items: Sequence[Any]) -> None:
        self.items += len(items)
        found = agreed(value, told, volume(items) if items else None)
        if found is None:
            self.agrees = False
        else:
            self.others = self.others.plus(found)

    def all(self) -> Whole:
        size = sum(count * dtype.itemsize for dtype, count in self.elements.items())
        return Whole(self.single, sum(self.elements.values()), size, size).plus(self.others)


_look: ContextVar[Look | None] = ContextVar("ckpt_sentry_planning", default=None)


def instrument(module: ModuleType) -> None:
    """
    Patch `_create_read_items` in `torch.distributed.checkpoint.default_planner`.
    """
    code = getattr(getattr(module, SEAM, None), "__code__", None)
    if code is not None and code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] != _PARAMETERS:
        ledger.gate(module, SEAM, f"it does not take {', '.join(_PARAMETERS)}", target=TARGET)
    elif code is not None and not compares_sizes(module):
        ledger.gate(module, SEAM, "the planner of this torch compares no sizes", target=TARGET)
    else:
        ledger.patch(module, SEAM, _looked_at, target=TARGET)


def begin() -> Look:
    """
    Look at what a planner of this thread does from here on.
    """
    look = Look()
    _look.set(look)
    return look


def end() -> None:
    """
    Look no more.
    """
    _look.set(None)


def seen(look: Look | None, wanted: Mapping[str, Any], plan: Any, step: Step) -> Whole | None:
    """
    What both sides hold, if the look has seen this very plan being made, and that all agree; else None.

    Args:
        look: of the making of the plan, if there was one.
        wanted: the flat state dict.
        plan: the rank's `LoadPlan`.
        step: the one that made it.
    """
    planner, metadata, items = step.planner, step.metadata, items_of(plan)
    if look is None or items is None or getattr(planner, "metadata", None) is not metadata:
        return None
    default_planner = sys.modules.get("torch.distributed.checkpoint.default_planner")
    is_as_made = is_torchs(planner, "create_local_plan") and is_torchs(default_planner, _PLANNING)
    if not is_as_made or not is_torchs(step.reader, "prepare_local_plan") or changes_plans(step):
        return None
    saved = getattr(metadata, "state_dict_metadata", ())
    found = look.all()
    is_all = found.keys == len(wanted) == len(saved) and look.single + look.items == len(items)
    return found if is_all and look.agrees else None


def compares_sizes(module: ModuleType | None = None) -> bool:
    """
    Whether the planner of this torch, or of a `default_planner`, raises where sizes differ: 2.4 copies what fits.
    """
    from torch.distributed.checkpoint import default_planner

    code = getattr(getattr(module or default_planner, _PLANNING, None), "__code__", None)
    return any(isinstance(text, str) and text.startswith("Size mismatch") for text in getattr(code, "co_consts", ()))


def _looked_at(original: Callable[..., Any], _: Patch) -> Callable[..., Any]:
    looking = _look.get

    @functools.wraps(original)
    def create_read_items(fqn: str, md: Any, obj: Any) -> Any:
        items = original(fqn, md, obj)
        look = looking()
        if look is None or not look.agrees:
            return items
        # Spelt out, and not `contained`: this is run for each key, and a call costs as much as what it does.
        try:
            if type(obj) in PLAIN and len(items) == 1:
                dtype, count = obj.dtype, obj.numel()
                if dtype is not md.properties.dtype or items[0].lengths.numel() != count:
                    look.agrees = False
                look.single += 1
                look.elements[dtype] = look.elements.get(dtype, 0) + count
            else:
                look.other(md, obj, items)
        except Exception as error:
            look.agrees = False
            let_through(error)
        return items

    return create_read_items
