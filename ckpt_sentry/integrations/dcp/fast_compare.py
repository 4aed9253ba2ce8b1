"""
The quick look at a DCP load that is as it should be: both sides hold the same keys with the same shapes and types, and
this rank reads all that it holds of them.

One pass, for plans that were not seen being made (`dcp_planning`). Where it finds anything else, `dcp_facts` takes both
sides apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckpt_sentry.integrations.dcp.reads import elements_read, items_of
from ckpt_sentry.model.tensors import PLAIN
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from collections.abc import Mapping


class Whole(NamedTuple):
    """
    What both sides hold of some keys, in global shapes, and the bytes that this rank reads. A non-tensor counts as one
    element.
    """

    keys: int
    elements: int
    bytes: int
    bytes_read: int

    def plus(self, more: Whole) -> Whole:
        return Whole(*map(sum, zip(self, more, strict=True)))


NOTHING: Final = Whole(0, 0, 0, 0)


def whole(wanted: Mapping[str, Any], saved: Mapping[str, Any], plan: Any) -> Whole | None:
    """
    Compare the flat state dict, `Metadata.state_dict_metadata` and the rank's `LoadPlan`; None unless all agree.
    """
    items = items_of(plan)
    if items is None or len(wanted) != len(saved):
        return None
    read = elements_read(items)
    elements = size = 0
    others = NOTHING
    try:
        # What the checkpoint holds is cold in memory, a few cache lines for each key: it is visited once.
        for key, value in wanted.items():
            told = saved[key]
            if type(value) not in PLAIN:
                if (other := agreed(value, told, read.get(key))) is None:
                    return None
                others = others.plus(other)
                continue
            count = value.numel()
            if value.dtype is not told.properties.dtype or value.shape != told.size or read.get(key, 0) < count:
                return None
            elements += count
            size += value.nbytes
    except (AttributeError, KeyError):  # not a tensor over there, or nothing
        return None
    return Whole(len(wanted) - others.keys, elements, size, size).plus(others)


def agreed(value: Any, told: Any, read: int | None) -> Whole | None:
    """
    What one key adds, or None where the other side differs or it is not read whole.

    `read` is how many elements are read into it: 0 for a non-tensor that is read, None where nothing is.
    """
    try:
        return _agreed(value, told, read)
    except Exception as error:  # a tensor may refuse anything
        let_through(error)
        return None


def _agreed(value: Any, told: Any, read: int | None) -> Whole | None:
    shape = getattr(told, "size", None)
    if shape is None:
        is_tensor = isinstance(value, torch.Tensor) or hasattr(value, "local_shards")
        return None if is_tensor or read is None else Whole(1, 1, 0, 0)
    held = value if type(value) in PLAIN else getattr(value, "_local_tensor", None)
    if held is None or value.shape != shape or value.dtype is not told.properties.dtype:
        return None
    width, count, local = value.dtype.itemsize, shape.numel(), held.numel()
    return None if (read or 0) < local else Whole(1, count, count * width, local * width)
