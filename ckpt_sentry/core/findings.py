"""
The sentences about keys: what happened, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ckpt_sentry.core import codes, training
from ckpt_sentry.core.coverage import Loss
from ckpt_sentry.core.depth import shallower
from ckpt_sentry.core.diff import Pair
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.fold import Fold, folds
from ckpt_sentry.core.inventory import Inventory
from ckpt_sentry.core.rename import Inference
from ckpt_sentry.core.report import Coverage, DtypeCast, Finding, Level, Shape, ShapeMismatch
from ckpt_sentry.core.words import counted, keys, percent, verb
from ckpt_sentry.dataclasses_ import dataclass, replace

__all__ = ["anew", "collect", "counted", "keys", "listing", "percent", "ranked", "renaming", "verb"]

RENAME: Final = codes.BY_NAME["renamed_keys"].step
RENAME_BY_HAND: Final = (
    "Once the prefix is sure, name it yourself: ckpt_sentry.unify_keys(state_dict, model, strip_prefix=…, "
    "add_prefix=…)."
)
RENAME_ONE_BY_ONE: Final = (
    "Once it is sure which is which, rename them yourself before the load: state_dict[new] = state_dict.pop(old)."
)
_GATHERED: Final = (
    "The checkpoint has no elements of them: they were saved without being gathered, as DeepSpeed's ZeRO-3 does it. "
    "Gather them when saving, with accelerator.get_state_dict(model), or make whole ones of the shards with "
    "zero_to_fp32.py."
)
_ANEW: Final = "If the missing keys are to start anew"
BY_RENAMING: Final = "rename"
BY_ALLOWING: Final = "allow"
"""What a finding's `remedy` may be: a loader has its own call for it."""
SHOWN: Final = 3
"""Folds of keys in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """
    What the sentences are made of.

    `missing` are folds of `gone`, of which it has one name for each storage; `allowed` counts those of them that may be
    missing; `is_explained` says that a rename or an optimizer explains
    every missing key; `is_copied`, that the keys of other shapes are read all the same.
    """

    model: Inventory
    checkpoint: Inventory
    coverage: Coverage
    missing: Sequence[Fold] = ()
    gone: Sequence[str] = ()
    unexpected: Sequence[Fold] = ()
    mismatched: Sequence[ShapeMismatch] = ()
    casts: Sequence[DtypeCast] = ()
    retyped: Sequence[Pair] = ()
    inference: Inference | None = None
    losses: Sequence[Loss] = ()
    allowed: int = 0
    is_explained: bool = False
    is_copied: bool = False
    minimum: float | None = None


def collect(facts: KeyFacts) -> Iterator[Finding]:
    """
    Say all that is to be said.
    """
    for say in _SAYERS:
        yield from say(facts)


def ranked(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """
    Put what explains before what it explains.
    """
    return tuple(sorted(found, key=lambda finding: (codes.PLACE[finding.code], finding.text)))


def renaming(found: Iterable[Finding], step: str | None) -> tuple[Finding, ...]:
    """
    The same findings, with the call by which this loader is made to rename (None: it has none); not where the rule is
    in doubt.
    """
    return tuple(replace(one, next=step, remedy=None) if one.remedy == BY_RENAMING else one for one in found)


def anew(found: Iterable[Finding], way: str | None) -> tuple[Finding, ...]:
    """
    The same findings, with the way by which this loader is made to leave the missing keys as they are (None: none).

    Only where that would let the load pass has `collect` said so.
    """
    step = None if way is None else f"{_ANEW}: {way}."
    return tuple(replace(one, next=step) if is_anew(one) else one for one in found)


def is_anew(found: Finding) -> bool:
    """
    Whether the next step is the way to leave missing keys as they are.
    """
    return found.next is not None and found.remedy == BY_ALLOWING


def listing(folded: Sequence[Fold]) -> str:
    """
    Name keys in a sentence: the first folds, and how many keys more.
    """
    rest = sum(found.count for found in folded[SHOWN:])
    return ", ".join(found.text for found in folded[:SHOWN]) + (f" and {rest:,} more" if rest else "")


def _count(folded: Iterable[Fold | ShapeMismatch | DtypeCast]) -> int:
    return sum(found.count for found in folded)


def _renamed(facts: KeyFacts) -> Iterator[Finding]:
    inference = facts.inference
    if inference is None or inference.rename.example is None:
        return
    rename = inference.rename
    before, after = map(shown, inference.rename.example)
    said = {"rule": rename.rule, "before": before, "after": after, "coverage": percent(rename.coverage)}
    if inference.ambiguous:
        said["in_doubt"] = "yes"
    one = codes.finding("renamed_keys", "warning", _way(inference), count=rename.count, **said)
    yield one if inference.ambiguous else replace(one, remedy=BY_RENAMING)


def _way(inference: Inference) -> str | None:
    if not inference.ambiguous:
        return RENAME
    return RENAME_BY_HAND if inference.kind == "prefix" else RENAME_ONE_BY_ONE


def _no_overlap(facts: KeyFacts) -> Iterator[Finding]:
    if not facts.model.entries or _overlaps(facts):
        return
    if not facts.checkpoint.entries:
        step = "Check that the path is the one that was saved to."
        yield codes.finding("no_overlap", "error", step, count=facts.model.keys, theirs="", ours="")
        return
    belongs = None if facts.inference is not None else "Check that the checkpoint belongs to this model."
    theirs, ours = listing(facts.unexpected), listing(facts.missing)
    yield codes.finding("no_overlap", "error", belongs, count=facts.model.keys, theirs=theirs, ours=ours)


def _overlaps(facts: KeyFacts) -> bool:
    return any(key in facts.checkpoint.entries for key in facts.model.entries)


def _is_gap(facts: KeyFacts) -> bool:
    """
    Whether nothing but missing keys is in the way: to allow them is then a way out, not a guard disarmed.
    """
    others = facts.retyped or (facts.mismatched and not facts.is_copied)
    return not (facts.is_explained or facts.inference or others) and _overlaps(facts)


def _mismatched(facts: KeyFacts) -> Iterator[Finding]:
    found = facts.mismatched
    if not found:
        return
    count = _count(found)
    said = "; ".join(
        f"{one.keys} (model {_shape(one.model_shape)}, checkpoint {_shape(one.checkpoint_shape)})"
        for one in found[:SHOWN]
    )
    if rest := _count(found[SHOWN:]):
        said += f" and {rest:,} more"
    is_empty = all(0 in one.checkpoint_shape and 0 not in one.model_shape for one in found)
    step = _GATHERED if is_empty else codes.BY_NAME["shape_mismatch"].step
    if facts.is_copied:
        yield codes.finding("shape_mismatch", "warning", step, count=count, listed=said, is_copied="yes")
    else:
        yield codes.finding("shape_mismatch", "error", step, count=count, listed=said)


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _retyped(facts: KeyFacts) -> Iterator[Finding]:
    for wanted, saved, chosen in (
        ("a tensor", "another object", [pair.key for pair in facts.retyped if pair.model.shape is not None]),
        ("another object", "a tensor", [pair.key for pair in facts.retyped if pair.model.shape is None]),
    ):
        if chosen:
            step, listed = codes.BY_NAME["type_mismatch"].step, listing(tuple(folds(chosen)))
            yield codes.finding(
                "type_mismatch", "error", step, count=len(chosen), saved=saved, wanted=wanted, listed=listed
            )


def _missing(facts: KeyFacts) -> Iterator[Finding]:
    count = _count(facts.missing)
    if not count:
        return
    level: Level = "info" if facts.allowed == count else "warning"
    one = codes.finding("missing_keys", level, count=count, listed=listing(facts.missing), allowed=facts.allowed)
    if level == "info" or not _is_gap(facts):
        yield one
    elif (step := _depth(facts)) is not None:
        yield replace(one, next=step)
    else:
        yield replace(one, next=_allowance(), remedy=BY_ALLOWING)


def _allowance() -> str:
    return f"{_ANEW}, name them in CKPT_SENTRY_ALLOW_MISSING."


def _training(facts: KeyFacts) -> Iterator[Finding]:
    if facts.allowed < _count(facts.missing) and not (facts.inference or facts.mismatched or facts.retyped):
        yield from training.findings(facts.model.entries, facts.checkpoint.entries, facts.gone)


def _depth(facts: KeyFacts) -> str | None:
    return shallower(facts.model.entries, facts.checkpoint.entries, facts.gone)


def _lost(facts: KeyFacts) -> Iterator[Finding]:
    for loss in facts.losses:
        code = "block_lost" if loss.what == "block" else "kind_lost"
        # What missing_keys would say, where it says how deep to build the model instead.
        one = Finding(code, "warning", f"{loss.text[0].upper()}{loss.text[1:]}.")
        is_gap = code == "block_lost" and _is_gap(facts) and _depth(facts)
        yield replace(one, next=_allowance(), remedy=BY_ALLOWING) if is_gap else one


def _low_coverage(facts: KeyFacts) -> Iterator[Finding]:
    minimum, part = facts.minimum, facts.coverage
    if minimum is None or part.judged >= minimum:
        return
    wanted = f"Mend the cause; if the gap is wanted, name it in CKPT_SENTRY_ALLOW_MISSING{_lower(minimum)}."
    yield codes.finding(
        "low_coverage",
        "error",
        wanted if _is_gap(facts) else None,
        keys=percent(part.keys),
        elements=percent(part.elements),
        minimum=percent(minimum),
    )


def _lower(minimum: float) -> str:
    """
    The other way out. Where all is asked for, as the mode "strict" does, a lower minimum is none.
    """
    return " or lower CKPT_SENTRY_MIN_COVERAGE" if minimum < 1 else ""


def _unexpected(facts: KeyFacts) -> Iterator[Finding]:
    if count := _count(facts.unexpected):
        yield codes.finding("unexpected_keys", "info", count=count, listed=listing(facts.unexpected))


def _casts(facts: KeyFacts) -> Iterator[Finding]:
    by_dtypes: dict[tuple[str, str], list[Fold]] = {}
    for cast in facts.casts:
        by_dtypes.setdefault((cast.checkpoint_dtype, cast.model_dtype), []).append(Fold(cast.keys, cast.count))
    for (saved, wanted), folded in by_dtypes.items():
        count, listed = _count(folded), listing(folded)
        yield codes.finding("dtype_cast", "info", count=count, saved=saved, wanted=wanted, listed=listed)


_SAYERS: Final[tuple[Callable[[KeyFacts], Iterable[Finding]], ...]] = (
    _renamed,
    _no_overlap,
    _mismatched,
    _retyped,
    _missing,
    _training,
    _lost,
    _low_coverage,
    _unexpected,
    _casts,
)
