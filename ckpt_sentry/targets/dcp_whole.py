"""
The quick look at a DCP load that is as it should be: both sides hold the same keys with the same shapes and types, and
this rank reads all that it holds of them.

A good load pays for this one pass. Where it finds anything else, `dcp_facts` takes both sides apart.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpt_sentry.targets.dcp_reads import elements_read
from ckpt_sentry.targets.tensors import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Whole(NamedTuple):
    """
    What both sides hold, in global shapes, and the bytes that this rank reads. A non-tensor counts as one element.
    """

    keys: int
    elements: int
    bytes: int
    bytes_read: int


def whole(wanted: Mapping[str, Any], saved: Mapping[str, Any], plan: Any, planner: Any) -> Whole | None:
    """
    Compare the flat state dict, `Metadata.state_dict_metadata` and the rank's `LoadPlan`; None unless all agree.

    What a rank reads by torch's own plan is known by its total: no item is larger than what it is read into, and none
    is there twice (planner_helpers.py, `create_read_items_for_chunk_list`). Nor are shapes of plain tensors compared
    that this planner has compared: it would have raised. Of a planner of another kind all is looked at, key by key.
    """
    items = getattr(plan, "items", None)
    if items is None or len(wanted) != len(saved) or not (_compares_sizes(planner) or _fits(wanted, saved, items)):
        return None
    elements = size = 0
    others = []
    try:
        # What the checkpoint holds is cold in memory, a few cache lines for each key: it is visited once.
        for key, value in wanted.items():
            told = saved[key]
            if type(value) not in PLAIN:
                others.append((value, told))
                continue
            if value.dtype is not told.properties.dtype:
                return None
            elements += value.numel()
            size += value.nbytes
    except (AttributeError, KeyError):  # not a tensor over there, or nothing
        return None
    local, local_size = elements, size
    for value, told in others:
        sides = _sizes(value, told)
        if sides is None:
            return None
        elements, size = elements + sides.elements, size + sides.bytes
        local, local_size = local + sides.local, local_size + sides.local_bytes
    # Items of non-tensors have no length (planner_helpers.py:228).
    if sum([item.lengths.numel() for item in items]) != local:
        return None
    return Whole(len(wanted), elements, size, local_size)


def _compares_sizes(planner: Any) -> bool:
    """
    Whether the plan is by torch's own planner, of a torch that compares sizes (default_planner.py:500 of 2.13).
    """
    module = sys.modules.get("torch.distributed.checkpoint.default_planner")
    own = getattr(module, "DefaultLoadPlanner", None)
    make = getattr(type(planner), "create_local_plan", None)
    if make is None or make is not getattr(own, "create_local_plan", None):
        return False
    code = getattr(getattr(module, "create_default_local_load_plan", None), "__code__", None)
    return any(isinstance(text, str) and text.startswith("Size mismatch") for text in getattr(code, "co_consts", ()))


def _fits(wanted: Mapping[str, Any], saved: Mapping[str, Any], items: Iterable[Any]) -> bool:
    """
    Whether plain tensors have one shape on both sides, and each key is read, a plain tensor whole.
    """
    read = elements_read(items)
    try:
        return all(
            value.shape == saved[key].size and read.get(key, 0) >= value.numel()
            if type(value) in PLAIN
            else key in read
            for key, value in wanted.items()
        )
    except (AttributeError, KeyError):  # not a tensor over there, or nothing
        return False


class _Sizes(NamedTuple):
    elements: int
    bytes: int
    local: int
    local_bytes: int


def _sizes(value: Any, told: Any) -> _Sizes | None:
    """
    What a DTensor or a non-tensor adds, or None where the other side differs.
    """
    shape = getattr(told, "size", None)
    if shape is None:
        is_tensor = isinstance(value, torch.Tensor) or hasattr(value, "local_shards")
        return None if is_tensor else _Sizes(1, 0, 0, 0)
    if not hasattr(value, "_local_tensor") or value.shape != shape or value.dtype is not told.properties.dtype:
        return None
    width, count = value.dtype.itemsize, shape.numel()
    local = value._local_tensor.numel()
    return _Sizes(count, count * width, local, local * width)
