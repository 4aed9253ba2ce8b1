"""
What a module wants and what a state dict holds, as inventories: names, shapes, dtypes and ties.

The module is walked, its `state_dict()` is never called: that would run hooks of the host, collectives among them. No
value is read and nothing is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import CheckpointSummary, ModelSummary
from ckpt_sentry.model.tensors import PLAIN, local_parts

_EXTRA_STATE = "_extra_state"
_NO_ENTRY = Entry(None, None)


def parts_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """
    List the module and all in it with their paths, as `named_modules(remove_duplicate=False)` does, at a third of its
    cost. A module that is reachable by two paths is there under both.

    :raises RecursionError: a module is within itself.
    """
    found = [("", module)]
    _add_parts(found, module, "")
    return found


def _add_parts(found: list[tuple[str, torch.nn.Module]], module: torch.nn.Module, prefix: str) -> None:
    for name, part in module._modules.items():
        if part is not None:
            path = prefix + name
            found.append((path, part))
            if part._modules:
                _add_parts(found, part, f"{path}.")


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield each parameter and persistent buffer with its key in a state dict; shared ones under each of their names.

    A module that is reachable by two paths is walked on both, as `nn.Module.state_dict` does.
    """
    return tensors_in(parts_of(module))


def tensors_in(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield what each of these modules holds itself, with the module's path before its name.
    """
    for path, part in parts:
        prefix = f"{path}." if path else ""
        for name, value in part._parameters.items():
            if value is not None:
                yield prefix + name, value
        transient = part._non_persistent_buffers_set
        for name, value in part._buffers.items():
            if value is not None and name not in transient:
                yield prefix + name, value


def tensor_at(module: torch.nn.Module, key: str) -> torch.Tensor | None:
    """
    The parameter or buffer that a key names; None where there is none.
    """
    path, _, name = key.rpartition(".")
    part: torch.nn.Module | None = module
    for step in path.split(".") if path else ():
        # The dictionaries of a scripted module have no `get`.
        part = part._modules[step] if part is not None and step in part._modules else None
    if part is None:
        return None
    held = (part._parameters, part._buffers)
    return next((values[name] for values in held if name in values), None)


def own_tensors(module: torch.nn.Module, state_dict: Any) -> int:
    """
    Count the tensors of a dict that are the module's own, under their names. Costs next to nothing where neither the
    first nor the last of them is.
    """
    if not isinstance(state_dict, dict) or not state_dict:
        return 0
    edges = (next(iter(state_dict)), next(reversed(state_dict)))
    if not any(_is_own(tensor_at(module, str(key)), state_dict[key]) for key in edges):
        return 0
    return sum(_is_own(mine, state_dict.get(key)) for key, mine in tensors_of(module))


def _is_own(mine: torch.Tensor | None, value: object) -> bool:
    if mine is None or value is None:
        return False
    if mine is value:
        return True
    ours, theirs = local_parts(mine), local_parts(value)
    return len(ours) == len(theirs) > 0 and all(map(_is_one, ours, theirs))


def _is_one(mine: torch.Tensor, other: torch.Tensor) -> bool:
    if type(mine) not in PLAIN or type(other) not in PLAIN or mine.shape != other.shape:
        return False
    if mine.is_meta or mine.layout is not torch.strided or other.layout is not torch.strided or not mine.numel():
        return False
    is_one: bool = mine.data_ptr() == other.data_ptr()
    return is_one


def transient_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield each buffer that is not in a state dict (`persistent=False`) with its name.
    """
    for path, part in parts_of(module):
        for name in part._non_persistent_buffers_set:
            if (value := part._buffers.get(name)) is not None:
                yield f"{path}.{name}" if path else name, value


def is_partly_meta(module: torch.nn.Module) -> bool:
    """
    Whether a tensor in the module is on the meta device. Asked at every load, so it is not to take longer than it must.
    """
    for held in (module._parameters, module._buffers):
        for value in held.values():
            if value is not None and value.is_meta:
                return True
    return any(part is not None and is_partly_meta(part) for part in module._modules.values())


def model_inventory(module: torch.nn.Module) -> Inventory:
    """
    Give what the module wants filled. Names of one tensor, or of one storage seen in one shape, are tied.
    """
    seen: dict[tuple[Any, Any], Entry] = {}
    entries: dict[str, Entry] = {}
    owners: dict[Any, str] = {}
    ties: dict[str, str] = {}
    parts = parts_of(module)
    for key, value in tensors_in(parts):
        entries[key] = _entry(value, seen)
        owner = owners.setdefault(_storage(value), key)
        if owner != key:
            ties[key] = owner
    for path, part in parts:
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            entries[f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE] = _NO_ENTRY
    return Inventory(entries, ties)


def state_inventory(state_dict: Mapping[Any, Any]) -> Inventory:
    """
    Give what a state dict holds, by name. What is no tensor has neither shape nor dtype.
    """
    seen: dict[tuple[Any, Any], Entry] = {}
    return Inventory({str(key): _entry(value, seen) for key, value in state_dict.items()})


def tree_inventory(tree: Any, prefix: str = "") -> Inventory:
    """
    Give what nested mappings, lists and tuples hold, by the path of each leaf: "optimizer.state.0.exp_avg". Of tensors
    that share their memory the first one has it, the others are tied to it.
    """
    leaves: dict[str, Any] = {}
    _add_leaves(leaves, tree, prefix)
    seen: dict[tuple[Any, Any], Entry] = {}
    owners: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for key, value in leaves.items():
        if isinstance(value, torch.Tensor) and (owner := owners.setdefault(_storage(value), key)) != key:
            ties[key] = owner
    return Inventory({key: _entry(value, seen) for key, value in leaves.items()}, ties)


def _add_leaves(leaves: dict[str, Any], tree: Any, path: str) -> None:
    if isinstance(tree, Mapping):
        branches: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        branches = enumerate(tree)
    else:
        leaves[path] = tree
        return
    for name, branch in branches:
        _add_leaves(leaves, branch, f"{path}.{name}" if path else str(name))


def model_summary(model: Inventory) -> ModelSummary:
    """
    Count what a model wants filled, tied tensors once.
    """
    return ModelSummary(*_totals(model))


def checkpoint_summary(checkpoint: Inventory) -> CheckpointSummary:
    """
    Count what a checkpoint holds.
    """
    return CheckpointSummary(*_totals(checkpoint))


def _totals(inventory: Inventory) -> tuple[int, int, int]:
    # Equal entries are one object here: few multiplications are needed.
    entries = list(inventory.storages().values())
    counts = Counter(map(id, entries))
    by_id = {id(entry): entry for entry in entries}
    elements = sum(n * by_id[one].elements for one, n in counts.items())
    return len(entries), elements, sum(n * by_id[one].nbytes for one, n in counts.items())


def _storage(value: torch.Tensor) -> Any:
    """
    What two names have in common where they are tied: the tensor itself, or the memory that it begins at.
    """
    if type(value) in PLAIN and not value.is_meta and value.layout is torch.strided:
        place = value.data_ptr()
        if place and value.numel():
            return place, value.dtype, value.shape, value.stride()
    return id(value)


def _entry(value: Any, seen: dict[tuple[Any, Any], Entry]) -> Entry:
    # A lazy module's parameter has no shape before the first forward or load.
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return _NO_ENTRY
    shape, dtype = value.shape, value.dtype
    entry = seen.get((shape, dtype))
    if entry is None:
        entry = seen[shape, dtype] = Entry(tuple(shape), str(dtype).removeprefix("torch."))
    return entry
