"""
The rule that maps checkpoint keys to model keys, inferred from the two key sets and verified against shapes.

Only keys that are unexpected are mapped, only to keys that are missing, one to one. Rules are tried on a sample of
patterns, the best one then on every key; what shapes contradict is left out of the rule, and said, or the rule is
dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Final, NamedTuple

from ckpt_sentry.core import align
from ckpt_sentry.core.align import Samples, Sides, Vote
from ckpt_sentry.core.coverage import coverage
from ckpt_sentry.core.diff import Diff
from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Rename
from ckpt_sentry.core.rule import FORMS, WRAPPERS, Form, Kind, Rule, Swap, without
from ckpt_sentry.dataclasses_ import dataclass, replace

_AGREEING: Final = 4
"""Keys that must agree for each that contradicts, or there is no rule at all."""
_TRIED_ON_ALL: Final = 3
_SHOWN_BYTES: Final = 200
_EVIDENT_PATTERNS: Final = 3
_WHOLE: Final = 4
"""Keys of a model, all of them, that are enough whatever else the checkpoint holds."""
_ALIKE: Final = 0.5
"""The part of their letters that two names share, in order: "norm" and "layernorm" do, "fc" and "linear" do not."""


@dataclass(frozen=True, slots=True)
class Inference:
    """
    A rename, the keys it maps (checkpoint key to model key), and how sure it is.

    `ambiguous` says that another rule maps as much, to other keys.
    """

    rename: Rename
    mapping: Mapping[str, str]
    ambiguous: bool
    kind: Kind


class _Trial(NamedTuple):
    rule: Rule
    score: int
    mapping: dict[str, str]


class _Verified(NamedTuple):
    rule: Rule
    mapping: dict[str, str]
    words: str


def infer(
    model: Inventory,
    checkpoint: Inventory,
    difference: Diff,
    allow_missing: Sequence[str] = (),
    *,
    lost: Collection[str] = (),
) -> Inference | None:
    """
    Find the rule that maps the most unexpected keys to missing ones, the simplest among equals; None without any.

    The keys of `difference` alone are mapped; `lost` are further keys that would not load, for the coverage.
    """
    if not difference.missing or not difference.unexpected:
        return None
    sides = Sides(difference.unexpected, difference.missing, checkpoint.entries, model.entries)
    search = _Search(sides)
    best = _first_verified(search.best(), sides)
    if best is None:
        return None
    other = {pair.key for pair in (*difference.mismatched, *difference.retyped)}
    entering = model.entries.keys() - set(difference.missing) - other - set(lost) | set(best.mapping.values())
    first = min(best.mapping)
    rename = Rename(
        rule=best.words,
        coverage=coverage(model, entering, allow_missing).judged,
        count=len(best.mapping),
        example=(first, best.mapping[first]),
        stripped=best.rule.remove or None if best.words == Rule(remove=best.rule.remove).words() else None,
    )
    return Inference(rename, best.mapping, search.is_ambiguous(best.rule), best.rule.kind)


def _first_verified(trials: Sequence[_Trial], sides: Sides) -> _Verified | None:
    """
    Verify the first few trials and give the one that maps the most; none after the one that maps all there is.
    """
    best: _Verified | None = None
    for trial in trials[:_TRIED_ON_ALL]:
        found = _verify(trial, sides)
        if found is not None and (best is None or len(found.mapping) > len(best.mapping)):
            best = found
            if len(best.mapping) == min(len(sides.unexpected), len(sides.missing)):
                break
    return best


def _verify(trial: _Trial, sides: Sides) -> _Verified | None:
    """
    Apply a rule to every key. Keys that share a target are not mapped; too many contradicting shapes undo the rule.
    """
    rule, checkpoint, model = trial.rule, sides.checkpoint, sides.model
    pairs = dict(rule.apply(sides.unexpected, rule.targets(sides.missing)))
    if len(set(pairs.values())) < len(pairs):
        sources = Counter(pairs.values())
        pairs = {key: target for key, target in pairs.items() if sources[target] == 1}
    contradicting = [key for key, target in pairs.items() if checkpoint[key].shape != model[target].shape]
    for key in contradicting:
        del pairs[key]
    if not pairs or len(pairs) < _AGREEING * len(contradicting) or not _is_evident(trial, pairs, sides):
        return None
    words = rule.words()
    if contradicting:
        words += f", but not for {_named(contradicting)}: other shapes"
    return _Verified(rule, pairs, words)


def _is_evident(trial: _Trial, pairs: Mapping[str, str], sides: Sides) -> bool:
    """
    Tell whether there is enough for a rule that puts one unknown name in place of another.

    Two heads of the same shape are no rename, and one key of a shape is none of another name; a whole model is one,
    whatever else the checkpoint holds. What is only stripped or added, and pairs that are known, need no more than
    shapes that agree.
    """
    guesses = trial.rule.guesses
    if not guesses:
        return True
    if len(pairs) == 1 and not all(_resemble(old, new) for old, new in guesses):
        return False
    if len(pairs) == len(sides.missing) == len(sides.model) >= _WHOLE:
        return True
    fewer, more = sorted((len(sides.unexpected), len(sides.missing)))
    return len(pairs) == more or (len(trial.mapping) >= _EVIDENT_PATTERNS and len(pairs) * 2 >= fewer)


def _resemble(old: str, new: str) -> bool:
    """
    Tell whether two names look like one, as "attn" and "attention" do, by the components that they do not share.
    """
    ours, theirs = old.lower().split("."), new.lower().split(".")
    former = ".".join(part for part in ours if part not in theirs)
    latter = ".".join(part for part in theirs if part not in ours)
    return not former or not latter or SequenceMatcher(None, former, latter).ratio() >= _ALIKE


def _named(keys: Sequence[str]) -> str:
    listed = key_list(keys, _SHOWN_BYTES)
    return ", ".join(listed.keys) + (f" and {listed.omitted} more" if listed.omitted else "")


class _Search:
    """
    The rules that come into question, tried on a sample.
    """

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._samples = align.samples(sides.unexpected, sides.missing)
        self._targets: dict[tuple[str, ...], Mapping[str, str | None]] = {}
        self._tried: dict[Rule, _Trial] = {}
        self._all = sum(pattern.weight for pattern in self._samples.unexpected)

    def best(self) -> list[_Trial]:
        """
        Give the rules that map anything, the best first.
        """
        wrappers = self._wrappers()
        plain = Rule()
        for rule in align.prefixes(self._sides, self._samples):
            self._try(rule)
        if wrappers != plain and self._is_improvable():
            self._under(wrappers)
        if self._is_incomplete():
            self._compare_components(plain, self._sides, self._samples)
        if self._is_incomplete():
            for rule in self._strangers():
                self._try(rule)
        return self._ranked()

    def is_ambiguous(self, rule: Rule) -> bool:
        """
        Tell whether another rule does as much on the sample and leads somewhere else.
        """
        best = self._try(rule)
        return any(
            trial.score == best.score and trial.mapping != best.mapping and trial.rule.steps <= rule.steps
            for trial in self._tried.values()
        )

    def _ranked(self) -> list[_Trial]:
        mapped = [trial for trial in self._tried.values() if trial.mapping]
        # Among rules that do as much, names decide.
        return sorted(mapped, key=lambda trial: (-trial.score, trial.rule.steps, -_likeness(trial.rule)))

    def _is_improvable(self) -> bool:
        return self._is_incomplete() or self._ranked()[0].rule.steps > 1

    def _is_incomplete(self) -> bool:
        ranked = self._ranked()
        return not ranked or ranked[0].score < self._all

    def _try(self, rule: Rule) -> _Trial:
        if rule in self._tried:
            return self._tried[rule]
        targets = self._targets.get(rule.inserted)
        if targets is None:
            targets = self._targets[rule.inserted] = rule.targets(self._sides.missing)
        score, mapping, taken = 0, {}, set()
        weights = {pattern.key: pattern.weight for pattern in self._samples.unexpected}
        for key, target in rule.apply(weights, targets):
            if target not in taken and self._sides.agree(key, target):
                taken.add(target)
                mapping[key] = target
                score += weights[key]
        self._tried[rule] = trial = _Trial(rule, score, mapping)
        return trial

    def _wrappers(self) -> Rule:
        sides = self._sides
        return Rule(
            dropped=_occurring(sides.unexpected),
            inserted=_occurring(sides.missing),
            forms=tuple(_forms(self._samples)),
        )

    def _under(self, wrappers: Rule) -> None:
        """
        Try wrappers alone, as few as do, then together with prefixes and components.
        """
        best = self._fewest(wrappers)
        if best.score == self._all:
            return
        sides = _without_wrappers(self._sides, wrappers)
        taken = align.samples(sides.unexpected, sides.missing)
        for rule in align.prefixes(sides, taken):
            self._fewest(replace(wrappers, remove=rule.remove, add=rule.add))
        if self._is_incomplete():
            self._compare_components(wrappers, sides, taken)

    def _fewest(self, rule: Rule) -> _Trial:
        """
        Try a rule with all of its wrappers and forms, then take away those that nothing depends on.
        """
        best = self._try(rule)
        for form in rule.forms:
            less = self._try(replace(best.rule, forms=tuple(other for other in best.rule.forms if other != form)))
            best = less if less.score >= best.score else best
        for name in rule.dropped:
            less = self._try(replace(best.rule, dropped=tuple(other for other in best.rule.dropped if other != name)))
            best = less if less.score >= best.score else best
        for name in rule.inserted:
            less = self._try(replace(best.rule, inserted=tuple(other for other in best.rule.inserted if other != name)))
            best = less if less.score >= best.score else best
        return best

    def _compare_components(self, wrappers: Rule, sides: Sides, taken: Samples) -> None:
        targets = {key: key for key in sides.missing}
        for base in align.bases(taken):
            votes = align.swaps(base, sides, taken, targets)
            start = replace(wrappers, remove=base.remove, add=base.add)
            chosen = _choose(votes)
            if not chosen:
                continue
            best = self._stretch(self._grow(start, chosen), taken)
            for other in _alternatives(best.rule.swaps, votes):
                self._try(replace(best.rule, swaps=other))

    def _grow(self, start: Rule, chosen: Sequence[Swap]) -> _Trial:
        """
        Try all swaps together, then take away those that nothing depends on.
        """
        best = self._fewest(replace(start, swaps=tuple(chosen)))
        for swap in reversed(chosen):
            fewer = tuple(other for other in best.rule.swaps if other != swap)
            less = self._try(replace(best.rule, swaps=fewer))
            best = less if less.score >= best.score else best
        return best

    def _stretch(self, best: _Trial, taken: Samples) -> _Trial:
        """
        Try to add swaps of one component for several, as of `proj_attn` for `to_out.0`, for the keys that are left.
        """
        if best.score == self._all or not best.mapping:
            return best
        for old, new in align.stretches(taken, best.mapping):
            if all(old != swap.old for swap in best.rule.swaps):
                more = self._try(replace(best.rule, swaps=(*best.rule.swaps, Swap(old, new, last=False))))
                best = more if more.score > best.score else best
        return best

    def _strangers(self) -> Iterator[Rule]:
        dropped, inserted = align.strangers(self._samples)
        for name in dropped:
            yield Rule(dropped=(name,))
        for name in inserted:
            yield Rule(inserted=(name,))


def _occurring(keys: Sequence[str]) -> tuple[str, ...]:
    text = "\n".join(("", *keys))
    return tuple(name for name in WRAPPERS if f".{name}." in text or f"\n{name}." in text)


def _forms(taken: Samples) -> Iterator[Form]:
    """
    Give the forms in which some keys of the checkpoint are, where the model has some in the other one.
    """
    for form in FORMS:
        is_written = any(form.rewrite(pattern.key) != pattern.key for pattern in taken.unexpected)
        if is_written and any(re.search(form.sign, pattern.key) for pattern in taken.missing):
            yield form


def _likeness(rule: Rule) -> float:
    """
    Say how much the names that a rule guesses look like those in whose place it puts them.
    """
    return sum(align.likeness(old, new) for old, new in rule.guesses)


def _without_wrappers(sides: Sides, wrappers: Rule) -> Sides:
    unexpected, checkpoint = _bare(sides.unexpected, sides.checkpoint, wrappers.bared())
    missing, model = _bare(sides.missing, sides.model, without(wrappers.inserted))
    return Sides(unexpected, missing, checkpoint, model)


def _bare(
    keys: Sequence[str], entries: Mapping[str, Entry], bared: Callable[[str], str]
) -> tuple[Sequence[str], Mapping[str, Entry]]:
    bare = list(map(bared, keys))
    return bare, dict(zip(bare, map(entries.__getitem__, keys), strict=True))


def _choose(votes: Sequence[Vote]) -> list[Swap]:
    """
    Take the best swaps, one for each old and each new name; none by which names would change places.
    """
    old: set[tuple[str, bool]] = set()
    new: set[tuple[str, bool]] = set()
    chosen: list[Swap] = []
    for vote in votes:
        swap = vote.swap
        if (swap.old, swap.last) not in old and (swap.new, swap.last) not in new and not _circular(swap, chosen):
            old.add((swap.old, swap.last))
            new.add((swap.new, swap.last))
            chosen.append(swap)
    return chosen[:16]


def _circular(swap: Swap, chosen: Sequence[Swap]) -> bool:
    """
    Whether a swap closes a circle: both sides know these names, and no name that both know is a new one for another.
    """
    leads = {other.old: other.new for other in chosen}
    name: str | None = swap.new
    while name is not None and name != swap.old:
        name = leads.pop(name, None)
    return name is not None


def _alternatives(chosen: Sequence[Swap], votes: Sequence[Vote]) -> Iterator[tuple[Swap, ...]]:
    """
    Give the same swaps with one of them, or two crosswise, led elsewhere, where votes allow. Known pairs stay.
    """
    known = {vote.swap for vote in votes if vote.known}
    open_ = [swap for swap in chosen if swap not in known]
    possible = {vote.swap for vote in votes}
    for swap in open_:
        for vote in votes:
            if vote.swap.old == swap.old and vote.swap != swap and vote.swap.last == swap.last:
                partner = next((other for other in open_ if other.new == vote.swap.new), None)
                crossed = {swap: vote.swap}
                if partner is not None:
                    crossed[partner] = partner._replace(new=swap.new)
                    if crossed[partner] not in possible:
                        continue
                yield tuple(crossed.get(other, other) for other in chosen)
