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
from ckpt_sentry.core.policy import Policy
from ckpt_sentry.core.verdict import verdict
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.integrations.exceptions import describe
from ckpt_sentry.integrations.torch_module.report import SOMETHING
from ckpt_sentry.integrations.transformers import judge as transformers_judge
from ckpt_sentry.model import inventories
from ckpt_sentry.render import refusals
from ckpt_sentry.session import loads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_sentry.session.loads import Load

_PARAMETERS: Final = ("peft_model_id", "adapter_name")
_DEFAULT: Final = "default"
_NO_ENTRY: Final = Entry(None, None)


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
        load.notes.update(before=before, adapter=given.get("adapter_name") or _DEFAULT)
        load.facts = replace(load.facts, step=step.value if step else None, step_source=step.source if step else None)
    return load


def conclude(load: Load, model: Any, info: Any, error: BaseException | None) -> None:
    """
    Finish the load: what the adapter lacks is said, and refused where the settings refuse every part.

    Raises:
        LowCoverageError: under `CKPT_SENTRY=strict`, some of the adapter is not the checkpoint's.
    """
    if error is not None:
        transformers_judge.failed(load, error)
        return
    wanted = _adapter(load, model)
    missing = wanted.entries.keys() & set(info.missing_keys)
    came = {key: entry for key, entry in wanted.entries.items() if key not in missing}
    came.update((key, Entry(tuple(shape), None)) for key, shape, _ in info.mismatched_keys if key in came)
    came.update(dict.fromkeys(info.unexpected_keys, _NO_ENTRY))
    settings = config.settings()
    found = examine(wanted, Inventory(came), allow_missing=settings.allow_missing)
    load.facts = replace(
        load.facts,
        model=inventories.model_summary(wanted),
        checkpoint=transformers_judge.summary(load, Inventory(came)),
        format=transformers_judge.format_of(load),
    ).examined(found)
    refusal = None
    if Policy(mode=settings.mode, minimum=SOMETHING, tolerated=True).refusal(load.facts.coverage) is not None:
        text = refusals.loaded(load.entry_point, load.facts, wanted, found.difference.missing, 1.0)
        refusal = LowCoverageError(text)
    described = None if refusal is None else describe(refusal, None)
    if described is not None:
        load.failing(described)
    report = load.finish(verdict(coverage=load.facts.coverage, findings=load.facts.findings), described)
    if refusal is not None:
        refusal.ckpt_sentry = report
        raise refusal


def _adapter(load: Load, model: Any) -> Inventory:
    """
    The tensors that bear the adapter's name: those that came with it or, where it was there before, all of them.
    """
    name, before = load.notes["adapter"], load.notes["before"]
    whole = inventories.model_inventory(model)
    named = {key: entry for key, entry in whole.entries.items() if name in key.split(".")}
    fresh = {key: entry for key, entry in named.items() if key not in before}
    entries = fresh or named
    return Inventory(entries, {key: owner for key, owner in whole.ties.items() if key in entries and owner in entries})
