"""
What a DCP load is about, read from the objects that torch itself made for it: planner, plan, metadata, reader.

Names and shapes only: no tensor is touched and no file is opened. What is kept ends with the load.
"""

from __future__ import annotations

import hashlib
import os
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import FULL, CheckpointSummary, Facts, Finding, ModelSummary
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.integrations.dcp import planning, stock
from ckpt_sentry.integrations.dcp import values as dcp_values
from ckpt_sentry.integrations.dcp.fast_compare import whole
from ckpt_sentry.integrations.dcp.reads import items_of, reads
from ckpt_sentry.integrations.dcp.step import Step
from ckpt_sentry.integrations.dcp.stock import changes_plans, is_stock, is_torchs, shows_plan
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ckpt_sentry.formats.dcp.peek import peek_step
    from ckpt_sentry.integrations.dcp import evidence
    from ckpt_sentry.integrations.dcp import keys as dcp_keys
    from ckpt_sentry.integrations.dcp import optimizer as dcp_optimizer
    from ckpt_sentry.integrations.dcp.entries import (
        checkpoint_entries,
        checkpoint_entry,
        flattened,
        model_entries,
        totals,
    )
    from ckpt_sentry.integrations.dcp.fast_compare import Whole
    from ckpt_sentry.session.loads import Load
else:
    peek_step = later("ckpt_sentry.formats.dcp.peek:peek_step")
    evidence = later("ckpt_sentry.integrations.dcp.evidence")
    checkpoint_entries = later("ckpt_sentry.integrations.dcp.entries:checkpoint_entries")
    checkpoint_entry = later("ckpt_sentry.integrations.dcp.entries:checkpoint_entry")
    flattened = later("ckpt_sentry.integrations.dcp.entries:flattened")
    model_entries = later("ckpt_sentry.integrations.dcp.entries:model_entries")
    totals = later("ckpt_sentry.integrations.dcp.entries:totals")
    dcp_keys = later("ckpt_sentry.integrations.dcp.keys")
    dcp_optimizer = later("ckpt_sentry.integrations.dcp.optimizer")

MOST_STORAGE_ITEMS = 200_000
"""Above this many stored chunks (a checkpoint of thousands of ranks) files are not counted: it would cost seconds."""

MOST_WHOLE_ITEMS = 4_000
"""The same for a load that is as it should be: nobody waits for that number, and a thousandth of the load is a lot."""

MOST_TOP_KEYS = 1_000
"""Above this many keys a state dict is flat, and its keys are digested when they are compared anyway."""

_PLANNER = 5
"""The place of the planner among the arguments of `_load_state_dict`."""

_RELATIVE_PATH = attrgetter("relative_path")


@dataclass(slots=True)
class Observed:
    """
    What is known of one load until it ends. A load of another framework has it where that goes through DCP.
    """

    path: str | None = None
    step: Step | None = None
    """The step of torch's that tells planner and metadata."""
    group_rank: int | None = None
    gathers: bool = True
    """Whether the ranks send each other what they plan, and what they raise."""
    unplanned: Facts | None = None
    """The facts before there was a plan: a plan that changes is looked at again."""
    look: planning.Look | None = None
    wanted: Mapping[str, Any] = field(default_factory=dict)
    """The values that are to be filled, by their keys in the checkpoint."""
    asked: Collection[str] = ()
    """Keys that the planner asks for by name, which no value is there for."""
    items: int | None = None
    """The read items of the plan."""
    types: Mapping[str, Any] = field(default_factory=dict)
    untouched: frozenset[str] = frozenset()
    """Keys that are not filled."""
    is_partial: bool = False
    """Whether the caller allows keys to be missing."""
    is_nothing: bool = False
    """Whether all are."""
    sides: evidence.Sides | None = None
    by_names: tuple[Finding, ...] = ()
    """The findings that names and plan alone have given."""
    before: evidence.Before | None = None
    """What the values were before the load, where planner or reader are not torch's own."""
    places: dict[str, Any] | None = None
    plan: Any = None
    metadata: Any = None


def observed(load: Load) -> Observed:
    """
    The state of DCP in this load.
    """
    state = load.state(Observed)
    if state is None:
        load.keep(state := Observed())
    return state


def path_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """
    The path in the arguments of any of DCP's load functions, as it was given or as the reader has it; or None.
    """
    candidate = kwargs.get("checkpoint_id")
    if candidate is None:
        candidate = stock.path_of(_reader_of(args, kwargs))
    if isinstance(candidate, bytes):
        return os.fsdecode(candidate)
    return None if candidate is None else str(candidate)


