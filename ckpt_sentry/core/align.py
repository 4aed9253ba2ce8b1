"""
Candidates for a rename: what lines up when checkpoint keys are laid beside model keys.

Works on samples, since the blocks of a model repeat: keys that differ in numbers only count as one pattern.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Final, NamedTuple

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.core.rule import KNOWN, Rule, Swap
from ckpt_sentry.dataclasses_ import dataclass

_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)")
_LETTER: Final = re.compile(r"(?:(?<=_)|^w?)([a-z])(?=_|$)")
_WORD: Final = re.compile(r"[a-z]+")
_SAMPLED_KEYS: Final = 16_384
_PATTERNS: Final = 96
_MODEL_PATTERNS: Final = 768
_MOST_SWAPS: Final = 4
_MOST_PREFIXES: Final = 6


class Pattern(NamedTuple):
    """
    Keys that differ in numbers only: one of them, how many there are, and its components ("#" for a number).
    """

    key: str
    weight: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sides:
    """
    What a rename may map: unexpected checkpoint keys to missing model keys, and the shapes on both sides.
    """

    unexpected: Sequence[str]
    missing: Sequence[str]
    checkpoint: Mapping[str, Entry]
    model: Mapping[str, Entry]

    def agree(self, key: str, target: str) -> bool:
        """
        Tell whether the values may be the same by their shapes (None on one side alone contradicts).
        """
        return self.checkpoint[key].shape == self.model[target].shape


def patterns(keys: Sequence[str], most: int) -> list[Pattern]:
    """
    Give at most `most` patterns of the keys, those with the most keys first.
    """
    sample = keys
    if len(keys) > _SAMPLED_KEYS:
        edge = _SAMPLED_KEYS // 8
        sample = [*keys[:edge], *keys[edge : -edge : max(1, len(keys) // _SAMPLED_KEYS)], *keys[-edge:]]
    found: dict[str, list[str]] = {}
    for key in sample:
        found.setdefault(_NUMBER.sub("#", key), []).append(key)
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [Pattern(same[0], len(same), tuple(text.split("."))) for text, same in ranked[:most]]


class Samples(NamedTuple):
    """
    The patterns of both sides, the model's by their number of components.
    """

    unexpected: list[Pattern]
    missing: list[Pattern]
    by_length: dict[int, list[Pattern]]


def samples(unexpected: Sequence[str], missing: Sequence[str]) -> Samples:
    """
    Take the patterns of both sides.
    """
    theirs = patterns(missing, _MODEL_PATTERNS)
    by_length: dict[int, list[Pattern]] = {}
    for pattern in theirs:
        by_length.setdefault(len(pattern.parts), []).append(pattern)
    return Samples(patterns(unexpected, _PATTERNS), theirs, by_length)


def prefixes(sides: Sides, taken: Samples) -> list[Rule]:
    """
    Give rules that strip, add or replace a prefix, those with the most evidence first.
    """
    votes: Counter[tuple[str, str]] = Counter()
    wanted, there = set(sides.missing), set(sides.unexpected)
    for key, weight, _ in taken.unexpected:
        votes.update({(prefix, ""): weight for prefix, rest in _cuts(key) if rest in wanted})
    for key, weight, _ in taken.missing[:_PATTERNS]:
        votes.update({("", prefix): weight for prefix, rest in _cuts(key) if rest in there})
    found = [Rule(remove=remove, add=add) for (remove, add), _ in _ranked(votes)[:_MOST_PREFIXES]]
    return found + [Rule(remove=remove, add=add) for remove, add in _replacements(taken)]


def _cuts(key: str) -> Iterator[tuple[str, str]]:
    dot = key.find(".")
    while dot != -1:
        yield key[: dot + 1], key[dot + 1 :]
        dot = key.find(".", dot + 1)


def _replacements(taken: Samples) -> list[tuple[str, str]]:
    votes: Counter[tuple[str, str]] = Counter()
    for _, weight, parts in taken.unexpected:
        seen: set[tuple[str, str]] = set()
        for _, _, others in taken.missing[:_PATTERNS]:
            same = 0
            for mine, other in zip(reversed(parts), reversed(others), strict=False):
                if mine != other:
                    break
                same += 1
            before, after = parts[: len(parts) - same], others[: len(others) - same]
            if same and before and after and "#" not in before + after:
                seen.add((".".join(before) + ".", ".".join(after) + "."))
        votes.update(dict.fromkeys(seen, weight))
    return [pair for pair, _ in _ranked(votes)[:_MOST_PREFIXES]]


def _ranked(votes: Counter[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    return sorted(votes.items(), key=lambda item: (-item[1], len(item[0][0]) + len(item[0][1]), item[0]))


def bases(taken: Samples) -> list[Rule]:
    """
    Give the changes of prefix under which components may be compared: none, and what all keys of a side begin with.
    """
    removed = [".".join(start) + "." for start in _common_starts(taken.unexpected)]
    added = [".".join(start) + "." for start in _common_starts(taken.missing)]
    return [
        Rule(),
        *(Rule(remove=remove) for remove in removed),
        *(Rule(add=add) for add in added),
        *(Rule(remove=remove, add=add) for remove in removed[:1] for add in added[:1] if remove != add),
    ]


def _common_starts(found: Sequence[Pattern]) -> Iterator[tuple[str, ...]]:
    if not found:
        return
    first = found[0].parts
    for length in (1, 2):
        start = first[:length]
        if len(first) > length and "#" not in start and all(pattern.parts[:length] == start for pattern in found):
            yield start


class Vote(NamedTuple):
    """
    How much speaks for a swap.
    """

    swap: Swap
    known: bool
    weight: int
    likeness: float


def swaps(base: Rule, sides: Sides, taken: Samples, targets: Mapping[str, str | None]) -> list[Vote]:
    """
    Collect the swaps of components that would lead from unexpected to missing keys, after `base`; the best come first.
    """
    weights: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], set[bool]] = {}
    for pattern in taken.unexpected:
        for pair, last in _nearest(pattern, base, sides, taken, targets):
            places.setdefault(pair, set()).add(last)
            weights[pair] += pattern.weight
    votes = [
        Vote(Swap(old, new, last=places[old, new] == {True}), (old, new) in KNOWN, weight, likeness(old, new))
        for (old, new), weight in weights.items()
    ]
    return sorted(votes, key=lambda vote: (not vote.known, -vote.weight, -vote.likeness, vote.swap))


def _nearest(
    pattern: Pattern, base: Rule, sides: Sides, taken: Samples, targets: Mapping[str, str | None]
) -> set[tuple[tuple[str, str], bool]]:
    moved = pattern.key
    if moved.startswith(base.remove):
        moved = base.add + moved[len(base.remove) :]
    parts = moved.split(".")
    masked = ["#" if _is_number(part) else part for part in parts]
    nearest: set[tuple[tuple[str, str], bool]] = set()
    fewest = _MOST_SWAPS + 1
    for other in taken.by_length.get(len(parts), ()):
        differing = _differing(masked, other.parts, fewest)
        if not differing:
            continue
        aim = list(parts)
        for place in differing:
            aim[place] = other.parts[place]
        target = targets.get(".".join(aim))
        if target is None or not sides.agree(pattern.key, target):
            continue
        if len(differing) < fewest:
            fewest = len(differing)
            nearest = set()
        nearest |= {((parts[place], other.parts[place]), place == len(parts) - 1) for place in differing}
    return nearest


def _differing(mine: Sequence[str], other: Sequence[str], most: int) -> list[int]:
    """
    Give the places that differ, [] where they are too many or a number stands against a word.
    """
    places: list[int] = []
    for place, (one, two) in enumerate(zip(mine, other, strict=True)):
        if one != two:
            places.append(place)
            if len(places) > most or "#" in (one, two):
                return []
    return places


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


@cache
def likeness(old: str, new: str) -> float:
    """
    Say how much two names look alike: `attn` and `attention` share their letters, `key` begins with the letter that
    `to_k` and `wk` end in.
    """
    inside = 0.5 if old in new or new in old else 0.0
    initial = 0.2 if new[:1] in old or old[:1] in new else 0.0
    abbreviated = 0.6 if _abbreviates(old, new) or _abbreviates(new, old) else 0.0
    return SequenceMatcher(None, old, new, autojunk=False).ratio() + inside + initial + abbreviated


def _abbreviates(short: str, long: str) -> bool:
    """
    Tell whether a name ends or begins with a single letter that a word of the other one begins with.
    """
    letters = _LETTER.findall(short.lower())
    # A letter that stands alone on both sides is the better sign, and shared letters tell that.
    words = [word for word in _WORD.findall(long.lower()) if len(word) > 1 or word in letters]
    return any(word.startswith(letter) for letter in letters for word in words)


def stretches(taken: Samples, mapping: Mapping[str, str]) -> list[tuple[str, str]]:
    """
    Give the components that may stand for several of the model's, where keys are left that `mapping` does not lead
    anywhere; those with the most evidence first.
    """
    votes: Counter[tuple[str, str]] = Counter()
    led = {_NUMBER.sub("#", target) for target in mapping.values()}
    left = [pattern for pattern in taken.missing[:_PATTERNS] if ".".join(pattern.parts) not in led]
    for pattern in taken.unexpected:
        if pattern.key not in mapping:
            votes.update({pair: pattern.weight for pair in (_stretch(pattern, other) for other in left) if pair})
    ranked = sorted(votes.items(), key=lambda item: (-item[1], -likeness(*item[0]), item[0]))
    return [pair for pair, _ in ranked[:_MOST_SWAPS]]


def _stretch(mine: Pattern, other: Pattern) -> tuple[str, str] | None:
    """
    Give the one component of a key, and the several of another, that tell the two keys apart.
    """
    more = len(other.parts) - len(mine.parts)
    for place, part in enumerate(mine.parts):
        before, after = mine.parts[:place], mine.parts[place + 1 :]
        if more > 0 and part != "#" and (before, after) == (other.parts[:place], other.parts[place + 1 + more :]):
            return part, ".".join(other.key.split(".")[place : place + 1 + more])
    return None


def strangers(taken: Samples) -> tuple[list[str], list[str]]:
    """
    Give the components that only one side has, as `base_layer`: those of the checkpoint, those of the model.
    """
    theirs, ours = _components(taken.unexpected), _components(taken.missing)
    return _only(theirs, ours), _only(ours, theirs)


def _components(found: Iterable[Pattern]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for pattern in found:
        counts.update(dict.fromkeys(pattern.parts[:-1], pattern.weight))
    return counts


def _only(mine: Counter[str], other: Counter[str]) -> list[str]:
    ranked = sorted(((-count, name) for name, count in mine.items() if name not in other and name != "#"))
    return [name for _, name in ranked[:_MOST_SWAPS]]
