"""
What a rank's plan reads of what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_sentry.audit.inventory import Inventory

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def reads(
    plan: Any, wanted: Mapping[str, Any], model: Inventory, checkpoint: Inventory
) -> tuple[dict[str, float] | None, int]:
    """
    What this rank will read of what it holds: the fraction of each key that is not read whole, and bytes in all.

    A key whose entries differ on both sides has a fraction in any case: it tells that the values are read all the same.
    """
    items = getattr(plan, "items", None)
    if items is None:
        return None, 0
    read: dict[str, int] = {}
    for item in items:
        key = item.dest_index.fqn
        read[key] = read.get(key, 0) + item.lengths.numel()
    unread = wanted.keys() - read if len(read) < len(wanted) else set()
    read |= dict.fromkeys((key for key in wanted if key in unread), 0)
    ours, theirs = model.entries, checkpoint.entries
    sizes: dict[int, tuple[int, int]] = {}
    bytes_read, fractions = 0, {}
    for key, elements in read.items():
        entry = theirs.get(key)
        if entry is None or entry.shape is None:
            if key in unread and entry is not None:
                fractions[key] = 0.0
            continue
        size = sizes.get(id(entry))
        if size is None:
            size = sizes[id(entry)] = (entry.elements, entry.nbytes // entry.elements if entry.elements else 0)
        bytes_read += elements * size[1]
        value, is_same = wanted.get(key), ours.get(key) is entry
        if is_same and elements >= size[0] and type(value) in _TENSOR_TYPES:
            continue
        local = local_elements(value)
        if local and (elements < local or not is_same):
            fractions[key] = min(1.0, elements / local)
    return fractions, bytes_read


def local_elements(value: Any) -> int:
    """
    How many elements of a tensor this rank holds: of a plain tensor all, of a DTensor or ShardedTensor its shards.
    """
    if type(value) in _TENSOR_TYPES:
        return int(value.numel())
    if (local := getattr(value, "_local_tensor", None)) is not None:
        return int(local.numel())
    if callable(shards := getattr(value, "local_shards", None)):
        return sum(int(shard.tensor.numel()) for shard in shards())
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0
