"""
What `from_pretrained` came to: transformers' own loading info with coverage, rename rule, proof and the files' facts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config
from ckpt_sentry.core import codes
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import CheckpointSummary, Finding, LoadError, Proof
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.formats import folder, state_file
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.integrations.transformers import files as transformers_files
from ckpt_sentry.model import conversion, inventories, proof
from ckpt_sentry.patching.later import later
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import disproof, refusal
from ckpt_sentry.session.loads import SETUP

if TYPE_CHECKING:
    from ckpt_sentry.core import quantized
    from ckpt_sentry.core.findings import anew, renaming
    from ckpt_sentry.core.fold import folds, key_list
    from ckpt_sentry.formats.elements import Slot
    from ckpt_sentry.formats.state_file import StateFile
    from ckpt_sentry.integrations.transformers import buffers as transformers_buffers
    from ckpt_sentry.model.conversion import Source
    from ckpt_sentry.render import refusals
    from ckpt_sentry.session.loads import Load
else:
    quantized = later("ckpt_sentry.core.quantized")
    transformers_buffers = later("ckpt_sentry.integrations.transformers.buffers")
    refusals = later("ckpt_sentry.render.refusals")
    anew = later("ckpt_sentry.core.findings:anew")
    renaming = later("ckpt_sentry.core.findings:renaming")
    folds = later("ckpt_sentry.core.fold:folds")
    key_list = later("ckpt_sentry.core.fold:key_list")

_NO_ENTRY: Final = Entry(None, None)
_NUMBER: Final = re.compile(r"(?:^|\.)[0-9]+(?=\.|$)")
_KINDS: Final = (".safetensors", ".bin", ".pt", ".pth")
_SHOWN: Final = 3
_NAMES: Final = re.compile(r"[\w.]+")
_MOST_FILES: Final = 256
"""Shards whose headers are read: of a checkpoint with more the loading info says enough."""


@dataclass(slots=True)
class State:
    """
    What is known of one call of `from_pretrained` or `load_adapter`.
    """

    folder: str | None = None
    """The folder that the caller names; None where it is a name on the hub."""
    renamed: tuple[str, ...] = ()
    """The patterns of the caller's `key_mapping`."""
    variant: str | None = None
    renames: bool = True
    """Whether this transformers has `key_mapping`."""
    files: list[str] | None = None
    """The files that were chosen, once they are."""
    headers: list[StateFile] | None = None
    wanted: Inventory = field(default_factory=Inventory)
    missing: Sequence[str] = ()


def state_of(load: Load) -> State:
    """
    The state of a load that this integration has begun.
    """
    state = load.state(State)
    if state is None:
        load.keep(state := State())
    return state


def begin(model_class: Any, name: Any, key_mapping: Any = None, variant: Any = None) -> Load | None:
    """
    Open the load of `model_class.from_pretrained(name)`. The name is a folder, or one on the hub.
    """
    path = None if name is None else os.fspath(name)
    local = path if path is not None and os.path.isdir(path) else None
    step = None if local is None else find_step(local)
    # Nothing that could fail comes after: a load that is begun has to be ended.
    load = loads.begin("transformers", f"{model_class.__name__}.from_pretrained", path)
    if load is not None:
        renamed = tuple(map(str, key_mapping or ()))
        load.keep(State(local, renamed, None if variant is None else str(variant)))
        load.facts = load.facts.at_step(step)
    return load


def note_files(load: Load, resolved: Any) -> None:
    """
    Remember the files that transformers has chosen: `_get_resolved_checkpoint_files` returns them and the index.
    """
    files = resolved[0] if isinstance(resolved, tuple) and resolved else None
    paths = [os.fspath(file) for file in files or ()]
    state_of(load).files = [path for path in paths if path.endswith(_KINDS)]
    load.enter("read")


def note_info(load: Load, model: Any, load_config: Any, info: Any) -> None:
    """
    Judge the load by transformers' loading info, while the model is at hand.
    """
    wanted = inventories.model_inventory(model)
    mismatched = {key: tuple(shape) for key, shape, _ in info.mismatched_keys}
    missing = set(info.missing_keys) & wanted.entries.keys()
    unexpected = set(info.unexpected_keys)
    beside = set() if _is_quantizing(load_config) else set(map(quantized.weight_of, unexpected)) & wanted.entries.keys()
    files = _state_files(load) if missing or mismatched or beside else []
    saved = {key: entry for file in files for key, entry in file.inventory.entries.items()}
    own = {key for key in beside if key in saved and saved[key].shape == wanted.entries[key].shape}
    came = {key: saved.get(key, entry) for key, entry in wanted.entries.items() if key not in missing}
    came.update((key, Entry(shape, None)) for key, shape in mismatched.items() if key in came)
    came.update((key, saved.get(key, _NO_ENTRY)) for key in unexpected)
    settings = config.settings()
    model_side = _without_ignored(model, wanted, missing)
    # What may be missing, and does not count, is no key of the checkpoint's either.
    checkpoint = Inventory({key: came[key] for key in came if key in model_side.entries or key in unexpected})
    examination = examine(
        model_side, _as_wanted(checkpoint, model_side, {*mismatched, *own}), allow_missing=settings.allow_missing
    )
    load.facts = replace(
        load.facts,
        model=inventories.model_summary(model_side),
        checkpoint=summary(load, checkpoint),
        format=format_of(load),
    ).examined(examination)
    state = state_of(load)
    state.missing, state.wanted = examination.difference.missing, model_side
    _advise(load)
    missing = set(examination.difference.missing)
    if getattr(load_config, "ignore_mismatched_sizes", False):
        missing |= mismatched.keys()
    if missing and _is_new_head(model, wanted, missing):
        _welcome(load, missing)
    _look_beside(load)
    if (left := transformers_buffers.unfilled(load, model)) is not None:
        load.facts = load.facts.with_findings([left])
    _prove(load, model, load_config, {*info.missing_keys, *mismatched})


