"""
What a call of `nn.Module.load_state_dict` came to: facts and findings from the module, the dict and torch's own lists.

torch's lists of missing and unexpected keys are the truth: load hooks of the host may rename keys, add or drop them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ckpt_sentry import config
from ckpt_sentry.audit.coverage import FULL, coverage
from ckpt_sentry.audit.escape import shown
from ckpt_sentry.audit.examine import Examination, examine
from ckpt_sentry.audit.findings import anew, renaming
from ckpt_sentry.audit.findings import keys as count_keys
from ckpt_sentry.audit.fold import key_list
from ckpt_sentry.audit.inventory import Entry, Inventory
from ckpt_sentry.audit.report import CheckpointSummary, Facts, Finding, ModelSummary
from ckpt_sentry.checkpoints.paths import mask
from ckpt_sentry.checkpoints.step import find_step
from ckpt_sentry.targets import model_state, module_facts, provenance

if TYPE_CHECKING:
    from ckpt_sentry.audit.report import Level

_NO_ENTRY = Entry(None, None)
_SHOWN_BYTES = 200
_ABSENCES = frozenset({"missing_keys", "block_lost", "kind_lost"})
_DECISIVE = frozenset({"missing_keys", "unexpected_keys", "renamed_keys"})


class Lists(NamedTuple):
    """
    The keys that `load_state_dict` did not find in the dict, and those that it had no use for.
    """

    missing: Collection[str]
    unexpected: Collection[str]


class Judgement(NamedTuple):
    """
    What is said of a load, how it was found out, and what the module wanted filled.
    """

    facts: Facts
    examination: Examination
    wanted: Inventory


class MetaWords(NamedTuple):
    """
    How it is said that tensors have no values: of all, of `some` ("1 of 2 keys is"), and what to do.
    """

    whole: str
    part: str
    step: str


COPIED = MetaWords(
    "The module is on the meta device, where there is nothing to copy {count} into.",
    "{some} on the meta device, where there is nothing to copy into",
    "load_state_dict(…, assign=True), or module.to_empty(device=…) first.",
)
ASSIGNED = MetaWords(
    "The dict is on the meta device: the module has no values for {count}.",
    "{some} on the meta device in the dict: the module has no values for them",
    "Read the file outside of torch.device('meta'), with map_location='cpu'.",
)


def lists_of(error: BaseException) -> Lists | None:
    """
    The lists of a call that has raised, from the frame of `load_state_dict` in its traceback (module.py:2586).

    The outermost one counts: a hook may load other modules within.
    """
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_name == "load_state_dict" and "error_msgs" in code.co_varnames + code.co_cellvars:
            found = step.tb_frame.f_locals
            missing, unexpected = found.get("missing_keys"), found.get("unexpected_keys")
            if isinstance(missing, list) and isinstance(unexpected, list):
                return Lists(missing, unexpected)
        step = step.tb_next
    return None


def whole(module: torch.nn.Module, state_dict: Mapping[Any, Any]) -> Facts:
    """
    The facts of a load that lacked nothing.
    """
    # Counted without an inventory, whose shapes take long to ask for.
    tensors = _tensors(module, state_dict)
    elements, size = sum(map(torch.numel, tensors)), sum(value.numel() * value.element_size() for value in tensors)
    return replace(
        located(state_dict),
        checkpoint=CheckpointSummary(len(state_dict), elements, size),
        model=ModelSummary(len(state_dict), elements, size),
        coverage=FULL,
        utilisation=1.0,
    )


def on_meta(module: torch.nn.Module) -> frozenset[str]:
    """
    The names of tensors that are on the meta device after a load: nothing came into them.
    """
    if not module_facts.is_partly_meta(module):
        return frozenset()
    return frozenset(name for name, value in module_facts.tensors_of(module) if value.is_meta)


def unfilled(
    facts: Facts, module: torch.nn.Module, lacking: Collection[str], empty: Collection[str], words: MetaWords
) -> Facts:
    """
    The facts of a load of which nothing came into the tensors named in `empty`. `lacking` are the keys that were not in
    the dict either.
    """
    wanted = module_facts.model_inventory(module)
    entered = [name for name in wanted.entries if name not in lacking and name not in empty]
    part = coverage(wanted, entered, config.settings().allow_missing)
    used = part.elements if facts.utilisation is None else min(facts.utilisation, part.elements)
    names, count = [name for name in wanted.entries if name in empty], count_keys(len(wanted.entries))
    text = words.whole.format(count=count)
    if len(names) < len(wanted.entries):
        listed = ", ".join(key_list(names, _SHOWN_BYTES).keys)
        verb = "is" if len(names) == 1 else "are"
        text = words.part.format(some=f"{len(names):,} of {count} {verb}") + f": {listed}."
    found = Finding("meta_left", "warning", text, words.step)
    return replace(facts, coverage=part, utilisation=used).with_findings([found])


def _tensors(module: torch.nn.Module, state_dict: Mapping[Any, Any]) -> list[torch.Tensor]:
    """
    The tensors of a dict. A mapping of another kind may read each value from a file when it is asked: the module's own.
    """
    if isinstance(state_dict, dict):
        return [value for value in state_dict.values() if isinstance(value, torch.Tensor)]
    return [value for _, value in module_facts.tensors_of(module) if not is_lazy(value)]


def judged(module: torch.nn.Module, state_dict: Mapping[Any, Any], lists: Lists, remedy: str = "") -> Judgement:
    """
    Judge a load that lacked keys or was offered too many. `remedy` is the caller's call with the keys renamed.
    """
    found, model, given = _examined(module, state_dict, lists)
    if remedy:
        found = replace(found, findings=renaming(found.findings, f"Rename its keys: {remedy}."))
    facts = replace(
        located(state_dict),
        checkpoint=module_facts.checkpoint_summary(given),
        model=module_facts.model_summary(model),
    ).examined(found)
    nested = nested_finding(state_dict, model, lists.unexpected) if isinstance(state_dict, dict) else None
    if nested is not None:
        # That it holds no key of the model's follows from this.
        rest = (finding for finding in facts.findings if finding.code != "no_overlap")
        explained = (replace(finding, next=None) if finding.code in _ABSENCES else finding for finding in rest)
        facts = replace(facts, findings=(nested, *explained))
    return Judgement(facts, found, model)


def compared(module: torch.nn.Module, offered: Iterable[str]) -> Lists | None:
    """
    The lists by the names alone, for `set_model_state_dict`, which leaves wrappers out of them; None where FSDP holds
    the parameters under names of its own.
    """
    if model_state.is_sharded(module):
        return None
    wanted = model_state.inventory(module).entries
    bare = model_state.bare_names(module, wanted)
    given = {bare.get(key, key) for key in offered}
    return Lists(wanted.keys() - given, given - wanted.keys())


def located(state_dict: Mapping[Any, Any]) -> Facts:
    """
    The file that the values were read from, as far as this process knows.
    """
    path = provenance.origin(state_dict)
    if path is None:
        return Facts()
    step = find_step(path)
    written = provenance.written(path)
    return Facts(
        path=mask(path),
        format="safetensors" if path.endswith(".safetensors") else "torch_save",
        step=step.value if step else None,
        step_source=step.source if step else None,
        findings=(written,) if written else (),
    )


def softened(facts: Facts) -> Facts:
    """
    The facts of a load that brought in all that it was offered, where the caller had asked for no more (adapters, a
    shard): what is missing is information.
    """
    return _leveled(facts, _ABSENCES, "info")


def decisive(facts: Facts, lists: Lists) -> Facts:
    """
    The facts of a load that torch refused: what it refused it for are errors.
    """
    facts = _leveled(facts, _DECISIVE, "error")
    facts = replace(facts, findings=anew(facts.findings, "load_state_dict(…, strict=False)"))
    names = set(lists.missing)
    if facts.missing.count or not names or facts.unexpected.count:
        return facts
    listed = ", ".join(key_list(names, _SHOWN_BYTES).keys)
    verb = "is only another name" if len(names) == 1 else "are only other names"
    text = f"{count_keys(len(names))} {verb} of what the checkpoint has: {listed}. Nothing is lacking."
    step = "load_state_dict(…, strict=False), or tie the weights after the load."
    return facts.with_findings([Finding("tied_keys_missing", "error", text, step)])


def nested_finding(state_dict: Mapping[Any, Any], model: Inventory, unexpected: Iterable[str]) -> Finding | None:
    """
    Say where the state dict really is, if it lies under one of the unexpected keys.
    """
    best: tuple[int, int, str] | None = None
    for key in unexpected:
        inner = state_dict.get(key)
        if isinstance(inner, Mapping):
            tensors = sum(isinstance(value, torch.Tensor) for value in inner.values())
            matching = sum(name in model.entries for name in inner)
            if tensors:
                best = max(best or (0, 0, ""), (matching, tensors, key))
    if best is None or not best[1]:
        return None
    matching, tensors, key = best
    text = f"The state dict ({count_keys(tensors)}) is one level down, under {shown(repr(key))}"
    text += f": {matching:,} of them {'is a key' if matching == 1 else 'are keys'} of this model."
    return Finding("nested_state_dict", "error", text, f"Pass state_dict[{shown(repr(key))}] on.")


def _examined(
    module: torch.nn.Module, state_dict: Mapping[Any, Any], lists: Lists
) -> tuple[Examination, Inventory, Inventory]:
    wanted = module_facts.model_inventory(module)
    strange = {key: _NO_ENTRY for key in lists.missing if key not in wanted.entries}
    if strange:  # keys of classes that load in a way of their own
        wanted = Inventory({**wanted.entries, **strange}, wanted.ties)
    # Asking a mapping of another kind for its values may read them all from a file once more.
    given = module_facts.state_inventory(state_dict).entries if isinstance(state_dict, dict) else {}
    missing = set(lists.missing)
    came = {key: given.get(key, entry) for key, entry in wanted.entries.items() if key not in missing}
    came.update((key, given.get(key, _NO_ENTRY)) for key in lists.unexpected)
    model = model_state.without_needless(module, wanted, came)
    checkpoint = Inventory(came)
    return examine(model, checkpoint, allow_missing=config.settings().allow_missing), model, checkpoint


def _leveled(facts: Facts, codes: Collection[str], level: Level) -> Facts:
    return replace(
        facts,
        findings=tuple(
            replace(finding, level=level) if finding.code in codes else finding for finding in facts.findings
        ),
    )