def note_arguments(load: Load, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """
    Remember the reader and learn path and step, as far as the arguments of this call tell.
    """
    state = observed(load)
    state_dict = kwargs.get("state_dict", args[0] if args else None)
    if load.facts.key_digest is None and isinstance(state_dict, dict) and len(state_dict) <= MOST_TOP_KEYS:
        load.facts = replace(load.facts, key_digest=_digest(map(str, state_dict)))
    path = path_of(args, kwargs)
    if path is None or state.path is not None:
        return
    state.path = path
    step = find_step(path)
    load.facts = replace(
        load.facts,
        path=path,
        format=_format_of(_reader_of(args, kwargs)),
    ).at_step(step)


def note_values(load: Load, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """
    Remember what the values of the state dict are before `_load_state_dict` fills them, where that cannot be told from
    names and plan.
    """
    state_dict = kwargs.get("state_dict", args[0] if args else None)
    planner = kwargs.get("planner", args[_PLANNER] if len(args) > _PLANNER else None)
    if isinstance(state_dict, dict) and not is_stock(planner, _reader_of(args, kwargs)):
        observed(load).before = evidence.Before(state_dict)
        load.is_provisional = True


def is_watched(load: Load) -> bool:
    """
    Whether it is seen what this load writes: its planner or its reader is not torch's own.
    """
    return observed(load).before is not None


def note_step_function(load: Load, function: Callable[[], Any], wrapper: Any) -> None:
    """
    Remember the step that torch is about to run on this rank: it tells planner and metadata.
    """
    state, step = observed(load), Step(function)
    # The step that reads tells less than the one that plans, unless it is the only one.
    if step.makes_plan or state.step is None:
        state.step = step
    state.group_rank = getattr(wrapper, "rank", 0)
    state.gathers = bool(getattr(wrapper, "use_dist", True))


def note_planning(load: Load) -> None:
    """
    Watch the planner from here on, until `note_planned`.
    """
    state = observed(load)
    state.unplanned = load.facts
    state.look = planning.begin()
    if state.step is not None:
        state.step.watch()


def note_planned(load: Load) -> None:
    """
    The planner has made its plan, or has raised.
    """
    planning.end()
    if (step := observed(load).step) is not None:
        step.unwatch()


def note_reading(load: Load, function: Callable[[], Any]) -> None:
    """
    Look at the plan that this rank got back, where its reader will not show the one that it reads.
    """
    step = Step(function)
    if not shows_plan(step.reader):
        note_final_plan(load, step.plan)


def note_final_plan(load: Load, plan: Any) -> None:
    """
    Look again at a plan that may have been changed since this rank made it: here, or by the rank that gathers them.
    """
    items, state = items_of(plan), observed(load)
    is_as_long = items is not None and len(items) == state.items
    step = state.step
    if items is not None and not (is_as_long and step is not None and not changes_plans(step)):
        note_plan(load, plan)


def note_plan(load: Load, plan: Any) -> None:
    """
    Compare what the model asks with what the checkpoint holds, once planner and metadata exist.

    Args:
        plan: the rank's `LoadPlan`, or None where planning has failed.
    """
    state = observed(load)
    step = state.step
    metadata: Any = None if step is None else _metadata(load, step)
    if step is None or not hasattr(metadata, "state_dict_metadata"):
        return
    planner = step.planner
    wanted = _wanted(planner, step.state_dict, metadata)
    # A plan that changes is looked at again: what it came to in the end holds.
    load.facts = state.unplanned or load.facts
    load.facts = replace(load.facts, key_digest=f"{(load.facts.key_digest or '').partition('/')[0]}/{_digest(wanted)}")
    by_name = dcp_keys.asked_by_name(planner, metadata) if getattr(planner, "keys", None) else ()
    state.is_partial = bool(getattr(planner, "allow_partial_load", False)) or bool(by_name)
    state.types = {} if plan is None else dcp_values.types_of(wanted)
    state.untouched, state.is_nothing, state.items = frozenset(), False, len(items_of(plan) or ())
    state.wanted, state.sides, state.asked = wanted, None, by_name
    look, state.look = state.look, None
    seen = planning.seen(look, wanted, plan, step) or whole(wanted, metadata.state_dict_metadata, plan)
    if seen is None or by_name:
        _take_apart(load, wanted, metadata, plan)
    else:
        _note_whole(load, seen, metadata)
    _note_step(load, metadata)
    if (before := state.before) is not None:
        state.places = {key: before.place(key, value) for key, value in wanted.items()}
        state.plan, state.metadata = plan, metadata


def _metadata(load: Load, step: Step) -> Any:
    """
    The metadata that the checkpoint is held against: the reader's, or one that a planner of the program's own made of
    it, by which it plans.
    """
    metadata = step.metadata
    if metadata is None or not is_watched(load):
        return metadata
    own = getattr(step.planner, "metadata", None)
    return own if isinstance(getattr(own, "state_dict_metadata", None), dict) else metadata


def _note_whole(load: Load, seen: Whole, metadata: Any) -> None:
    load.facts = replace(
        load.facts,
        checkpoint=_summary((seen.keys, seen.elements, seen.bytes), metadata, MOST_WHOLE_ITEMS),
        model=ModelSummary(seen.keys, seen.elements, seen.bytes),
        bytes_read=seen.bytes_read,
        coverage=FULL,
        utilisation=1.0,
    )


def _take_apart(load: Load, wanted: Mapping[str, Any], metadata: Any, plan: Any) -> None:
    """
    Compare both sides key by key.
    """
    sides, saved = _sides(load, wanted, metadata, plan)
    if refused := wanted.keys() - sides.model.entries.keys():
        load.facts = load.facts.with_findings([evidence.not_compared(refused)])
    load.facts = replace(
        load.facts,
        checkpoint=_summary(totals(saved.values()), metadata, MOST_STORAGE_ITEMS),
        model=ModelSummary(*totals(sides.model.entries.values())),
        bytes_read=sides.bytes_read,
    )
    _note_sides(load, sides)


def _sides(
    load: Load, wanted: Mapping[str, Any], metadata: Any, plan: Any
) -> tuple[evidence.Sides, Mapping[str, Entry]]:
    """
    What is to be compared, and what the checkpoint holds by its own names.
    """
    seen: dict[tuple[Any, Any], Entry] = {}
    model = Inventory(model_entries(wanted, seen) | dict.fromkeys(observed(load).asked, Entry(None, None)))
    saved = checkpoint_entries(metadata.state_dict_metadata, seen)
    theirs = evidence.by_own_names(plan, model.entries, saved) if is_watched(load) else saved
    if wanted.keys() - model.entries.keys():
        theirs = {key: entry for key, entry in theirs.items() if key in model.entries or key not in wanted}
    checkpoint = Inventory({key: theirs[key] for key in theirs if key not in _scales(load)})
    fractions, bytes_read = reads(plan, wanted, model, checkpoint)
    return evidence.Sides(model, checkpoint, fractions, metadata.planner_data, bytes_read), saved


def _scales(load: Load) -> Collection[str]:
    """
    Keys that the reader multiplies with by itself: a model never asks for them (torch 2.13.0, quantized_hf_storage.py).
    """
    step = observed(load).step
    known = getattr(getattr(step, "reader", None), "_weight_scale_mapping", None)
    return frozenset(known.values()) if isinstance(known, dict) else frozenset()


def _note_sides(load: Load, sides: evidence.Sides) -> None:
    """
    Say what both sides differ in.
    """
    state, examination, model = observed(load), sides.examined(), sides.model.entries
    difference, facts = examination.difference, load.facts
    unfilled = dcp_optimizer.not_filled(state.wanted, difference.unexpected)
    planned = {key: part for key, part in (sides.fractions or {}).items() if key not in sides.passed_over}
    lacking = dcp_keys.not_read(examination, planned)
    found = replace(examination, findings=dcp_keys.findings(examination, sides.paths))
    if is_watched(load):
        # Whoever reads or plans in a way of his own may well know the scales.
        kept = tuple(one for one in found.findings if one.code != "quantized_state_dropped")
        found = replace(found, findings=kept)
    load.facts = facts.examined(found).with_findings((*lacking, *filter(None, [unfilled])))
    state.sides = sides
    state.by_names = tuple(one for one in load.facts.findings if one not in facts.findings)
    state.untouched = frozenset((*difference.missing, *(pair.key for pair in difference.retyped)))
    state.is_nothing = bool(model) and len(difference.missing) == len(model)
    if not model and any(one.code == "not_compared" for one in load.facts.findings):
        # Nothing is left that could be compared.
        load.facts = replace(load.facts, coverage=None, utilisation=None)


def _revise(load: Load, wanted: Mapping[str, Any]) -> None:
    """
    Hold what names and plan say against what was seen to be written, where planner or reader are not torch's own.
    """
    state = observed(load)
    if state.before is None or state.places is None or load.facts.coverage is None:
        return
    sides = state.sides or _sides(load, wanted, state.metadata, state.plan)[0]
    stored = evidence.Stored(state.path, state.metadata, state.plan, wanted)
    revised = evidence.revised(sides, state.places, state.before, stored)
    if revised is None:
        return
    known = (*(one for one in load.facts.findings if one not in state.by_names), *revised.findings)
    load.facts = replace(load.facts, findings=known)
    _note_sides(load, revised.sides)


def unsay(load: Load, message: str) -> None:
    """
    Take back what names alone have said of a load that a planner of the program's own has ended before there was a
    plan: under which names it would have read is not known. Not where its `message` names a key that is missing.
    """
    state = observed(load)
    if not (is_watched(load) and state.by_names) or state.sides is None or state.plan is not None:
        return
    if any(key in message for key in state.sides.examined().difference.missing):
        return
    found = tuple(one for one in load.facts.findings if one not in state.by_names)
    facts, unplanned = load.facts, state.unplanned or load.facts
    load.facts = replace(
        unplanned, findings=found, key_digest=facts.key_digest, checkpoint=facts.checkpoint, model=facts.model
    )


def look_after(load: Load) -> None:
    """
    Add what the load has left behind: values that are no numbers, entries of another type.
    """
    state = observed(load)
    planner = None if state.step is None else state.step.planner
    wanted = getattr(planner, "state_dict", None)
    _revise(load, wanted if isinstance(wanted, dict) else {})
    load.is_provisional = False
    if not isinstance(wanted, dict) or config.settings().verify == "off":
        return
    untouched = state.untouched
    tensors = {key: value for key, value in wanted.items() if key not in untouched} if untouched else wanted
    found = [dcp_values.not_a_number(tensors, load.facts.bytes_read)]
    if types := state.types:
        known = {key: kind for key, kind in types.items() if key not in untouched}
        found += [dcp_values.retyped(known, planner), dcp_values.not_put_back(known, planner)]
    load.facts = load.facts.with_findings(filter(None, found))


def _note_step(load: Load, metadata: Any) -> None:
    """
    Learn the step from a key of the checkpoint, where no name or file has told it: one small read, if there is one.
    """
    path = observed(load).path
    if load.facts.step is not None or path is None or "://" in path:
        return
    step = peek_step(path, dcp_keys.step_entries(metadata, checkpoint_entry))
    if step is not None:
        load.facts = load.facts.at_step(step)


def _wanted(planner: Any, state_dict: Any, metadata: Any) -> dict[str, Any]:
    """
    The values that the caller wants filled, by their keys in the checkpoint: as the planner has them, else flattened,
    unless the checkpoint was saved without that. Also those that a planner of one's own has left out from the start.
    """
    wanted = getattr(planner, "state_dict", None)
    if isinstance(wanted, dict) and wanted:
        if is_torchs(planner, "set_up_planner") or not isinstance(state_dict, dict):
            return wanted
        flat = flattened(state_dict)
        return flat if wanted.keys() < flat.keys() else wanted
    if not isinstance(state_dict, dict):
        return {}
    saved = metadata.state_dict_metadata
    flat = flattened(state_dict)
    return state_dict if sum(key in saved for key in state_dict) > sum(key in saved for key in flat) else flat


def _reader_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    reader = kwargs.get("storage_reader")
    if reader is None and len(args) > 1:
        reader = args[1]
    return reader if hasattr(reader, "read_metadata") else None


def _format_of(reader: Any) -> str:
    return "HuggingFace safetensors" if "HuggingFace" in type(reader).__name__ else "DCP"


def _summary(totals: tuple[int, int, int], metadata: Any, most: int) -> CheckpointSummary:
    keys, elements, size = totals
    stored = getattr(metadata, "storage_data", None)
    files = None
    if isinstance(stored, dict) and 0 < len(stored) <= most:
        files = _files(stored.values())
    saved_path = getattr(getattr(metadata, "storage_meta", None), "checkpoint_id", None)
    return CheckpointSummary(
        keys=keys,
        elements=elements,
        bytes=size,
        files=len(files) if files else None,
        saved_path=None if saved_path is None else str(saved_path),
        saved_by=_writers(files) if files else None,
    )


def _files(places: Iterable[Any]) -> set[Any] | None:
    try:
        return set(map(_RELATIVE_PATH, places))
    except AttributeError:  # a reader's own storage data
        return None


def _writers(files: set[Any]) -> int | None:
    """
    How many ranks wrote these files, by DCP's names for them, `__RANK_N.distcp` (filesystem.py, `_generate_name`).
    """
    ranks = {name.split("_")[2] for name in map(str, files) if name.startswith("__") and name.endswith(".distcp")}
    return len(ranks) or None


def _digest(keys: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(sorted(keys)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
