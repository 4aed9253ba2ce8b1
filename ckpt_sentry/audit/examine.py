"""
Everything that names, shapes and dtypes tell about a load, in one call for the targets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckpt_sentry.audit import findings
from ckpt_sentry.audit.coverage import FULL, coverage, losses, matcher, utilisation
from ckpt_sentry.audit.diff import Diff, Pair, diff
from ckpt_sentry.audit.fold import LIMIT_BYTES, folds, key_list
from ckpt_sentry.audit.inventory import Inventory
from ckpt_sentry.audit.optimizer import Diagnosis, diagnose
from ckpt_sentry.audit.rename import Inference, infer
from ckpt_sentry.audit.report import NO_KEYS, Coverage, DtypeCast, Finding, KeyList, Rename, Shape, ShapeMismatch

_NOTHING_READ: Final[Mapping[str, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """
    What a load would do, or did, by names and shapes. `matched` counts the keys whose values enter.

    `difference` holds the single keys, `inference` the mapping of each key that `rename` covers; the rest is folded and
    bounded, ready for a `LoadReport`.
    """

    matched: int
    coverage: Coverage
    utilisation: float
    missing: KeyList = NO_KEYS
    unexpected: KeyList = NO_KEYS
    mismatched: tuple[ShapeMismatch, ...] = ()
    casts: tuple[DtypeCast, ...] = ()
    retyped: KeyList = NO_KEYS
    rename: Rename | None = None
    findings: tuple[Finding, ...] = ()
    difference: Diff = Diff()
    inference: Inference | None = None


def examine(
    model: Inventory,
    checkpoint: Inventory,
    *,
    allow_missing: Sequence[str] = (),
    read_fractions: Mapping[str, float] | None = None,
    minimum: float | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Examination:
    """
    Compare what a model asks for with what a checkpoint holds.

    A name that shares its storage with one that the checkpoint has is not missing. `allow_missing` are globs of keys
    that may stay unloaded. `read_fractions` gives, for the keys where that is known, the part of the elements that is
    really read, in [0, 1]; all other keys are read whole where the shapes agree, and not at all where they do not.
    Below `minimum`, a coverage in [0, 1], there is a finding `low_coverage`. Each list of keys is bounded by
    `limit_bytes`.
    """
    raw = diff(model.entries, checkpoint.entries)
    fractions = _NOTHING_READ if read_fractions is None else read_fractions
    if raw.matched == len(model.entries) == len(checkpoint.entries) and not raw.casts and not fractions:
        return Examination(matched=raw.matched, coverage=FULL, utilisation=1.0, difference=raw)
    difference = _without_tied(raw, model)
    supplied = _supplied(model, raw, fractions)
    part = coverage(model, supplied, allow_missing)
    optimizer = _diagnose_optimizer(model, checkpoint, difference)
    inference = _infer(model, checkpoint, difference, optimizer.explained, allow_missing)
    examination = Examination(
        matched=difference.matched,
        coverage=part,
        utilisation=utilisation(checkpoint, supplied.keys()),
        missing=key_list(difference.missing, limit_bytes),
        unexpected=key_list(difference.unexpected, limit_bytes),
        mismatched=_fold_mismatched(difference.mismatched, limit_bytes),
        casts=_fold_casts(difference.casts, limit_bytes),
        retyped=key_list((pair.key for pair in difference.retyped), limit_bytes),
        rename=None if inference is None else inference.rename,
        difference=difference,
        inference=inference,
    )
    facts = findings.Facts(
        model=model,
        checkpoint=checkpoint,
        difference=difference,
        coverage=part,
        inference=inference,
        losses=losses(model, _unallowed(difference.missing, allow_missing)),
        allowed=len(difference.missing) - len(_unallowed(difference.missing, allow_missing)),
        read=frozenset(key for key, fraction in fractions.items() if fraction > 0),
        minimum=minimum,
    )
    return _with_findings(examination, (*optimizer.findings, *findings.collect(facts)))


def _with_findings(examination: Examination, found: Iterable[Finding]) -> Examination:
    order = {code: place for place, code in enumerate(findings.ORDER)}
    ranked = sorted(found, key=lambda finding: (order.get(finding.code, len(order)), finding.text))
    values = {name: getattr(examination, name) for name in Examination.__slots__}
    return Examination(**(values | {"findings": tuple(ranked)}))


def _unallowed(missing: Sequence[str], allow_missing: Sequence[str]) -> Sequence[str]:
    if not allow_missing:
        return missing
    allowed = matcher(allow_missing)
    return [key for key in missing if not allowed(key)]


def _without_tied(raw: Diff, model: Inventory) -> Diff:
    """
    Take the names from the missing ones whose storage another name fills.
    """
    if not model.ties or not raw.missing:
        return raw
    lost = {*raw.missing, *(pair.key for pair in (*raw.mismatched, *raw.retyped))}
    filled = {model.storage(key) for key in model.entries if key not in lost}
    missing = tuple(key for key in raw.missing if model.storage(key) not in filled)
    return Diff(missing, raw.unexpected, raw.mismatched, raw.casts, raw.retyped, raw.matched)


def _supplied(model: Inventory, difference: Diff, fractions: Mapping[str, float]) -> dict[str, float]:
    supplied = dict.fromkeys(model.entries, 1.0)
    for key in difference.missing:
        del supplied[key]
    for pair in (*difference.mismatched, *difference.retyped):
        del supplied[pair.key]
    for key, fraction in fractions.items():
        if fraction <= 0:
            supplied.pop(key, None)
        elif key in model.entries:
            supplied[key] = fraction
    return supplied


def _diagnose_optimizer(model: Inventory, checkpoint: Inventory, difference: Diff) -> Diagnosis:
    if not difference.missing or not difference.unexpected:
        return Diagnosis()
    return diagnose(model.entries, checkpoint.entries, difference)


def _infer(
    model: Inventory, checkpoint: Inventory, difference: Diff, explained: Collection[str], allow_missing: Sequence[str]
) -> Inference | None:
    rest = difference
    if explained:
        rest = Diff(
            tuple(key for key in difference.missing if key not in explained),
            tuple(key for key in difference.unexpected if key not in explained),
            difference.mismatched,
            difference.casts,
            difference.retyped,
            difference.matched,
        )
    return infer(model, checkpoint, rest, allow_missing, lost=explained)


def _fold_mismatched(pairs: Iterable[Pair], limit_bytes: int) -> tuple[ShapeMismatch, ...]:
    by_shapes: dict[tuple[Shape, Shape], list[str]] = {}
    for key, model, checkpoint in pairs:
        by_shapes.setdefault((model.shape or (), checkpoint.shape or ()), []).append(key)
    found: list[ShapeMismatch] = []
    size = 0
    for (mine, theirs), keys in by_shapes.items():
        for text, count in folds(keys):
            size += len(text.encode())
            if found and size > limit_bytes:
                return tuple(found)
            # No brace group holds a dot: what stands before the last one is the folded module path.
            found.append(ShapeMismatch(text, count, text.rpartition(".")[0], mine, theirs))
    return tuple(found)


def _fold_casts(pairs: Iterable[Pair], limit_bytes: int) -> tuple[DtypeCast, ...]:
    by_dtypes: dict[tuple[str, str], list[str]] = {}
    for key, model, checkpoint in pairs:
        by_dtypes.setdefault((model.dtype or "", checkpoint.dtype or ""), []).append(key)
    found: list[DtypeCast] = []
    size = 0
    for (mine, theirs), keys in sorted(by_dtypes.items()):
        for text, count in folds(keys):
            size += len(text.encode())
            if found and size > limit_bytes:
                return tuple(found)
            found.append(DtypeCast(text, count, mine, theirs))
    return tuple(found)
