"""
What `load_adapter` of a model of transformers came to: how much of the adapter that it has just put in was filled.

transformers warns of keys that are missing and returns (integrations/peft.py:80): an adapter of which no key matches
has no effect at all, since LoRA begins as zero.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.integrations.transformers import judge as transformers_judge
from ckpt_sentry.model import inventories
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_sentry.session.loads import Load

_PARAMETERS: Final = ("peft_model_id", "adapter_name")
_DEFAULT: Final = "default"
_NO_ENTRY: Final = Entry(None, None)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """
    The model, the adapter's name, and the keys of the model before it came.
    """

    model: Any
    name: str
    before: frozenset[str]


def begin(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Load | None:
    """
    Open the load of an adapter into a model, which may be a part of `from_pretrained` and is a checkpoint of its own.
    """
    given = dict(zip(_PARAMETERS, args, strict=False), **kwargs)
    name = given.get("peft_model_id")
    path = None if name is None else os.fspath(name)
    local = path if path is not None and os.path.isdir(path) else None
    step = None if local is None else find_step(local)
    before = frozenset(key for key, _ in inventories.tensors_of(model))
    load = loads.begin("transformers", f"{type(model).__name__}.load_adapter", path)
    if load is not None:
        load.keep(_Adapter(model, given.get("adapter_name") or _DEFAULT, before))
        load.facts = load.facts.at_step(step)
    return load


def judge(info: Any, load: Load) -> None:
    """
    Judge a load that has returned `info`.

    Raises:
        LowCoverageError: under `CKPT_SENTRY=strict`, some of the adapter is not the checkpoint's.
    """
    wanted = _wanted(load)
    missing = wanted.entries.keys() & set(info.missing_keys)
    came = {key: entry for key, entry in wanted.entries.items() if key not in missing}
    came.update((key, Entry(tuple(shape), None)) for key, shape, _ in info.mismatched_keys if key in came)
    came.update(dict.fromkeys(info.unexpected_keys, _NO_ENTRY))
    found = examine(wanted, Inventory(came), allow_missing=config.settings().allow_missing)
    load.facts = replace(
        load.facts,
        model=inventories.model_summary(wanted),
        checkpoint=transformers_judge.summary(load, Inventory(came)),
        format=transformers_judge.format_of(load),
    ).examined(found)
    error = refusal(load.entry_point, load.facts, wanted, found.difference.missing, asked="part")
    if error is not None:
        raise error


def _wanted(load: Load) -> Inventory:
    """
    The tensors that bear the adapter's name: those that came with it or, where it was there before, all of them.
    """
    adapter = load.state(_Adapter)
    if adapter is None:
        return Inventory()
    whole = inventories.model_inventory(adapter.model)
    named = {key: entry for key, entry in whole.entries.items() if adapter.name in key.split(".")}
    fresh = {key: entry for key, entry in named.items() if key not in adapter.before}
    entries = fresh or named
    return Inventory(entries, {key: owner for key, owner in whole.ties.items() if key in entries and owner in entries})