def refuse(load: Load) -> None:
    """
    Judge a load that has returned.

    Raises:
        LowCoverageError: not one key of the checkpoint is one of the model's, or the values are not the checkpoint's.
    """
    facts, state = load.facts, state_of(load)
    differing = facts.proof.differing.count if facts.proof else 0
    error = refusal(load.entry_point, facts, state.wanted, state.missing, asked="something") or disproof(
        load.entry_point, facts, differing
    )
    if error is not None:
        raise error


def explain(load: Load, _error: BaseException, _described: LoadError) -> Iterator[Finding]:
    """
    Say what the files are, where a load has raised and they are what it broke on.
    """
    found = [finding for file in _state_files(load) for finding in file.findings if finding.level == "error"]
    beside = [*_beside(load)] if found else []
    state = state_of(load)
    if not found and load.phase == SETUP and state.folder:
        # No file was chosen: say what lies there instead.
        found = [finding for finding in folder.choose(state.folder).findings if finding.level == "error"]
    yield from (*found[:_SHOWN], *beside)


def _state_files(load: Load) -> Sequence[StateFile]:
    """
    The headers of the files that were read; once for each load.
    """
    state = state_of(load)
    if state.headers is None:
        state.headers = [state_file.read(file) for file in (state.files or ())[:_MOST_FILES]]
    return state.headers


def _look_beside(load: Load) -> None:
    """
    Say what lies beside the files; before what is missing, which may be there.
    """
    found = list(_beside(load))
    known = load.facts.findings
    if any(finding.level == "warning" for finding in found):
        load.facts = replace(load.facts, findings=(*found, *anew(known, None)))
    else:
        load.facts = load.facts.with_findings(found)


def _beside(load: Load) -> Iterator[Finding]:
    state = state_of(load)
    is_local = state.folder is not None
    if is_local or len(state.files or ()) > 1:
        yield from transformers_files.findings(_state_files(load), state.variant, is_local=is_local)


def summary(load: Load, checkpoint: Inventory) -> CheckpointSummary:
    """
    Count what a checkpoint holds, and the files that were chosen.
    """
    return replace(inventories.checkpoint_summary(checkpoint), files=len(state_of(load).files or ()) or None)


def format_of(load: Load) -> str | None:
    """
    The format of the files that were chosen, where it is one.
    """
    files = state_of(load).files or ()
    kinds = {"safetensors" if file.endswith(".safetensors") else "torch_save" for file in files}
    return kinds.pop() if len(kinds) == 1 else None


def _is_quantizing(load_config: Any) -> bool:
    return getattr(load_config, "hf_quantizer", None) is not None


def _as_wanted(checkpoint: Inventory, model: Inventory, own: Collection[str]) -> Inventory:
    """
    What transformers took for itself it has converted to the model's shape and type: that is no cast of the caller's.
    `own` are keys whose shape and type are of interest as they are.
    """
    entries = {
        key: model.entries.get(key, entry) if key not in own else entry for key, entry in checkpoint.entries.items()
    }
    return Inventory(entries)


def _without_ignored(model: Any, wanted: Inventory, missing: Collection[str]) -> Inventory:
    """
    Without what the model's class says may be missing, where transformers does not call it missing.
    """
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    if not patterns:
        return wanted
    entries = {
        key: entry
        for key, entry in wanted.entries.items()
        if key in missing or not any(pattern.search(key) for pattern in patterns)
    }
    return Inventory(entries, {key: owner for key, owner in wanted.ties.items() if key in entries and owner in entries})


def _advise(load: Load) -> None:
    """
    Say how `from_pretrained` itself is made to rename: by `key_mapping`, if it has that and the rule is but a prefix.
    """
    if load.facts.rename is None:
        return
    step = "Save ckpt_sentry.unify_keys(state_dict, model).state_dict, and load that."
    if (prefix := load.facts.rename.stripped) is not None and state_of(load).renames and _NAMES.fullmatch(prefix):
        step = f'Rename the keys: from_pretrained(…, key_mapping={{r"^{re.escape(prefix)}": ""}}).'
    load.facts = replace(load.facts, findings=renaming(load.facts.findings, step))


