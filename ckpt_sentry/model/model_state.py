"""
What a loader wants filled in a module: its inventory, and what the module's classes and wrappers say about its names.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final

import torch

from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.model import inventories
from ckpt_sentry.model.tensors import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_WRAPPED: Final = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Whose child `set_model_state_dict` leaves out of the names (torch/distributed/checkpoint/state_dict.py:189)."""
_CHECKPOINT_WRAPPER: Final = "_checkpoint_wrapped_module."
_FSDP_WRAPPER: Final = "_fsdp_wrapped_module."
_SHARDED: Final = "FullyShardedDataParallel"
_FLAT: Final = "_flat_param"
_USUAL: Final = PLAIN | {type(None)}
_QUANTIZED: Final = frozenset({"Int8Params", "FP4Params", "Params4bit", "QTensor", "QBitsTensor"})
_ADAPTER: Final = (
    *("lora_", "ia3_", "vera_", "hada_", "lokr_", "adapter_", "trainable_tokens_"),
    *("prompt_encoder", "prompt_embeddings", "modules_to_save"),
)
_COUNTERS: Final = "num_batches_tracked"
"""Batch normalization counts batches since torch 0.4.1; older checkpoints lack it and load well (batchnorm.py:109)."""


def inventory(model: torch.nn.Module) -> Inventory:
    """
    The persistent state of a model under the names of its state dict, where activation checkpointing and FSDP leave no
    trace. What FSDP (the first version) holds in a flat parameter is there under its own names and shapes.
    """
    found = inventories.model_inventory(model)
    if not any(wrapper in name for name in found.entries for wrapper in (_CHECKPOINT_WRAPPER, _FSDP_WRAPPER)):
        return found
    entries = {bare(name): entry for name, entry in found.entries.items() if not name.endswith(_FLAT)}
    ties = {bare(name): bare(owner) for name, owner in found.ties.items() if not name.endswith(_FLAT)}
    for path, part in inventories.parts_of(model):
        flat = getattr(part.__dict__.get("_handle"), "flat_param", None)
        if flat is not None and type(part).__name__ == _SHARDED:
            _unflatten(flat, bare(f"{path}.") if path else "", entries, ties)
    return Inventory(entries, ties)


def _unflatten(flat: Any, prefix: str, entries: dict[str, Entry], ties: dict[str, str]) -> None:
    """
    Add what a flat parameter stands for (torch/distributed/fsdp/_flat_param.py: `_fqns`, `_shapes`).
    """
    dtype = str(flat.dtype).removeprefix("torch.")
    for name, shape in zip(flat._fqns, flat._shapes, strict=True):
        entries[prefix + bare(name)] = Entry(tuple(shape), dtype)
    for shared in flat._shared_param_infos or ():
        name, owner = (
            prefix + bare(f"{path}.{leaf}" if path else leaf)
            for path, leaf in (
                (shared.module_name, shared.param_name),
                (shared.prim_module_name, shared.prim_param_name),
            )
        )
        entries[name], ties[name] = entries[owner], owner


def bare(name: str) -> str:
    """
    A name without the components of wrappers that `state_dict` leaves out.
    """
    return name.replace(_CHECKPOINT_WRAPPER, "").replace(_FSDP_WRAPPER, "")


def quantized(model: torch.nn.Module) -> frozenset[str]:
    """
    The parameters whose values a quantizer packs: their shapes and values are not those of the checkpoint.
    """
    return frozenset(
        f"{path}.{name}" if path else name
        for path, part in inventories.parts_of(model)
        for name, value in part._parameters.items()
        if type(value) not in _USUAL and (type(value).__name__ in _QUANTIZED or "torchao" in type(value).__module__)
    )


def has_load_hooks(model: torch.nn.Module) -> bool:
    """
    Whether code of the model may rename or change what `nn.Module.load_state_dict` brings in.

    That is a hook before or after the load, or a class outside torch with a `_load_from_state_dict` of its own.
    """
    return any(has_own_names(module) or module._load_state_dict_post_hooks for _, module in inventories.parts_of(model))


def has_own_names(module: torch.nn.Module) -> bool:
    """
    Whether code of this module may rename what comes into it: a hook before the load, or a class outside torch with a
    `_load_from_state_dict` of its own.
    """
    own = type(module)._load_from_state_dict
    is_plain = own is torch.nn.Module._load_from_state_dict or own.__module__.startswith("torch.nn.")
    return bool(module._load_state_dict_pre_hooks) or not is_plain


def is_sharded(model: torch.nn.Module) -> bool:
    """
    Whether FSDP (the first version) wraps a part: then `state_dict` is a collective, and not ours to call.
    """
    return any(type(module).__name__ == _SHARDED for _, module in inventories.parts_of(model))


def bare_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """
    Names as `set_model_state_dict` reads them in a checkpoint, to the model's own: those that differ alone.
    """
    cut = set()
    for path, module in inventories.parts_of(model):
        if (child := _WRAPPED.get(type(module).__name__)) is not None:
            cut.add(bare(f"{path}.{child}".lstrip(".")))
    return {short: name for name in names if (short := _without(name, cut)) != name} if cut else {}


