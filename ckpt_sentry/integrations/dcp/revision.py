"""
What names and plan say of a load, held against what was seen to be written, where planner or reader are not torch's.

Who is acquitted: a key that neither the names nor the plan account for, and that was written all the same. What cannot
be seen is not blamed. And a key that the plan reads whole, while nothing was seen to be written to it, is blamed only
where the checkpoint itself shows other values than the tensor has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config
from ckpt_sentry.core.examine import Examination, examine
from ckpt_sentry.core.findings import counted, keys, listing, verb
from ckpt_sentry.core.fold import folds
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.integrations.dcp.reads import items_of
from ckpt_sentry.integrations.dcp.stored import Stored

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpt_sentry.integrations.dcp.evidence import Before

_ENOUGH: Final = 16
"""Keys of which the checkpoint is asked for values: what a reader passes over is rarely one key."""
_MARGIN: Final = 0.05
"""Sampled elements that may have changed beyond the part that the plan reads."""


@dataclass(frozen=True, slots=True)
class Sides:
    """
    What was compared: both inventories, the checkpoint's by the names under which the plan reads it; the part of each
    key that is not read whole; the planner's paths of the saved keys; and the bytes that this rank reads.
    """

    model: Inventory
    checkpoint: Inventory
    fractions: Mapping[str, float] | None
    paths: Mapping[str, Any] | None
    bytes_read: int
    passed_over: frozenset[str] = frozenset()
    """Keys that the plan reads whole and the load has not written."""

    def examined(self) -> Examination:
        settings = config.settings()
        return examine(self.model, self.checkpoint, allow_missing=settings.allow_missing, read_fractions=self.fractions)


def by_own_names(plan: Any, model: Mapping[str, Entry], saved: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """
    What the checkpoint holds by the names that the plan gives it: a planner may read "w" from "model.w".

    A shape that differs then is the planner's business: it may read a slice.
    """
    read = [(item.dest_index.fqn, item.storage_index.fqn) for item in items_of(plan) or ()]
    moved = {wanted: source for wanted, source in read if wanted != source and wanted in model}
    if not moved:
        return saved
    used = set(moved.values()) - {source for wanted, source in read if wanted == source}
    kept = {key: entry for key, entry in saved.items() if key not in used}
    return kept | {wanted: model[wanted] for wanted in moved}


@dataclass(frozen=True, slots=True)
class Revision:
    """
    The same sides, less those who are acquitted, and what is to be said of those of whom nothing was seen.
    """

    sides: Sides
    findings: tuple[Finding, ...]


def revised(sides: Sides, places: Mapping[str, str], before: Before, stored: Stored) -> Revision | None:
    """
    What is left of a comparison by names and plan when what was written is known; None where it holds.

    Args:
        sides: what was compared.
        places: where in the state dict each key of the model is.
        before: what the state dict was before the load.
        stored: what the checkpoint holds of the keys that the plan reads.
    """
    suspects = _suspects(sides)
    written, unclear = _acquitted(sides, suspects, places, before)
    whole = {key: places[key] for key in stored.keys if key in places and key not in suspects}
    lost, unsure = _passed_over(whole, before, stored)
    if not (written or unclear or lost or unsure):
        return None
    model = {key: entry for key, entry in sides.model.entries.items() if key not in unclear}
    checkpoint = {key: entry for key, entry in sides.checkpoint.entries.items() if key not in unclear}
    checkpoint |= {key: model[key] for key in written}
    parts = {key: part for key, part in (sides.fractions or {}).items() if key in model and key not in written}
    findings = (
        *([_not_written(lost)] if lost else []),
        *([not_compared(unclear | unsure)] if unclear | unsure else []),
    )
    left = replace(
        sides,
        model=Inventory(model),
        checkpoint=Inventory(checkpoint),
        fractions=parts | lost,
        passed_over=frozenset(lost),
    )
    return Revision(left, findings)


def _acquitted(
    sides: Sides, suspects: Mapping[str, bool], places: Mapping[str, str], before: Before
) -> tuple[set[str], set[str]]:
    """
    Of the suspects those that were written, and those of which nothing can be said.
    """
    found = before.after({places[key] for key in suspects}) if suspects else {}
    written: set[str] = set()
    unclear: set[str] = set()
    for key, is_retyped in suspects.items():
        place, part = places[key], (sides.fractions or {}).get(key, 0.0)
        if is_retyped and not before.is_of_its_kind(place):
            continue
        if part > 0 and not is_retyped:
            if before.changed(place) > part + _MARGIN:
                written.add(key)
        elif found[place] == "written":
            written.add(key)
        elif found[place] == "unclear":
            unclear.add(key)
    return written, unclear


def _suspects(sides: Sides) -> dict[str, bool]:
    """
    The keys that names or plan leave out, or read in part; and whether a tensor stands against something else.
    """
    difference, fractions = sides.examined().difference, sides.fractions or {}
    found = dict.fromkeys(difference.missing, False)
    found |= {pair.key: False for pair in difference.mismatched if fractions.get(pair.key, 0.0) <= 0}
    found |= {key: False for key, part in fractions.items() if part < 1 and key in sides.model.entries}
    return found | {pair.key: True for pair in difference.retyped}


def _passed_over(whole: Mapping[str, str], before: Before, stored: Stored) -> tuple[dict[str, float], set[str]]:
    """
    Of the keys that the plan reads whole, with their places: those that were not written, though the checkpoint has
    other values for them, with the part 0; and those that were not seen to be written, of which no more can be said.
    """
    found = before.after(whole.values())
    idle = [key for key, place in whole.items() if found[place] == "same" and stored.is_tensor(key)]
    asked = idle[:: max(1, len(idle) // _ENOUGH)][:_ENOUGH]
    answers = {key: stored.is_held(key) for key in asked}
    if None in answers.values():
        return {}, set(idle)
    if True not in answers.values():
        return dict.fromkeys(idle, 0.0), set()
    return {key: 0.0 for key, is_held in answers.items() if not is_held}, set()


def not_compared(which: Collection[str]) -> Finding:
    """
    Say of which keys nothing can be said.
    """
    text = f"{keys(len(which))} could not be compared: {listing(tuple(folds(sorted(which))))}."
    return Finding("not_compared", "info", text)


def _not_written(lost: Collection[str]) -> Finding:
    were, have = verb(len(lost), "was", "were"), verb(len(lost), "has", "have")
    text = (
        f"{counted(len(lost), 'tensor')} {were} not written, and {have} other values than the checkpoint: "
        f"{listing(tuple(folds(sorted(lost))))}."
    )
    return Finding(
        "not_read", "warning", text, "Look at what the planner and the reader of this load do with the plan."
    )