def _is_new_head(model: Any, wanted: Inventory, missing: Iterable[str]) -> bool:
    """
    Tell whether all that is missing is a part of the model that a checkpoint of another task rightly lacks.

    That is a module outside the base model, or a pooler, which is missing as a whole; never an embedding at either end,
    without which the model says nothing that makes sense.
    """
    gone = set(missing)
    ends = {f"{name}.weight" for name, part in model.named_modules() if part in _ends(model)}
    base = f"{model.base_model_prefix}."
    is_base = not any(key.startswith(base) for key in wanted.entries)
    heads = {key.partition(".")[0] for key in wanted.entries.keys() - gone}
    for key in gone:
        path = key.rpartition(".")[0]
        inside = is_base or key.startswith(base)
        # A number is that of a layer, unless all of the head is missing: `classifier.1`.
        is_layer = _NUMBER.search(path) and (inside or key.partition(".")[0] in heads)
        if key in ends or is_layer or (inside and "pooler" not in path.split(".")):
            return False
        if any(other.startswith(f"{path}.") and other not in gone for other in wanted.entries):
            return False
    return True


def _ends(model: Any) -> list[Any]:
    found = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, getter)())
        except (AttributeError, NotImplementedError, TypeError):
            continue
    return [part for part in found if part is not None]


def _welcome(load: Load, missing: Collection[str]) -> None:
    """
    Say of a new head what it is, in one line of information.
    """
    counted = state_of(load).wanted.once(sorted(missing))
    listed = ", ".join(fold.text for fold in list(folds(counted))[:_SHOWN])
    softened = codes.ABSENCES | {"shape_mismatch"}
    fresh = codes.finding("missing_keys", "info", count=len(counted), listed=listed, is_new="yes")
    rest = [
        replace(finding, level="info", next=None) if finding.code in softened else finding
        for finding in load.facts.findings
        if finding.code != "missing_keys"
    ]
    load.facts = replace(load.facts, findings=(fresh, *rest))


def _prove(load: Load, model: Any, load_config: Any, lost: Collection[str]) -> None:
    """
    Compare values with those of the keys that may have filled them; what is converted on the way is left out.
    """
    depth, state = config.settings().verify, state_of(load)
    if depth == "off" or _is_quantizing(load_config) or not state.files:
        return
    wanted = state.wanted
    slots = {key: slot for file in _state_files(load) for key, slot in file.slots.items()}
    names = conversion.sources(model, slots, wanted.entries, state.renamed)
    groups: dict[str, list[Slot]] = {}
    for key in wanted.entries:
        if key in names and key not in lost:
            # Of names that the model ties one alone is in use, whichever it is.
            groups.setdefault(wanted.storage(key), []).append(slots[names[key].meant])
    claims = [proof.Claim(key, tuple(groups[wanted.storage(key)])) for key in names if key not in lost]
    outcome = proof.prove(proof.Holder(model), claims, depth)
    load.facts = replace(load.facts, proof=Proof(len(outcome.checked), key_list(outcome.differing)))
    if outcome.differing:
        others = {key: slots[name] for key in outcome.differing for name in names[key].others[:1]}
        load.facts = load.facts.with_findings(_differing(model, outcome.differing, names, others))


def _differing(
    model: Any, differing: Sequence[str], names: Mapping[str, Source], others: Mapping[str, Slot]
) -> Iterator[Finding]:
    """
    Say which keys of the model do not hold what the checkpoint has for them, and whether they hold what it has for a
    module of the same name, in the head or in the base model.
    """
    claims = [proof.Claim(key, (slot,)) for key, slot in others.items()]
    mixed_up = others.keys() - proof.prove(proof.Holder(model), claims, "sample").differing
    if rest := [key for key in differing if key not in mixed_up]:
        what = refusals.tensors(len(rest), "of the model is", "of the model are")
        yield Finding("values_not_loaded", "error", f"{what} not what the checkpoint holds: {_listed(rest)}.")
    if mixed_up:
        first = min(mixed_up)
        text = (
            f"{refusals.tensors(len(mixed_up), 'holds', 'hold')} the values of another, to which transformers "
            f"gives the same name: {first} those of {names[first].others[0]}, not of {names[first].meant}."
        )
        saved_by = next(iter(getattr(model.config, "architectures", None) or ()), type(model).__name__)
        step = f"Build {saved_by} from its config, and give it the file's state dict by load_state_dict."
        yield Finding("values_not_loaded", "error", text, step)


def _listed(keys: Iterable[str]) -> str:
    found = list(folds(list(keys)))
    return ", ".join(fold.text for fold in found[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
