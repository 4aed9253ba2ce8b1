"""
torch_checkpointing: `CheckpointManager.load` and `CheckpointLoader.load` (torch_checkpointing 0.1.1).

What is watched, and why there:

* `checkpoint_manager.CheckpointManager.load` (checkpoint_manager.py:206), which goes on to
  `checkpoint_loader.CheckpointLoader.load` (checkpoint_loader.py:84), which may be called by itself. With
  `strict=False`, their default, what the checkpoint lacks is skipped: at most the library's own log says so.
* `checkpoint_reader.CheckpointReader.read` (checkpoint_reader.py:101): it returns the keys that were missing, as
  "item::path", also where the items were resharded.

The names that the checkpoint has instead are read from the headers of the files `ITEM_RANK.pt`, the default layout.
The caller's `strict=False` in so many words asks for a part.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckpt_sentry.formats import state_file
from ckpt_sentry.integrations.base import Asked, Call, Comparison, Integration, Inventory, Loader, Part, tree_inventory

if TYPE_CHECKING:
    from ckpt_sentry.formats.state_file import StateFile

_READ = "CheckpointReader.read"


def _path(call: Call) -> str:
    return os.fsdecode(call.arguments.get("checkpoint_id") or call.arguments["path"])


def _asked(call: Call) -> Asked:
    return "part" if "strict" in call.given and not call["strict"] else "something"


def _compare(call: Call) -> Comparison | None:
    if (read := call.parts.get(_READ)) is None:
        return None
    items = read["checkpoint_info"].checkpoint_items
    wanted = tree_inventory({name: item.value for name, item in items.items()})
    rank = read["self"]._rank_info.global_rank
    files = {name: file for name, item in items.items() if (file := _file(_path(call), name, item, rank)) is not None}
    held = {f"{name}.{key}": entry for name, file in files.items() for key, entry in file.inventory.entries.items()}
    if read.result is not None:
        missing = _below({key.replace("::", ".", 1) for key in read.result[1]}, wanted)
    elif files.keys() == items.keys():
        missing = frozenset(wanted.entries.keys() - held.keys())
    else:
        return None
    came = {key: held.get(key, entry) for key, entry in wanted.entries.items() if key not in missing}
    # Of nested items the header has no names; what is not the model's of a flat one explains what is missing.
    others = {key: entry for key, entry in held.items() if key not in wanted.entries} if missing else {}
    return Comparison(wanted, Inventory(came | others), files=len(files) or None, format="torch_checkpointing")


def _below(paths: Collection[str], wanted: Inventory) -> frozenset[str]:
    """
    The keys that are missing: a path that is, is so with all below it.
    """
    return frozenset(key for key in wanted.entries if any(path in paths for path in _paths_to(key)))


def _paths_to(key: str) -> Iterator[str]:
    place = len(key)
    while place != -1:
        yield key[:place]
        place = key.rfind(".", 0, place)


def _file(path: str, name: str, item: Any, rank: int) -> StateFile | None:
    """
    The header of an item's file in the default layout, where that item is a flat state dict.
    """
    place = os.path.join(path, f"{name}_{rank}.pt")
    values = item.value.values() if isinstance(item.value, Mapping) else (item.value,)
    is_flat = isinstance(item.value, Mapping) and not any(isinstance(one, Mapping | list) for one in values)
    if item.layout is not None or not is_flat or not os.path.isfile(place):
        return None
    file = state_file.read(place)
    return file if file.readable else None


INTEGRATION = Integration(
    name="torch_checkpointing",
    loaders=(
        Loader("torch_checkpointing.checkpoint_manager:CheckpointManager.load", _path, _compare, _asked),
        Loader("torch_checkpointing.checkpoint_loader:CheckpointLoader.load", _path, _compare, _asked),
    ),
    parts=(Part(f"torch_checkpointing.checkpoint_reader:{_READ}", phase="read"),),
    part_step="CheckpointManager.load(…, strict=False)",
)
