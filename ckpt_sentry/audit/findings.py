"""
The sentences about keys: what happened, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import floor
from typing import Final

from ckpt_sentry.audit.coverage import Loss
from ckpt_sentry.audit.diff import Diff, Pair
from ckpt_sentry.audit.escape import shown
from ckpt_sentry.audit.fold import Fold, folds
from ckpt_sentry.audit.inventory import Inventory
from ckpt_sentry.audit.rename import Inference
from ckpt_sentry.audit.report import Coverage, Finding, Level, Shape

ORDER: Final = (
    "renamed_keys",
    "flat_optimizer",
    "optimizer_class_changed",
    "no_overlap",
    "shape_mismatch",
    "type_mismatch",
    "missing_keys",
    "block_lost",
    "kind_lost",
    "low_coverage",
    "unexpected_keys",
    "dtype_cast",
)
"""What explains comes before what it explains."""

_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    What the sentences are made of. `allowed` counts the missing keys that may be missing, `read` holds the keys that
    are read in spite of another shape.
    """

    model: Inventory
    checkpoint: Inventory
    difference: Diff
    coverage: Coverage
    inference: Inference | None = None
    losses: Sequence[Loss] = ()
    allowed: int = 0
    read: AbstractSet[str] = frozenset()
    minimum: float | None = None


def collect(facts: Facts) -> Iterator[Finding]:
    """
    Say all that is to be said.
    """
    for say in _SAYERS:
        yield from say(facts)


def percent(part: float) -> str:
    """
    Write a part as a percentage, rounded down: 100 % is all and nothing less, and 0 % is nothing at all.
    """
    tenths = floor(part * 1000)
    if part > 0 and tenths == 0:
        return "<0.1 %"
    return f"{tenths // 10} %" if tenths % 10 == 0 else f"{tenths / 10:.1f} %"


def keys(count: int) -> str:
    """
    Count keys in words: "1 key", "2 keys".
    """
    return "1 key" if count == 1 else f"{count:,} keys"


def listing(names: Collection[str]) -> str:
    """
    Name keys in a sentence: the first folds, and how many keys more.
    """
    first: list[Fold] = []
    for found in folds(names):
        if len(first) == _SHOWN:
            break
        first.append(found)
    rest = len(set(names)) - sum(found.count for found in first)
    return ", ".join(found.text for found in first) + (f" and {rest:,} more" if rest else "")


def _renamed(facts: Facts) -> Iterator[Finding]:
    inference = facts.inference
    if inference is None or inference.rename.example is None:
        return
    rename = inference.rename
    before, after = map(shown, inference.rename.example or ("", ""))
    unsure = " Other rules fit as well: compare values before trusting this one." if inference.ambiguous else ""
    yield Finding(
        "renamed_keys",
        "warning",
        f"The checkpoint has {keys(rename.count)} of this model under other names: {rename.rule} "
        f"({before} → {after}), then {percent(rename.coverage)} would load.{unsure}",
        "Rename the checkpoint's keys by this rule: ckpt_sentry.unify_keys(state_dict, model), or CKPT_SENTRY_ALIGN=auto.",
    )


def _no_overlap(facts: Facts) -> Iterator[Finding]:
    model, difference = facts.model.entries, facts.difference
    if not model or any(key in facts.checkpoint.entries for key in model):
        return
    if not facts.checkpoint.entries:
        text = f"The checkpoint holds nothing: 0 of {keys(len(model))} would load."
        yield Finding("no_overlap", "error", text, "Check that the path is the one that was saved to.")
        return
    text = (
        f"No key of the checkpoint is a key of this model: 0 of {keys(len(model))} would load. "
        f"The checkpoint has {listing(difference.unexpected)}; the model wants {listing(difference.missing)}."
    )
    following = None if facts.inference is not None else "Check that the checkpoint belongs to this model."
    yield Finding("no_overlap", "error", text, following)


