"""
The entries of a state dict and of DCP's metadata: names, global shapes and types, as `audit` compares them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.model.tensors import PLAIN, is_shared, owns_memory, quietly
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def flattened(state_dict: Any) -> dict[str, Any]:
    """
    A nested state dict with the keys that DCP's planners give it.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state_dict)[0] if state_dict else {}


def model_entries(wanted: Mapping[str, Any], seen: dict[tuple[Any, Any], Entry]) -> dict[str, Entry]:
    """
    `model_entry` for each value; written out for plain tensors, of which there may be 100,000. A tensor that refuses to
    be asked is left out.
    """
    entries: dict[str, Entry] = {}
    known = seen.get
    for key, value in wanted.items():
        entry = known((value.shape, value.dtype)) if type(value) in PLAIN else None
        if entry is None and (entry := _asked(value, seen)) is None:
            continue
        entries[key] = entry
    return entries


def _asked(value: Any, seen: dict[tuple[Any, Any], Entry]) -> Entry | None:
    try:
        return model_entry(value, seen)
    except Exception as error:
        let_through(error)
        return None


def checkpoint_entries(saved: Mapping[str, Any], seen: dict[tuple[Any, Any], Entry]) -> dict[str, Entry]:
    """
    `checkpoint_entry` for each value.
    """
    entries: dict[str, Entry] = {}
    known = seen.get
    for key, value in saved.items():
        size = getattr(value, "size", None)
        entry = None if size is None else known((size, value.properties.dtype))
        entries[key] = checkpoint_entry(value, seen) if entry is None else entry
    return entries


def model_entry(value: Any, seen: dict[tuple[Any, Any], Entry]) -> Entry:
    """
    The entry of a value in a state dict, in global shapes; equal ones share an object by way of `seen`.
    """
    if isinstance(value, torch.Tensor):
        with quietly():
            # What a class that takes operations over is a tensor of, its `dtype` need not tell.
            shape, dtype = value.shape, value.dtype if owns_memory(value) or is_shared(value) else None
    elif callable(size := getattr(value, "size", None)) and hasattr(value, "dtype"):  # ShardedTensor and its kin
        shape, dtype = size(), value.dtype
    else:
        shape, dtype = None, None
    return _entry(shape, dtype, seen)


def checkpoint_entry(value: Any, seen: dict[tuple[Any, Any], Entry]) -> Entry:
    """
    The entry of a value in `Metadata.state_dict_metadata`.
    """
    size = getattr(value, "size", None)
    return _entry(size, None if size is None else value.properties.dtype, seen)


def _entry(shape: Any, dtype: Any, seen: dict[tuple[Any, Any], Entry]) -> Entry:
    """
    Equal entries are one object: comparing two inventories is then comparing identities.
    """
    entry = seen.get((shape, dtype))
    if entry is None:
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        entry = seen[shape, dtype] = Entry(None if shape is None else tuple(shape), name)
    return entry


def totals(entries: Iterable[Entry]) -> tuple[int, int, int]:
    """
    Keys, elements and bytes. Entries are shared objects, so few multiplications are needed.
    """
    counts = Counter(map(id, entries := list(entries)))
    by_id = {id(entry): entry for entry in entries}
    elements = sum(n * by_id[key].elements for key, n in counts.items())
    return len(entries), elements, sum(n * by_id[key].nbytes for key, n in counts.items())
