"""
Everything that names, shapes and dtypes tell about a load, in one call for the integrations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from ckpt_sentry.core.diff import Diff, Pair, diff
from ckpt_sentry.core.fold import LIMIT_BYTES
from ckpt_sentry.core.inventory import Inventory
from ckpt_sentry.core.report import FULL, NO_KEYS, Coverage, DtypeCast, Finding, KeyList, Rename, Shape, ShapeMismatch
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core import findings, quantized
    from ckpt_sentry.core.coverage import coverage, losses, matcher, utilisation
    from ckpt_sentry.core.fold import bounded, folds, key_list
    from ckpt_sentry.core.optimizer import Diagnosis, diagnose, is_optimizers
    from ckpt_sentry.core.rename import Inference, infer
else:
    Diagnosis = later("ckpt_sentry.core.optimizer:Diagnosis")
    diagnose = later("ckpt_sentry.core.optimizer:diagnose")
    is_optimizers = later("ckpt_sentry.core.optimizer:is_optimizers")
    findings = later("ckpt_sentry.core.findings")
    quantized = later("ckpt_sentry.core.quantized")
    Inference = later("ckpt_sentry.core.rename:Inference")
    infer = later("ckpt_sentry.core.rename:infer")
    coverage = later("ckpt_sentry.core.coverage:coverage")
    losses = later("ckpt_sentry.core.coverage:losses")
    matcher = later("ckpt_sentry.core.coverage:matcher")
    utilisation = later("ckpt_sentry.core.coverage:utilisation")
    bounded = later("ckpt_sentry.core.fold:bounded")
    folds = later("ckpt_sentry.core.fold:folds")
    key_list = later("ckpt_sentry.core.fold:key_list")

_Folded = TypeVar("_Folded", ShapeMismatch, DtypeCast)
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
    difference: Diff = field(default_factory=Diff)
    inference: Inference | None = None


def examine(  # noqa: PLR0913 - two sides, and what is known about the load
    model: Inventory,
    checkpoint: Inventory,
    *,
    allow_missing: Sequence[str] = (),
    read_fractions: Mapping[str, float] | None = None,
    minimum: float | None = None,
    packed: Collection[str] = (),
    limit_bytes: int = LIMIT_BYTES,
) -> Examination:
    """
    Compare what a model asks for with what a checkpoint holds.

    A name that shares its storage with one that the checkpoint has is not missing, and of tied names that are missing
    one is named and counted; `difference` has them all. `allow_missing` are globs of keys
    that may stay unloaded. `read_fractions` gives, for the keys where that is known, the part of the elements that is
    really read, in [0, 1]; all other keys are read whole where the shapes agree, and not at all where they do not.
    Below `minimum`, a coverage in [0, 1], there is a finding `low_coverage`. `packed` are parameters
    that a quantizer packs. Each list of keys is bounded by `limit_bytes`.
    """
    raw = diff(model.entries, checkpoint.entries)
    fractions = _NOTHING_READ if read_fractions is None else read_fractions
    if raw.matched == len(model.entries) == len(checkpoint.entries) and not raw.casts and not fractions:
        return Examination(matched=raw.matched, coverage=FULL, utilisation=1.0, difference=raw)
    difference = _without_tied(raw, model)
    optimizer = _diagnose_optimizer(model, checkpoint, difference)
    unexplained = _without(difference, optimizer.explained)
    inference = infer(model, checkpoint, unexplained, allow_missing, lost=optimizer.explained)
    supplied = _supplied(model, difference, fractions)
    part = FULL if len(supplied) == len(model.entries) and not fractions else coverage(model, supplied, allow_missing)
    allowed, counted = matcher(allow_missing), model.once(difference.missing)
    facts = findings.KeyFacts(
        model=model,
        checkpoint=checkpoint,
        coverage=part,
        missing=tuple(folds(counted)),
        gone=difference.missing,
        unexpected=tuple(folds(difference.unexpected)),
        mismatched=_fold_mismatched(difference.mismatched),
        casts=_fold_casts(difference.casts),
        retyped=difference.retyped,
        inference=inference,
        losses=losses(model, [key for key in unexplained.missing if not (allowed(key) or is_optimizers(key))]),
        allowed=len(counted) - len(model.once(key for key in difference.missing if not allowed(key))),
        is_explained=_is_explained(difference, optimizer, inference),
        is_copied=all(fractions.get(pair.key, 0.0) > 0 for pair in difference.mismatched),
        minimum=minimum,
    )
    told = (*optimizer.findings, *findings.collect(facts), *_quantized(facts, difference, packed))
    return Examination(
        matched=difference.matched,
        coverage=part,
        utilisation=utilisation(checkpoint, supplied.keys()) if difference.unexpected or part != FULL else 1.0,
        missing=bounded(facts.missing, limit_bytes),
        unexpected=bounded(facts.unexpected, limit_bytes),
        mismatched=_first(facts.mismatched, limit_bytes),
        casts=_first(facts.casts, limit_bytes),
        retyped=key_list((pair.key for pair in difference.retyped), limit_bytes),
        rename=None if inference is None else inference.rename,
        findings=findings.ranked(told),
        difference=difference,
        inference=inference,
    )


def _quantized(facts: findings.KeyFacts, difference: Diff, packed: Collection[str]) -> Iterator[Finding]:
    """
    Say which weights are loaded without the state that a quantizer keeps beside them.
    """
    if difference.unexpected:
        lost = {pair.key for pair in (*difference.mismatched, *difference.retyped)}
        yield from quantized.findings(
            quantized.dropped(facts.model, facts.checkpoint, difference.unexpected, packed, lost)
        )


def _without_tied(raw: Diff, model: Inventory) -> Diff:
    """
    Take the names from the missing ones whose storage another name fills.
    """
    if not model.ties or not raw.missing:
        return raw
    lost = {*raw.missing, *(pair.key for pair in (*raw.mismatched, *raw.retyped))}
    filled = {model.storage(key) for key in model.entries if key not in lost}
    missing = tuple(key for key in raw.missing if model.storage(key) not in filled)
    return replace(raw, missing=missing)


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


def _without(difference: Diff, explained: Collection[str]) -> Diff:
    """
    Take keys that are explained already from both sides.
    """
    if not explained:
        return difference
    return replace(
        difference,
        missing=tuple(key for key in difference.missing if key not in explained),
        unexpected=tuple(key for key in difference.unexpected if key not in explained),
    )


def _is_explained(difference: Diff, optimizer: Diagnosis, inference: Inference | None) -> bool:
    renamed = set() if inference is None else set(inference.mapping.values())
    return bool(renamed or optimizer.explained) and renamed.union(optimizer.explained).issuperset(difference.missing)


def _fold_mismatched(pairs: Iterable[Pair]) -> tuple[ShapeMismatch, ...]:
    by_shapes: dict[tuple[Shape, Shape], list[str]] = {}
    for key, model, checkpoint in pairs:
        by_shapes.setdefault((model.shape or (), checkpoint.shape or ()), []).append(key)
    # No brace group holds a dot: what stands before the last one is the folded module path.
    return tuple(
        ShapeMismatch(text, count, text.rpartition(".")[0], mine, theirs)
        for (mine, theirs), keys in by_shapes.items()
        for text, count in _texts(keys)
    )


def _fold_casts(pairs: Iterable[Pair]) -> tuple[DtypeCast, ...]:
    by_dtypes: dict[tuple[str, str], list[str]] = {}
    for key, model, checkpoint in pairs:
        by_dtypes.setdefault((model.dtype or "", checkpoint.dtype or ""), []).append(key)
    return tuple(
        DtypeCast(text, count, mine, theirs)
        for (mine, theirs), keys in sorted(by_dtypes.items())
        for text, count in _texts(keys)
    )


def _texts(keys: Iterable[str]) -> Iterator[tuple[str, int]]:
    for found in folds(keys):
        yield found.text, found.count


def _first(items: Sequence[_Folded], limit_bytes: int) -> tuple[_Folded, ...]:
    """
    Keep the first items, at most `limit_bytes` of their keys, but one at least.
    """
    size = 0
    for place, item in enumerate(items):
        size += len(item.keys.encode())
        if place and size > limit_bytes:
            return tuple(items[:place])
    return tuple(items)