def _mismatched(facts: Facts) -> Iterator[Finding]:
    pairs = facts.difference.mismatched
    if not pairs:
        return
    parts = [
        f"{listing(names)} (model {_shape(mine)}, checkpoint {_shape(theirs)})"
        for (mine, theirs), names in list(_by_shapes(pairs).items())[:_SHOWN]
    ]
    said = "; ".join(parts) + ("; …" if len(_by_shapes(pairs)) > _SHOWN else "")
    copied = all(pair.key in facts.read for pair in pairs)
    level: Level = "warning" if copied else "error"
    how = "were copied in part, because the shapes differ" if copied else "have other shapes in the checkpoint"
    one = "was copied in part, because the shapes differ" if copied else "has another shape in the checkpoint"
    yield Finding(
        "shape_mismatch",
        level,
        f"{keys(len(pairs))} {one if len(pairs) == 1 else how}: {said}.",
        "Build the model with the configuration that the checkpoint was saved with.",
    )


def _by_shapes(pairs: Iterable[Pair]) -> dict[tuple[Shape, Shape], list[str]]:
    found: dict[tuple[Shape, Shape], list[str]] = {}
    for key, mine, theirs in pairs:
        found.setdefault((mine.shape or (), theirs.shape or ()), []).append(key)
    return found


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _retyped(facts: Facts) -> Iterator[Finding]:
    pairs = facts.difference.retyped
    for wanted, saved, chosen in (
        ("a tensor", "another object", [pair.key for pair in pairs if pair.model.shape is not None]),
        ("another object", "a tensor", [pair.key for pair in pairs if pair.model.shape is None]),
    ):
        if chosen:
            verb = "is" if len(chosen) == 1 else "are each"
            yield Finding(
                "type_mismatch",
                "error",
                f"{keys(len(chosen))} {verb} {saved} in the checkpoint where the program asks for {wanted}: "
                f"{listing(chosen)}.",
                "Ask for the type that was saved, and convert it after the load.",
            )


def _missing(facts: Facts) -> Iterator[Finding]:
    missing = facts.difference.missing
    if not missing:
        return
    text = f"{keys(len(missing))} missing from the checkpoint: {listing(missing)}."
    if facts.allowed == len(missing):
        yield Finding("missing_keys", "info", f"{text} All of them may be.")
        return
    if facts.allowed:
        text += f" {facts.allowed:,} of them may be."
    explained = facts.inference is not None and set(missing) <= set(facts.inference.mapping.values())
    following = "If they are to start anew, name them in CKPT_SENTRY_ALLOW_MISSING."
    yield Finding("missing_keys", "warning", text, None if explained else following)


def _lost(facts: Facts) -> Iterator[Finding]:
    for loss in facts.losses:
        code = "block_lost" if loss.what == "block" else "kind_lost"
        yield Finding(code, "warning", f"{loss.text[0].upper()}{loss.text[1:]}.")


def _low_coverage(facts: Facts) -> Iterator[Finding]:
    minimum, part = facts.minimum, facts.coverage
    if minimum is None or part.judged >= minimum:
        return
    yield Finding(
        "low_coverage",
        "error",
        f"Coverage is {percent(part.keys)} of keys and {percent(part.elements)} of elements, under the minimum of "
        f"{percent(minimum)}.",
        "Mend the cause, or lower CKPT_SENTRY_MIN_COVERAGE or name the gap in CKPT_SENTRY_ALLOW_MISSING if it is wanted.",
    )


def _unexpected(facts: Facts) -> Iterator[Finding]:
    unexpected = facts.difference.unexpected
    if unexpected:
        verb = "is" if len(unexpected) == 1 else "are"
        text = f"{keys(len(unexpected))} of the checkpoint {verb} not in the model, unexpected: {listing(unexpected)}."
        yield Finding("unexpected_keys", "info", text)


def _casts(facts: Facts) -> Iterator[Finding]:
    by_dtypes: dict[tuple[str, str], list[str]] = {}
    for key, mine, theirs in facts.difference.casts:
        by_dtypes.setdefault((theirs.dtype or "", mine.dtype or ""), []).append(key)
    for (saved, wanted), names in sorted(by_dtypes.items()):
        verb = "is" if len(names) == 1 else "are"
        text = f"{keys(len(names))} {verb} cast from {saved} to {wanted}: {listing(names)}."
        yield Finding("dtype_cast", "info", text)


_SAYERS: Final[tuple[Callable[[Facts], Iterable[Finding]], ...]] = (
    _renamed,
    _no_overlap,
    _mismatched,
    _retyped,
    _missing,
    _lost,
    _low_coverage,
    _unexpected,
    _casts,
)
