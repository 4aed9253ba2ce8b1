"""
The sentences about keys: what happened, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor
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
from ckpt_sentry.dataclasses_ import dataclass, replace

RENAME: Final = "Rename its keys: model.load_state_dict(ckpt_sentry.unify_keys(state_dict, model))."
RENAME_BY_HAND: Final = (
    "Once the prefix is sure, name it yourself: ckpt_sentry.unify_keys(state_dict, model, strip_prefix=…, "
    "add_prefix=…)."
)
RENAME_ONE_BY_ONE: Final = (
    "Once it is sure which is which, rename them yourself before the load: state_dict[new] = state_dict.pop(old)."
)
_CONFIGURATION: Final = "Build the model with the configuration that the checkpoint was saved with."
_GATHERED: Final = (
    "The checkpoint has no elements of them: they were saved without being gathered, as DeepSpeed's ZeRO-3 does it. "
    "Gather them when saving, with accelerator.get_state_dict(model), or make whole ones of the shards with "
    "zero_to_fp32.py."
)
_ANEW: Final = "If the missing keys are to start anew"
SHOWN: Final = 3
"""Folds of keys in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
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


def collect(facts: Facts) -> Iterator[Finding]:
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
    return tuple(replace(one, next=step) if one.code == "renamed_keys" and one.next == RENAME else one for one in found)


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
    return found.next is not None and found.next.startswith(_ANEW)


def percent(part: float) -> str:
    """
    Write a part as a percentage, rounded down: 100 % is all and nothing less, and 0 % is nothing at all.
    """
    tenths = floor(part * 1000 + 1e-9)  # 0.57 * 1000 is 569.99…
    if part < 1:
        tenths = min(tenths, 999)
    if part > 0 and tenths == 0:
        return "<0.1 %"
    return f"{tenths // 10} %" if tenths % 10 == 0 else f"{tenths / 10:.1f} %"


def keys(count: int) -> str:
    """
    Count keys in words: "1 key", "2 keys".
    """
    return counted(count, "key")


def counted(count: int, noun: str) -> str:
    """
    Count things in words: "1 tensor", "2 tensors".
    """
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def listing(folded: Sequence[Fold]) -> str:
    """
    Name keys in a sentence: the first folds, and how many keys more.
    """
    rest = sum(found.count for found in folded[SHOWN:])
    return ", ".join(found.text for found in folded[:SHOWN]) + (f" and {rest:,} more" if rest else "")


def _count(folded: Iterable[Fold | ShapeMismatch | DtypeCast]) -> int:
    return sum(found.count for found in folded)


def _renamed(facts: Facts) -> Iterator[Finding]:
    inference = facts.inference
    if inference is None or inference.rename.example is None:
        return
    rename = inference.rename
    before, after = map(shown, inference.rename.example)
    unsure = " Other rules fit as well: check this one against the code that saved it." if inference.ambiguous else ""
    yield Finding(
        "renamed_keys",
        "warning",
        f"The checkpoint has {keys(rename.count)} of this model under other names: {rename.rule} "
        f"({before} → {after}), then {percent(rename.coverage)} would load.{unsure}",
        _way(inference),
    )


def _way(inference: Inference) -> str:
    if not inference.ambiguous:
        return RENAME
    return RENAME_BY_HAND if inference.kind == "prefix" else RENAME_ONE_BY_ONE


def _no_overlap(facts: Facts) -> Iterator[Finding]:
    if not facts.model.entries or _overlaps(facts):
        return
    if not facts.checkpoint.entries:
        text = f"The checkpoint holds nothing: 0 of {keys(facts.model.keys)} would load."
        yield Finding("no_overlap", "error", text, "Check that the path is the one that was saved to.")
        return
    text = (
        f"No key of the checkpoint is a key of this model: 0 of {keys(facts.model.keys)} would load. "
        f"The checkpoint has {listing(facts.unexpected)}; the model wants {listing(facts.missing)}."
    )
    following = None if facts.inference is not None else "Check that the checkpoint belongs to this model."
    yield Finding("no_overlap", "error", text, following)


def _overlaps(facts: Facts) -> bool:
    return any(key in facts.checkpoint.entries for key in facts.model.entries)


def _is_gap(facts: Facts) -> bool:
    """
    Whether nothing but missing keys is in the way: to allow them is then a way out, not a guard disarmed.
    """
    others = facts.retyped or (facts.mismatched and not facts.is_copied)
    return not (facts.is_explained or facts.inference or others) and _overlaps(facts)


