"""
The proof of a load by accelerate: which values have to be where, and what it means that they are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckpt_sentry import config
from ckpt_sentry.core.report import Finding, Proof
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.formats.elements import Slot
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.integrations.accelerate import device_map
from ckpt_sentry.integrations.accelerate import facts as accelerate_facts
from ckpt_sentry.model import inventories, model_state, proof
from ckpt_sentry.model.proof import Claim, Held, Holder, Outcome
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ckpt_sentry.core.fold import key_list
    from ckpt_sentry.formats import index as index_
    from ckpt_sentry.integrations.accelerate import offload
    from ckpt_sentry.integrations.accelerate.facts import Call
    from ckpt_sentry.render.refusals import tensors
    from ckpt_sentry.session.loads import Load
else:
    index_ = later("ckpt_sentry.formats.index")
    key_list = later("ckpt_sentry.core.fold:key_list")
    tensors = later("ckpt_sentry.render.refusals:tensors")
    offload = later("ckpt_sentry.integrations.accelerate.offload")

_SHOWN: Final = 3


def prove(load: Load, call: Call) -> Proof | None:
    """
    Compare values and say what differs, in the load's facts. None where there is nothing to compare.
    """
    if call.choice is None or call.examination is None:
        return None
    depth = config.settings().verify
    if depth == "off":
        return None
    keys, known = call.offered.entries.keys(), accelerate_facts.known_changes(call) if call.is_deferred else ()
    renamed = _count_renamed(load, call, known) if call.is_deferred else []
    holder = Holder(call.model, _folder_after(call))
    claims = _claims(call)
    outcome = proof.prove(holder, claims, depth)
    if call.is_deferred:
        differing = outcome.differing
        outcome.differing = [name for name in _unchanged(call, differing) if name not in known]
        accelerate_facts.remember_changes(call, keys, {*renamed, *differing} - set(outcome.differing))
    stale = _stale(call, holder)
    outcome.checked += stale
    outcome.differing += stale
    load.facts = load.facts.with_findings(_findings(call, outcome, claims, stale))
    load.facts = replace(load.facts, proof=Proof(len(outcome.checked), key_list(outcome.differing)))
    return load.facts.proof


def _folder_after(call: Call) -> offload.Folder | None:
    """
    Where the disk part lies, as long as `dispatch_model` has not put it into the hooks' maps.
    """
    return None if call.dispatches else offload.contents(call.arguments.get("offload_folder"))


def _claims(call: Call) -> list[Claim]:
    """
    What every name has to hold: its own value in the checkpoint, or that of a name that it is tied to.
    """
    packed = model_state.quantized(call.model)
    wanted = call.wanted
    groups: dict[str, list[Slot]] = {}
    own: dict[str, Slot] = {}
    for name in wanted.entries:
        if (slot := _slot(call, name)) is not None:
            own[name] = slot
            if wanted.ties:
                groups.setdefault(wanted.storage(name), []).append(slot)
    tied = set(wanted.ties) | set(wanted.ties.values())
    claims = []
    for name in wanted.entries:
        slots: tuple[Slot, ...] = (own[name],) if name in own else ()
        if name in tied:
            slots = tuple(groups.get(wanted.storage(name), ()))
        if slots and name not in packed:
            claims.append(Claim(name, slots))
    return claims


def _slot(call: Call, name: str) -> Slot | None:
    if call.choice is None or name not in call.offered.entries:
        return None
    return call.choice.slots.get(call.origins.get(name, name))


def _count_renamed(load: Load, call: Call, known: Collection[str]) -> Sequence[str]:
    """
    Count the keys as loaded that the model's own hooks brought in under other names: their values have changed, or
    did so before. Returns these.
    """
    difference = call.examination.difference if call.examination is not None else None
    if difference is None:
        return []
    lacking = [*difference.missing, *(pair.key for pair in (*difference.mismatched, *difference.retyped))]
    now = proof.samples(Holder(call.model), lacking)
    varied = [name for name in lacking if name in now and len(set(now[name])) > 1]
    entered = [name for name in lacking if name in known or (name in now and now[name] != call.before.get(name))]
    if varied and set(varied) <= set(entered):
        # What has one value throughout shows nothing: it came with the rest.
        entered = lacking
    inference = call.examination.inference if call.examination is not None else None
    keys = {} if inference is None else {name: key for key, name in inference.mapping.items()}
    if entered:
        accelerate_facts.add_supplied(call, {name: keys.get(name) for name in entered})
        accelerate_facts.compare(load, call)
    return entered


def _unchanged(call: Call, differing: Sequence[str]) -> list[str]:
    """
    Of the names that differ, those that hold what they held before: the others were changed by hooks on the way in.
    """
    now = proof.samples(Holder(call.model), differing)
    return [name for name in differing if name in now and now[name] == call.before.get(name)]


def _stale(call: Call, holder: Holder) -> list[str]:
    """
    Names that the checkpoint lacks and that get another checkpoint's values from a folder that was used before.
    """
    if not call.offloaded_before or call.examination is None:
        return []
    missing = call.examination.difference.missing
    return [name for name in missing if name in call.offloaded_before and _is_in_file(holder.find(name))]


def _is_in_file(held: Held | None) -> bool:
    return isinstance(held, Slot)


def _findings(call: Call, outcome: Outcome, claims: Sequence[Claim], stale: Collection[str]) -> Iterable[Finding]:
    tied = set(call.wanted.ties) | set(call.wanted.ties.values())
    lost = [name for name in outcome.differing if name in tied]
    from_folder = [
        name
        for name in outcome.differing
        if name in stale or (name in outcome.offloaded and name in call.offloaded_before)
    ]
    others = [name for name in outcome.differing if name not in tied and name not in from_folder]
    yield from _lost_ties(call, lost)
    if from_folder:
        folder = shown_path(str(call.arguments.get("offload_folder")))
        text = f"{tensors(len(from_folder), 'gets', 'get')} other values from {folder}, filled by another load"
        text += f": {_keys(from_folder)}."
        yield Finding("stale_offload_folder", "error", text, "Pass an empty offload_folder for each checkpoint.")
    if others:
        what = tensors(len(others), "of the model does", "of the model do")
        text = f"{what} not hold the checkpoint's values: {_keys(others)}."
        yield Finding("values_not_loaded", "error", text, "Look for code that sets or shares these tensors.")
    yield from _both_saved(outcome, claims)
    if outcome.not_finite:
        what = tensors(len(outcome.not_finite), "holds", "hold")
        text = f"{what} NaN, in the checkpoint already: {_keys(outcome.not_finite)}."
        yield Finding("non_finite_values", "warning", text, "Load the checkpoint before the one that diverged.")


def _lost_ties(call: Call, lost: Sequence[str]) -> Iterable[Finding]:
    groups: dict[str, list[str]] = {}
    for name in lost:
        groups.setdefault(call.wanted.storage(name), []).append(name)
    for owner in groups:
        names = sorted(name for name in call.wanted.entries if call.wanted.storage(name) == owner)
        source = next((name for name in names if name in call.offered.entries), names[0])
        others = ", ".join(name for name in names if name != source)
        text = (
            f"{source} and {others} are tied, and the value of {source} in the checkpoint is lost: the tie was broken "
        )
        text += f"by the load and made anew from {names[0]}, which still held its old value."
        if names[0] == source:
            text = f"{source} and {others} are tied, but no longer after the load: {others} kept its old value."
        step = "Load with device_map=None, or build the model under init_empty_weights() and call model.tie_weights()."
        yield Finding("tied_weights_lost", "error", text, step)


def _both_saved(outcome: Outcome, claims: Sequence[Claim]) -> Iterable[Finding]:
    """
    Say that names which the model ties have different values in the checkpoint: one of them is lost.
    """
    differing = set(outcome.differing)
    pairs = [claim for claim in claims if len(claim.slots) > 1 and claim.name not in differing]
    names = [claim.name for claim in pairs if proof.vary(claim.slots)]
    if names:
        text = f"The model ties {_keys(names)}, to which the checkpoint gives different values: one of them is in use."
        yield Finding(
            "tied_values_differ", "warning", text, "Untie the model (tie_word_embeddings=False) or the checkpoint."
        )


def without_values(call: Call) -> list[str]:
    """
    Names of tensors that have no values anywhere: on the meta device, and in no offload map or folder.
    """
    holder = Holder(call.model, _folder_after(call))
    found = []
    for name, value in inventories.tensors_of(call.model):
        if value.device.type == "meta" and holder.find(name) is None and not holder.is_offloaded(name):
            found.append(name)
    if isinstance(call.device_map, dict) and not call.dispatches:
        found = [name for name in found if device_map.device_of(call.device_map, name) != device_map.DISK]
    return found


def _keys(names: Iterable[str]) -> str:
    folded = key_list(names).keys
    return ", ".join(folded[:_SHOWN]) + (", …" if len(folded) > _SHOWN else "")
