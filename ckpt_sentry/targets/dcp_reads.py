"""
What a rank's plan reads of what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_sentry.targets.tensors import PLAIN, local_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt_sentry.audit.inventory import Inventory


def elements_read(items: Iterable[Any]) -> dict[str, int]:
    """
    How many elements a plan's items read of each key; what is no tensor has none, and is there.
    """
    read: dict[str, int] = {}
    for item in items:
        key = item.dest_index.fqn
        read[key] = read.get(key, 0) + item.lengths.numel()
    return read


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
        local = sum(part.numel() for part in local_parts(value))
        if local and (elements < local or not is_same):
            fractions[key] = min(1.0, elements / local)
    return fractions, bytes_read
