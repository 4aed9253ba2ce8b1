"""
What a loader wants filled in a module: its inventory, and what the module's classes and wrappers say about its names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch

from ckpt_sentry.audit.inventory import Entry, Inventory
from ckpt_sentry.targets import module_facts
from ckpt_sentry.targets.tensors import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_WRAPPED: Final = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Whose child `set_model_state_dict` leaves out of the names (torch/distributed/checkpoint/state_dict.py:189)."""
_CHECKPOINT_WRAPPER: Final = "_checkpoint_wrapped_module."
_USUAL: Final = PLAIN | {type(None)}
_QUANTIZED: Final = frozenset({"Int8Params", "FP4Params", "Params4bit", "QTensor", "QBitsTensor"})
_ADAPTER: Final = ("lora_", "ia3_", "vera_", "adapter_", "prompt_encoder", "prompt_embeddings", "modules_to_save")
_COUNTERS: Final = "num_batches_tracked"
"""Batch normalization counts batches since torch 0.4.1; older checkpoints lack it and load well (batchnorm.py:109)."""


def inventory(model: torch.nn.Module) -> Inventory:
    """
    The persistent state of a model under the names of its state dict, where activation checkpointing leaves no trace.
    """
    found = module_facts.model_inventory(model)
    if not any(_CHECKPOINT_WRAPPER in name for name in found.entries):
        return found
    entries = {name.replace(_CHECKPOINT_WRAPPER, ""): entry for name, entry in found.entries.items()}
    ties = {
        name.replace(_CHECKPOINT_WRAPPER, ""): owner.replace(_CHECKPOINT_WRAPPER, "")
        for name, owner in found.ties.items()
    }
    return Inventory(entries, ties)


def quantized(model: torch.nn.Module) -> frozenset[str]:
    """
    The parameters whose values a quantizer packs: their shapes and values are not those of the checkpoint.
    """
    return frozenset(
        f"{path}.{name}" if path else name
        for path, part in module_facts.parts_of(model)
        for name, value in part._parameters.items()
        if type(value) not in _USUAL and (type(value).__name__ in _QUANTIZED or "torchao" in type(value).__module__)
    )


def has_load_hooks(model: torch.nn.Module) -> bool:
    """
    Whether code of the model may rename or change what `nn.Module.load_state_dict` brings in.

    That is a hook before or after the load, or a class outside torch with a `_load_from_state_dict` of its own.
    """
    for _, module in module_facts.parts_of(model):
        if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            return True
        own = type(module)._load_from_state_dict
        if own is not torch.nn.Module._load_from_state_dict and not own.__module__.startswith("torch.nn."):
            return True
    return False


def is_sharded(model: torch.nn.Module) -> bool:
    """
    Whether FSDP (the first version) wraps a part: then `state_dict` is a collective, and not ours to call.
    """
    return any(type(module).__name__ == "FullyShardedDataParallel" for _, module in module_facts.parts_of(model))


def bare_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """
    Names as `set_model_state_dict` reads them in a checkpoint, to the model's own: those that differ alone.
    """
    cut = set()
    for path, module in module_facts.parts_of(model):
        if (child := _WRAPPED.get(type(module).__name__)) is not None:
            cut.add(f"{path}.{child}".lstrip(".").replace(_CHECKPOINT_WRAPPER, ""))
    return {bare: name for name in names if (bare := _without(name, cut)) != name} if cut else {}


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
    tensor, and of a PEFT model that is given an adapter all but its adapter. State of a kind that is not known before
    (`_extra_state`, the parameters of a lazy module) is wanted as it is supplied.
    """
    patterns = _patterns(model, "_keys_to_ignore_on_load_missing")
    is_adapter = _is_adapter(model, wanted, supplied)

    def needless(name: str, entry: Entry) -> bool:
        return (
            entry.shape is None
            or name.endswith(_COUNTERS)
            or (is_adapter and not _names_adapter(name))
            or any(pattern.search(name) for pattern in patterns)
        )

    undecided = {
        name: supplied[name] for name, entry in wanted.entries.items() if entry.shape is None and name in supplied
    }
    if undecided:
        wanted = Inventory({**wanted.entries, **undecided}, wanted.ties)
    dropped = {name for name, entry in wanted.entries.items() if name not in supplied and needless(name, entry)}
    return _dropping(wanted, dropped) if dropped else wanted


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


def _is_adapter(model: torch.nn.Module, wanted: Inventory, supplied: Mapping[str, Entry]) -> bool:
    if not supplied or not all(map(_names_adapter, supplied)):
        return False
    return hasattr(model, "peft_config") or any(map(_names_adapter, wanted.entries))


def _names_adapter(name: str) -> bool:
    return any(part in name for part in _ADAPTER)
