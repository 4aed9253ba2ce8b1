"""
What a rank's plan reads of what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_sentry.model.tensors import PLAIN, local_parts
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_sentry.core.inventory import Inventory


def items_of(plan: Any) -> Sequence[Any] | None:
    """
    A plan's items; None where there is no plan, or where looking at them would use them up.
    """
    items = getattr(plan, "items", None)
    return items if isinstance(items, (list, tuple)) else None


def elements_read(items: Iterable[Any]) -> dict[str, int]:
    """
    How many elements a plan's items read of each key; what is no tensor has none, and is there.
    """
    by_key: dict[str, list[Any]] = {}
    for item in items:
        by_key.setdefault(item.dest_index.fqn, []).append(item)
    return {key: volume(items) for key, items in by_key.items()}


def volume(items: Sequence[Any]) -> int:
    """
    How many elements the items of one key read. What is read twice counts once: it may stand for what is not read.
    """
    if len(items) == 1:
        return int(items[0].lengths.numel())
    regions = {(item.dest_index.offset, item.dest_offsets, item.lengths): item.lengths for item in items}
    return sum(lengths.numel() for lengths in regions.values())


def reads(
    plan: Any, wanted: Mapping[str, Any], model: Inventory, checkpoint: Inventory
) -> tuple[dict[str, float] | None, int]:
    """
    What this rank will read of what it holds: the fraction of each key that is not read whole, and bytes in all.

    A key whose entries differ on both sides has a fraction in any case: it tells that the values are read all the same.
    """
    items = items_of(plan)
    if items is None:
        return None, 0
    read = elements_read(items)
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
        if is_same and elements >= size[0] and type(value) in PLAIN:
            continue
        local = _held(value)
        if local and (elements < local or not is_same):
            fractions[key] = min(1.0, elements / local)
    return fractions, bytes_read


def _held(value: Any) -> int:
    """
    Elements that this rank holds of a tensor; 0 where that cannot be told.
    """
    try:
        return sum(part.numel() for part in local_parts(value))
    except Exception as error:  # a tensor may refuse anything
        let_through(error)
        return 0
