"""
Buffers that no checkpoint holds, and that `from_pretrained` leaves without values.

transformers 5 builds a model on the meta device, gives its non-persistent buffers memory as it is
(`_move_missing_keys_from_meta_to_device`), and leaves it to `_init_weights` of the class to fill them. A class that
computes them in `__init__` alone, as code for transformers 4 does, goes on with whatever lay in that memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt_sentry.core.findings import listing, verb
from ckpt_sentry.core.fold import folds
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.model import inventories, proof

if TYPE_CHECKING:
    import torch

    from ckpt_sentry.session.loads import Load


@dataclass(slots=True)
class _Buffers:
    """
    The buffers that were on the meta device, and, once they have memory, what that held.
    """

    names: frozenset[str]
    marks: dict[str, _Mark] = field(default_factory=dict)


class _Mark(NamedTuple):
    tensor: int
    version: int
    values: tuple[float, ...]


def before(load: Load, model: torch.nn.Module) -> None:
    """
    Remember which buffers are on the meta device, before they are given memory.
    """
    empty = (name for name, value in inventories.transient_of(model) if value.is_meta and value.numel())
    load.keep(_Buffers(frozenset(empty)))


def moved(load: Load, model: torch.nn.Module) -> None:
    """
    Remember what the memory held that they were given. No tensor is kept.
    """
    known = load.state(_Buffers)
    if known is None or not known.names:
        return
    values = proof.samples(proof.Holder(model), known.names)
    known.marks = {
        name: _Mark(id(value), value._version, values[name])
        for name, value in inventories.transient_of(model)
        if name in values and not value.is_inference()  # those count no versions
    }


def unfilled(load: Load, model: torch.nn.Module) -> Finding | None:
    """
    Say into which of them nothing was written since, by the tensor itself, its version counter and its values.
    """
    known = load.state(_Buffers)
    if known is None or not known.marks:
        return None
    marks = known.marks
    same = {
        name: marks[name].values
        for name, value in inventories.transient_of(model)
        if name in marks and id(value) == marks[name].tensor and value._version == marks[name].version
    }
    now = proof.samples(proof.Holder(model), same)
    left = sorted(name for name, values in same.items() if repr(now.get(name)) == repr(values))
    if not left:
        return None
    count = len(left)
    text = (
        f"{count:,} {verb(count, 'buffer', 'buffers')} that no checkpoint holds (persistent=False) "
        f"{verb(count, 'has', 'have')} no values but what lay in memory: {listing(list(folds(left)))}."
    )
    step = f"Fill {verb(count, 'it', 'them')} in _init_weights of {type(model).__name__}, not in __init__ alone."
    return Finding("meta_left", "warning", text, step)
