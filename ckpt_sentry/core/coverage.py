"""
How much of a model a load supplies, how much of a checkpoint it uses, and what is lost as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import translate
from functools import cache
from math import nextafter, prod
from typing import Final, Literal

from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Coverage
from ckpt_sentry.dataclasses_ import dataclass

_SHOWN_BLOCKS: Final = 200
_REPEATED: Final = 2
_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)")
_NORM = re.compile(r"(?:^|[._])(?:\w*norm\w*|ln(?:_?\w{1,5})?)(?=\.|$)", re.IGNORECASE)
_BUFFERS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids"})


@dataclass(frozen=True, slots=True)
class Loss:
    """
    A part of the model that gets nothing at all: repeated blocks, or one kind of key in every layer.
    """

    what: Literal["block", "kind"]
    count: int
    text: str


def coverage(
    model: Inventory, supplied: Iterable[str] | Mapping[str, float], allow_missing: Sequence[str] = ()
) -> Coverage:
    """
    Give the part of the model that is supplied, by storages and by elements (by storages as well where none has any);
    both 1 where nothing is wanted.

    `supplied` names the keys that enter, or maps each to the part of its elements in [0, 1] that does. Of tied names
    the best supplied one counts. A storage all of whose names match a glob of `allow_missing` leaves the denominator.
    """
    parts = supplied if isinstance(supplied, Mapping) else dict.fromkeys(supplied, 1.0)
    entered = wanted = elements = 0
    got: float = 0
    for entry, part in _wanted(model, parts, matcher(allow_missing)):
        wanted += 1
        size = 0 if entry.shape is None else prod(entry.shape)
        elements += size
        if part >= 1:
            entered += 1
            got += size
        elif part > 0:
            entered += 1
            got += size * part
    by_keys = _ratio(entered, wanted)
    return Coverage(by_keys, _ratio(got, elements) if elements else by_keys)


def _wanted(
    model: Inventory, parts: Mapping[str, float], allowed: Callable[[str], bool]
) -> Iterable[tuple[Entry, float]]:
    if not model.ties:
        for name, entry in model.entries.items():
            if not allowed(name):
                yield entry, parts.get(name, 0.0)
        return
    best: dict[str, float] = {}
    wanted: set[str] = set()
    for name in model.entries:
        owner = model.storage(name)
        best[owner] = max(best.get(owner, 0.0), parts.get(name, 0.0))
        if not allowed(name):
            wanted.add(owner)
    for owner, entry in model.storages().items():
        if owner in wanted:
            yield entry, best[owner]


def _ratio(part: float, whole: int) -> float:
    if part == whole:
        return 1.0
    # Less than all is never said to be all, however little is lacking.
    return min(part / whole, nextafter(1.0, 0.0))


def utilisation(checkpoint: Inventory, consumed: Collection[str]) -> float:
    """
    Give the part of the checkpoint's elements (of its keys, where none is a tensor) that is consumed; 1 if it is empty.
    """
    entries = checkpoint.entries
    used = [entry for name, entry in entries.items() if name in consumed]
    total = sum(entry.elements for entry in entries.values())
    if total == 0:
        return _ratio(len(used), len(entries))
    return _ratio(sum(entry.elements for entry in used), total)


@cache
def _compiled(globs: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, globs)))


def matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    """
    Give the test whether a key matches one of the shell patterns, as `classifier.*` (case counts).
    """
    if not globs:
        return _never
    match = _compiled(tuple(globs)).match
    return lambda name: match(name) is not None


def _never(_name: str) -> bool:
    return False


def losses(model: Inventory, missing: Collection[str]) -> tuple[Loss, ...]:
    """
    Find what is lost as a whole although the rest is there: repeated blocks at 0 %, kinds gone from every layer.

    A block is what lies under a number in a path (`layers.3`), repeated where it has siblings. Nothing is said where
    all of the model, or none of it, is missing.
    """
    gone = set(missing)
    if not gone or gone.issuperset(model.entries):
        return ()
    return (*_lost_blocks(model, gone), *_lost_kinds(model, gone))


def _lost_blocks(model: Inventory, gone: set[str]) -> Iterable[Loss]:
    total: dict[str, int] = {}
    lost: dict[str, int] = {}
    for name in model.entries:
        for match in _NUMBER.finditer(name):
            if match.end() < len(name):
                block = name[: match.end()]
                total[block] = total.get(block, 0) + 1
                lost[block] = lost.get(block, 0) + (name in gone)
    series: dict[str, list[str]] = {}
    for block in total:
        series.setdefault(block.rpartition(".")[0], []).append(block)
    empty = {block for block, count in total.items() if lost[block] == count}
    repeated = {block for blocks in series.values() if len(blocks) >= _REPEATED for block in blocks}
    # Experts in a lost layer need no word of their own.
    outermost = [block for block in empty & repeated if not _inside_another(block, empty & repeated)]
    if not outermost:
        return
    folded = ", ".join(key_list(outermost, _SHOWN_BLOCKS).keys)
    keys = sum(total[block] for block in outermost)
    blocks = "a repeated block is" if len(outermost) == 1 else f"{len(outermost)} repeated blocks are"
    yield Loss("block", keys, f"{blocks} at 0 %: {folded} ({keys} keys)")


def _inside_another(block: str, blocks: set[str]) -> bool:
    return any(block[: match.end()] in blocks for match in _NUMBER.finditer(block) if match.end() < len(block))


def _lost_kinds(model: Inventory, gone: set[str]) -> Iterable[Loss]:
    kinds: dict[str, list[str]] = {}
    for name in model.entries:
        for kind in _kinds(name):
            kinds.setdefault(kind, []).append(name)
    for kind, names in sorted(kinds.items()):
        if len(names) >= _REPEATED and gone.issuperset(names) and not gone.issuperset(model.entries):
            yield Loss("kind", len(names), f"all {kind} are lost, in every layer: {len(names)} keys")


def _kinds(name: str) -> Iterable[str]:
    path, _, last = name.rpartition(".")
    if last in ("bias", "beta"):
        yield "biases"
    if last in _BUFFERS:
        yield "buffers"
    elif _NORM.search(path):
        yield "norms"