def wrapped_child(model: torch.nn.Module) -> str | None:
    """
    The name under which a wrapper holds the model whose names `set_model_state_dict` takes; None of any other module.
    """
    return _WRAPPED.get(type(model).__name__)


def _without(name: str, cut: Collection[str]) -> str:
    kept, path = [], ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in cut:
            kept.append(part)
    return ".".join(kept)


def without_needless(model: torch.nn.Module, wanted: Inventory, supplied: Mapping[str, Entry]) -> Inventory:
    """
    What is wanted, without the keys that may be missing by the model's own word, where they are missing.

    Those are the patterns in `_keys_to_ignore_on_load_missing` (transformers), counters of batches, state that is no
    tensor, and of a PEFT model that is given an adapter all but that adapter. State of a kind that is not known before
    (`_extra_state`, the parameters of a lazy module) is wanted as it is supplied.
    """
    patterns = _patterns(model, "_keys_to_ignore_on_load_missing")
    is_other = _other_than_adapter(model, wanted, supplied)
    # Where no name fits, the counters are there under other names as well as the rest.
    counts = not any(name in wanted.entries for name in supplied) and any(name.endswith(_COUNTERS) for name in supplied)

    def needless(name: str, entry: Entry) -> bool:
        return (
            entry.shape is None
            or (name.endswith(_COUNTERS) and not counts)
            or is_other(name)
            or any(pattern.search(name) for pattern in patterns)
        )

    undecided = {
        name: supplied[name] for name, entry in wanted.entries.items() if entry.shape is None and name in supplied
    }
    if undecided:
        wanted = Inventory({**wanted.entries, **undecided}, wanted.ties)
    dropped = {name for name, entry in wanted.entries.items() if name not in supplied and needless(name, entry)}
    return _dropping(wanted, dropped) if dropped else wanted


def is_counter(name: str) -> bool:
    """
    Whether a key is a counter of batches, which torch itself adds to a dict that lacks it.
    """
    return name.endswith(_COUNTERS)


def ignores_unexpected(model: torch.nn.Module) -> Callable[[str], bool]:
    """
    The test whether the model does not mind a key that it does not have (`_keys_to_ignore_on_load_unexpected`).
    """
    patterns = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _dropping(wanted: Inventory, dropped: Collection[str]) -> Inventory:
    entries = {name: entry for name, entry in wanted.entries.items() if name not in dropped}
    groups: dict[str, str] = {}
    ties = {}
    for name in entries:
        owner = groups.setdefault(wanted.storage(name), name)
        if owner != name:
            ties[name] = owner
    return Inventory(entries, ties)


def _patterns(model: torch.nn.Module, attribute: str) -> list[re.Pattern[str]]:
    found = []
    # A plain attribute of the class; `getattr` on a compiled module leads to the wrapped one.
    for pattern in getattr(model, attribute, None) or ():
        try:
            found.append(re.compile(pattern))
        except (re.error, TypeError):
            continue
    return found


def _other_than_adapter(
    model: torch.nn.Module, wanted: Inventory, supplied: Mapping[str, Entry]
) -> Callable[[str], bool]:
    """
    The test whether a key is no part of the adapter that is supplied; never so where what is supplied is no adapter.

    An adapter is one of those that the model knows by their names (`peft_config`), which stand in the keys.
    """
    marks = _marks(model)
    if not supplied or not all(_names_adapter(key, marks) for key in supplied):
        return _nothing
    known = getattr(model, "peft_config", None)
    if known is None and not any(_names_adapter(key, marks) for key in wanted.entries):
        return _nothing
    names = frozenset(known) if isinstance(known, dict) else frozenset[str]()
    given = {_adapter_in(key, names, marks) for key in supplied if key in wanted.entries} - {None}

    def is_other(key: str) -> bool:
        return not _names_adapter(key, marks) or (bool(given) and _adapter_in(key, names, marks) not in {None, *given})

    return is_other


def _marks(model: torch.nn.Module) -> tuple[str, ...]:
    """
    What stands in the keys of an adapter: what is known, and what peft's class says of its own kind.
    """
    own = getattr(type(dict(model._modules).get("base_model")), "prefix", None)
    return (*_ADAPTER, own) if isinstance(own, str) and own else _ADAPTER


def _adapter_in(key: str, names: Collection[str], marks: Collection[str]) -> str | None:
    """
    The name of the adapter that a key is of: it stands behind the component that says what kind of adapter it is.
    """
    steps = itertools.pairwise(key.split("."))
    return next((name for before, name in steps if name in names and _names_adapter(before, marks)), None)


def fills_prompt(model: torch.nn.Module, state_dict: Mapping[Any, Any]) -> bool:
    """
    Whether peft gives this dict to the model first, which has no use for it, and then itself to the encoder of its
    prompt (peft/utils/save_and_load.py, `set_peft_model_state_dict`).
    """
    known = getattr(model, "peft_config", None)
    if not isinstance(known, dict) or "prompt_embeddings" not in set(state_dict):
        return False
    return any(getattr(one, "is_prompt_learning", False) is True for one in known.values())


def _nothing(_name: str) -> bool:
    return False


def _names_adapter(name: str, marks: Collection[str]) -> bool:
    return any(mark in name for mark in marks)