def _mismatched(facts: Facts) -> Iterator[Finding]:
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
    if facts.is_copied:
        level: Level = "warning"
        what = f"{keys(count)} {verb(count, 'was', 'were')} copied as far as the shapes allow"
    else:
        level = "error"
        what = f"{keys(count)} {verb(count, 'has another shape', 'have other shapes')} in the checkpoint"
    is_empty = all(0 in one.checkpoint_shape and 0 not in one.model_shape for one in found)
    yield Finding("shape_mismatch", level, f"{what}: {said}.", _GATHERED if is_empty else _CONFIGURATION)


def verb(count: int, one: str, many: str) -> str:
    """
    The verb for one, or for so many.
    """
    return one if count == 1 else many


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _retyped(facts: Facts) -> Iterator[Finding]:
    for wanted, saved, chosen in (
        ("a tensor", "another object", [pair.key for pair in facts.retyped if pair.model.shape is not None]),
        ("another object", "a tensor", [pair.key for pair in facts.retyped if pair.model.shape is None]),
    ):
        if chosen:
            text = (
                f"{keys(len(chosen))} {verb(len(chosen), 'is', 'are each')} {saved} in the checkpoint "
                f"where the program asks for {wanted}: {listing(tuple(folds(chosen)))}."
            )
            yield Finding(
                "type_mismatch", "error", text, "Ask for the type that was saved, and convert it after the load."
            )


def _missing(facts: Facts) -> Iterator[Finding]:
    count = _count(facts.missing)
    if not count:
        return
    text = f"{keys(count)} missing from the checkpoint: {listing(facts.missing)}."
    if facts.allowed == count:
        yield Finding("missing_keys", "info", f"{text} {verb(count, 'It', 'All of them')} may be.")
        return
    if facts.allowed:
        text += f" {facts.allowed:,} of them may be."
    if not _is_gap(facts):
        yield Finding("missing_keys", "warning", text)
        return
    yield Finding("missing_keys", "warning", text, _depth(facts) or _allowance())


def _allowance() -> str:
    return f"{_ANEW}, name them in CKPT_SENTRY_ALLOW_MISSING."


def _training(facts: Facts) -> Iterator[Finding]:
    if facts.allowed < _count(facts.missing) and not (facts.inference or facts.mismatched or facts.retyped):
        yield from training.findings(facts.model.entries, facts.checkpoint.entries, facts.gone)


def _depth(facts: Facts) -> str | None:
    return shallower(facts.model.entries, facts.checkpoint.entries, facts.gone)


def _lost(facts: Facts) -> Iterator[Finding]:
    for loss in facts.losses:
        code = "block_lost" if loss.what == "block" else "kind_lost"
        # What missing_keys would say, where it says how deep to build the model instead.
        following = _allowance() if code == "block_lost" and _is_gap(facts) and _depth(facts) else None
        yield Finding(code, "warning", f"{loss.text[0].upper()}{loss.text[1:]}.", following)


def _low_coverage(facts: Facts) -> Iterator[Finding]:
    minimum, part = facts.minimum, facts.coverage
    if minimum is None or part.judged >= minimum:
        return
    yield Finding(
        "low_coverage",
        "error",
        f"Coverage is {percent(part.keys)} of keys and {percent(part.elements)} of elements, under the minimum of "
        f"{percent(minimum)}.",
        f"Mend the cause; if the gap is wanted, name it in CKPT_SENTRY_ALLOW_MISSING{_lower(minimum)}."
        if _is_gap(facts)
        else None,
    )


def _lower(minimum: float) -> str:
    """
    The other way out. Where all is asked for, as the mode "strict" does, a lower minimum is none.
    """
    return " or lower CKPT_SENTRY_MIN_COVERAGE" if minimum < 1 else ""


def _unexpected(facts: Facts) -> Iterator[Finding]:
    if count := _count(facts.unexpected):
        is_or_are = verb(count, "is", "are")
        text = f"{keys(count)} of the checkpoint {is_or_are} not in the model, unexpected: {listing(facts.unexpected)}."
        yield Finding("unexpected_keys", "info", text)


def _casts(facts: Facts) -> Iterator[Finding]:
    by_dtypes: dict[tuple[str, str], list[Fold]] = {}
    for cast in facts.casts:
        by_dtypes.setdefault((cast.checkpoint_dtype, cast.model_dtype), []).append(Fold(cast.keys, cast.count))
    for (saved, wanted), folded in by_dtypes.items():
        count = _count(folded)
        text = f"{keys(count)} {verb(count, 'is', 'are')} cast from {saved} to {wanted}: {listing(folded)}."
        yield Finding("dtype_cast", "info", text)


_SAYERS: Final[tuple[Callable[[Facts], Iterable[Finding]], ...]] = (
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
