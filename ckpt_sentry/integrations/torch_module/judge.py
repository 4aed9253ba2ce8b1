"""
What a call of `nn.Module.load_state_dict` came to: facts and findings from the module, the dict and torch's own lists.

torch's lists of missing and unexpected keys are the truth: load hooks of the host may rename keys, add or drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ckpt_sentry import config
from ckpt_sentry.core import codes
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import FULL, CheckpointSummary, Facts, Finding, ModelSummary
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.model import hints, inventories, model_state, provenance
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core.coverage import coverage
    from ckpt_sentry.core.examine import Examination, examine
    from ckpt_sentry.core.findings import anew, renaming, verb
    from ckpt_sentry.core.findings import keys as count_keys
    from ckpt_sentry.core.fold import key_list
    from ckpt_sentry.core.report import Level
else:
    verb = later("ckpt_sentry.core.findings:verb")
    count_keys = later("ckpt_sentry.core.findings:keys")
    Examination = later("ckpt_sentry.core.examine:Examination")
    examine = later("ckpt_sentry.core.examine:examine")
    anew = later("ckpt_sentry.core.findings:anew")
    renaming = later("ckpt_sentry.core.findings:renaming")
    key_list = later("ckpt_sentry.core.fold:key_list")
    coverage = later("ckpt_sentry.core.coverage:coverage")

_NO_ENTRY = Entry(None, None)
_SHOWN_BYTES = 200
_DECISIVE = frozenset({"missing_keys", "unexpected_keys", "renamed_keys"})
_DEEPEST = 4
"""Levels of a dict in a dict at which the state dict is looked for."""
_MOST_LOOKED_AT = 64
RENAMED = "ckpt_sentry.unify_keys(state_dict, model)"
"""The dict with its keys renamed."""
_TIE = "load_state_dict(…, strict=False), then model.tie_weights()."


class Lists(NamedTuple):
    """
    The keys that `load_state_dict` did not find in the dict, and those that it had no use for.
    """

    missing: Collection[str]
    unexpected: Collection[str]


class Judgement(NamedTuple):
    """
    What is said of a load, how it was found out, and what the module wanted filled. `lists` are torch's, in the names
    of the state dict.
    """

    facts: Facts
    examination: Examination
    wanted: Inventory
    lists: Lists


class Offer(NamedTuple):
    """
    What a dict held before the call, where torch changes it during the call, and the file that it was read from.
    """

    entries: Mapping[str, Entry]
    path: str | None


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
ABSENT = MetaWords(
    "The module is still on the meta device: the dict holds nothing for {count}.",
    "{some} still on the meta device, without values: the dict holds nothing for them",
    "Give them values before they are used: to_empty(device=…) of the modules that hold them, then their own "
    "initialization.",
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


def whole(module: torch.nn.Module, state_dict: Mapping[Any, Any], offer: Offer | None = None) -> Facts:
    """
    The facts of a load that lacked nothing.
    """
    if offer is not None:
        held = inventories.checkpoint_summary(Inventory(offer.entries))
        return replace(
            located_at(offer.path),
            checkpoint=held,
            model=ModelSummary(held.keys, held.elements, held.bytes),
            coverage=FULL,
            utilisation=1.0,
        )
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


def counted(wanted: Inventory, came: Inventory, path: str | None) -> tuple[Facts, Examination]:
    """
    The facts of a load by two inventories.
    """
    known = {name: came.entries.get(name, entry) for name, entry in wanted.entries.items() if entry.shape is None}
    wanted = Inventory({**wanted.entries, **known}, wanted.ties)
    found = examine(wanted, came, allow_missing=config.settings().allow_missing)
    summaries = inventories.checkpoint_summary(came), inventories.model_summary(wanted)
    return replace(located_at(path), checkpoint=summaries[0], model=summaries[1]).examined(found), found


class OnMeta(NamedTuple):
    """
    The names of tensors that are on the meta device after a load: those into which nothing came, and the buffers that
    no checkpoint holds, which somebody has to fill.
    """

    persistent: frozenset[str] = frozenset()
    transient: frozenset[str] = frozenset()


def on_meta(module: torch.nn.Module) -> OnMeta:
    """
    What is on the meta device after a load.
    """
    if not inventories.is_partly_meta(module):
        return OnMeta()
    return OnMeta(
        frozenset(name for name, value in inventories.tensors_of(module) if value.is_meta),
        frozenset(name for name, value in inventories.transient_of(module) if value.is_meta),
    )


def unmade(names: Collection[str]) -> Finding:
    """
    Say that buffers which no checkpoint holds have no values yet.
    """
    count = len(names)
    text = (
        f"{count:,} {verb(count, 'buffer', 'buffers')} that no checkpoint holds (persistent=False) "
        f"{verb(count, 'is', 'are')} still on the meta device, without values: "
        f"{', '.join(key_list(names, _SHOWN_BYTES).keys)}."
    )
    which, who = verb(count, "it", "them"), verb(count, "the module that holds it", "the modules that hold them")
    step = f"Compute {which} anew before the model is used, or build {who} outside of the meta device."
    return Finding("meta_left", "warning", text, step)


def unfilled(
    facts: Facts, module: torch.nn.Module, lacking: Collection[str], empty: Collection[str], words: MetaWords
) -> Facts:
    """
    The facts of a load of which nothing came into the tensors named in `empty`. `lacking` are the keys that were not in
    the dict either.
    """
    wanted = inventories.model_inventory(module)
    lacking = {name for name in wanted.entries if name in lacking or model_state.bare(name) in lacking}
    entered = [name for name in wanted.entries if name not in lacking and name not in empty]
    part = coverage(wanted, entered, config.settings().allow_missing)
    used = part.elements if facts.utilisation is None else min(facts.utilisation, part.elements)
    found = []
    if offered := [name for name in wanted.entries if name in empty and name not in lacking]:
        found.append(_on_meta(offered, len(wanted.entries), words))
    # Where nothing could enter anyway, that nothing was there for some of it is no news.
    elif left := [name for name in wanted.entries if name in empty]:
        found.append(_on_meta(left, len(wanted.entries), ABSENT))
    return replace(facts, coverage=part, utilisation=used).with_findings(found)


def _on_meta(names: Sequence[str], all_names: int, words: MetaWords) -> Finding:
    count = count_keys(all_names)
    text = words.whole.format(count=count)
    if len(names) < all_names:
        listed = ", ".join(key_list(names, _SHOWN_BYTES).keys)
        verb = "is" if len(names) == 1 else "are"
        text = words.part.format(some=f"{len(names):,} of {count} {verb}") + f": {listed}."
    return Finding("meta_left", "warning", text, words.step)


def _tensors(module: torch.nn.Module, state_dict: Mapping[Any, Any]) -> list[torch.Tensor]:
    """
    The tensors of a dict. A mapping of another kind may read each value from a file when it is asked: the module's own.
    """
    if isinstance(state_dict, dict):
        return [value for value in state_dict.values() if isinstance(value, torch.Tensor)]
    return [value for _, value in inventories.tensors_of(module) if not is_lazy(value)]


def judged(
    module: torch.nn.Module,
    state_dict: Mapping[Any, Any],
    lists: Lists,
    remedy: Callable[..., str] | None = None,
    offer: Offer | None = None,
) -> Judgement:
    """
    Judge a load that lacked keys or was offered too many. `remedy` gives the caller's call with the keys renamed, with
    strict=False if that is asked for.
    """
    found, model, given, lists = _examined(module, state_dict, lists, offer)
    known = located(state_dict, offer)
    supplied = given.entries.keys() & model.entries.keys()
    found = hints.hinted(module, found, supplied, known.path, _TIE)
    if remedy is not None and found.inference is not None:
        found = replace(found, findings=renaming(found.findings, _renaming(found.inference.mapping, lists, remedy)))
    facts = replace(
        known,
        checkpoint=inventories.checkpoint_summary(given),
        model=inventories.model_summary(model),
    ).examined(found)
    nested = nested_finding(state_dict, model, lists.unexpected) if isinstance(state_dict, dict) else None
    if nested is not None:
        # That it holds no key of the model's follows from this.
        rest = (finding for finding in facts.findings if finding.code != "no_overlap")
        explained = (replace(finding, next=None) if finding.code in codes.ABSENCES else finding for finding in rest)
        facts = replace(facts, findings=(nested, *explained))
    return Judgement(facts, found, model, lists)


def _renaming(mapping: Mapping[str, str], lists: Lists, remedy: Callable[..., str]) -> str:
    """
    The next step for keys under other names: what is to be called so that it does not raise, or else what is lacking
    even then.
    """
    renamed = set(mapping.values())
    missing, unexpected = set(lists.missing) - renamed, set(lists.unexpected) - mapping.keys()
    if not missing and not unexpected:
        return f"Rename its keys: {remedy()}."
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return f"Rename its keys: {RENAMED}; {count_keys(len(missing))} {verb} still missing then."
    verb = "stays" if len(unexpected) == 1 else "stay"
    return (
        f"Rename its keys: {remedy(loosely=True)}; {count_keys(len(unexpected))} of the checkpoint {verb} out: "
        f"{', '.join(key_list(unexpected, _SHOWN_BYTES).keys)}."
    )


def compared(module: torch.nn.Module, offer: Offer) -> tuple[Lists, Offer]:
    """
    The lists by the names alone, for `set_model_state_dict`, which leaves wrappers out of them; and what was offered by
    the names that the module itself has.
    """
    wanted = model_state.inventory(module).entries
    names = model_state.bare_names(module, wanted)
    given = {names.get(key, key): entry for key, entry in offer.entries.items()}
    return Lists(wanted.keys() - given.keys(), given.keys() - wanted.keys()), offer._replace(entries=given)


def located(state_dict: Mapping[Any, Any], offer: Offer | None = None) -> Facts:
    """
    The file that the values were read from, as far as this process knows.
    """
    return located_at(provenance.origin(state_dict) if offer is None else offer.path)


def located_at(path: str | None) -> Facts:
    """
    What is known of a file that values were read from.
    """
    if path is None:
        return Facts()
    step = find_step(path)
    written = provenance.written(path)
    return Facts(
        path=path,
        format="safetensors" if path.endswith(".safetensors") else "torch_save",
        findings=(written,) if written else (),
    ).at_step(step)


def softened(facts: Facts) -> Facts:
    """
    The facts of a load that brought in all that it was offered, where the caller had asked for no more (adapters, a
    shard): what is missing is information.
    """
    return _leveled(facts, codes.ABSENCES, "info")


def decisive(found: Judgement, loosely: str | None) -> Facts:
    """
    The facts of a load that torch refused: what it refused it for are errors. `loosely` is the call that takes a part,
    if any does.
    """
    facts, lists, model = _leveled(found.facts, _DECISIVE, "error"), found.lists, found.wanted
    # As many keys on both sides are more likely the same ones under other names than a part that is to start anew.
    is_gap = facts.unexpected.count < facts.missing.count
    facts = replace(facts, findings=anew(facts.findings, loosely if is_gap else None))
    said = set(found.examination.difference.missing)
    left = {name for name in lists.missing if name not in said}
    filled = {model.storage(name) for name in model.entries if name not in lists.missing}
    tied = {name for name in left if name in model.entries and model.storage(name) in filled}
    is_quantized = any(one.code == "quantized_state_dropped" for one in facts.findings)
    if loosely is not None and not lists.missing and not facts.mismatched and not is_quantized:
        step = f"If they are to stay out: {loosely}."
        facts = replace(
            facts,
            findings=tuple(replace(one, next=step) if one.code == "unexpected_keys" else one for one in facts.findings),
        )
    return facts.with_findings([*_tied(tied, facts, loosely), *_refused(left - tied)])


def _tied(names: Collection[str], facts: Facts, loosely: str | None) -> Iterator[Finding]:
    if not names:
        return
    verb = "is only another name" if len(names) == 1 else "are only other names"
    text = f"{count_keys(len(names))} {verb} of what the checkpoint has: {_listed(names)}."
    if facts.missing.count or facts.unexpected.count:
        yield Finding("tied_keys_missing", "error", text)
        return
    step = None if loosely is None else f"{loosely}, or tie the weights after the load."
    yield Finding("tied_keys_missing", "error", f"{text} Nothing is lacking.", step)


def _refused(names: Collection[str]) -> Iterator[Finding]:
    """
    What torch refuses to do without, although a load that is not strict lacks nothing by it.
    """
    if names:
        yield codes.finding("missing_keys", "error", count=len(names), listed=_listed(names))


def _listed(names: Collection[str]) -> str:
    return ", ".join(key_list(names, _SHOWN_BYTES).keys)


def nested_finding(state_dict: Mapping[Any, Any], model: Inventory, unexpected: Iterable[str]) -> Finding | None:
    """
    Say where the state dict really is, if it lies under one of the unexpected keys, at whatever level.
    """
    best: tuple[int, int, tuple[str, ...]] | None = None
    for key in unexpected:
        for path, inner in _dicts_in((key,), state_dict.get(key)):
            tensors = sum(isinstance(value, torch.Tensor) for value in inner.values())
            matching = sum(name in model.entries for name in inner)
            if tensors and (best is None or (matching, tensors, path) > best):
                best = matching, tensors, path
    if best is None:
        return None
    matching, tensors, path = best
    place = "".join(f"[{shown(repr(key))}]" for key in path)
    level = "one level" if len(path) == 1 else f"{len(path)} levels"
    under = shown(repr(path[0])) if len(path) == 1 else f"state_dict{place}"
    text = f"The state dict ({count_keys(tensors)}) is {level} down, under {under}"
    text += f": {matching:,} of them {'is a key' if matching == 1 else 'are keys'} of this model."
    return Finding("nested_state_dict", "error", text, f"Pass state_dict{place} on.")


def _dicts_in(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """
    Yield a dict and all in it, each with the keys that lead to it.
    """
    if not isinstance(value, dict):
        return
    yield path, value
    if len(path) < _DEEPEST:
        for key, inner in islice(value.items(), _MOST_LOOKED_AT):
            if isinstance(key, str):
                yield from _dicts_in((*path, key), inner)


def _examined(
    module: torch.nn.Module, state_dict: Mapping[Any, Any], lists: Lists, offer: Offer | None
) -> tuple[Examination, Inventory, Inventory, Lists]:
    wanted = model_state.inventory(module)
    # Asking a mapping of another kind for its values may read them all from a file once more.
    given: Mapping[str, Entry]
    if offer is not None:
        given = offer.entries
    else:
        given = inventories.state_inventory(state_dict).entries if isinstance(state_dict, dict) else {}
    names = given.keys() if given else {str(key) for key in state_dict}
    lists = Lists(
        [_plain(key, wanted.entries) for key in lists.missing], [_plain(key, names) for key in lists.unexpected]
    )
    strange = {key: _NO_ENTRY for key in lists.missing if key not in wanted.entries}
    if strange:  # keys of classes that load in a way of their own
        wanted = Inventory({**wanted.entries, **strange}, wanted.ties)
    missing = set(lists.missing)
    # What batch normalization adds to an old dict by itself came from nowhere (torch/nn/modules/batchnorm.py).
    came = {
        key: given.get(key, entry)
        for key, entry in wanted.entries.items()
        if key not in missing and (key in names or not model_state.is_counter(key))
    }
    came.update((key, given.get(key, _NO_ENTRY)) for key in lists.unexpected)
    model = model_state.without_needless(module, wanted, came)
    checkpoint = Inventory(came)
    return examine(model, checkpoint, allow_missing=config.settings().allow_missing), model, checkpoint, lists


def _plain(key: str, known: Collection[str]) -> str:
    """
    A key of torch's lists as a state dict has it: hooks of wrappers put components into it.
    """
    return key if key in known else model_state.bare(key)


def _leveled(facts: Facts, codes: Collection[str], level: Level) -> Facts:
    return replace(
        facts,
        findings=tuple(
            replace(finding, level=level) if finding.code in codes else finding for finding in facts.findings
        ),
    )
