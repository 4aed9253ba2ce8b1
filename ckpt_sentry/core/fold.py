r"""
Many keys in few words: `layers.{0-79}.attn.{wk,wq,wv}.weight` stands for 240 keys.

A fold is exact: it expands to the very keys it stands for, and every key lies in one fold. Numbers fold into ranges
with their holes (`{0-3,5}`), whole components between dots into lists. A number with leading zeros is a word. Literal
`{ } , \` and control characters carry a backslash (see `escape`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from operator import itemgetter
from typing import Any, Final, NamedTuple

from ckpt_sentry.core.escape import LONGEST, cut, escape, unescape
from ckpt_sentry.core.ranks import spans
from ckpt_sentry.core.report import NO_KEYS, KeyList
from ckpt_sentry.dataclasses_ import dataclass

__all__ = ["Fold", "bounded", "escape", "expand", "fold", "folds", "key_list", "natural"]

LIMIT_BYTES: Final = 64 * 1024

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
_PIECE = re.compile(r"\{((?:[^\\{}]|\\.)*)\}|((?:[^\\{}]|\\.)+)", re.DOTALL)
_ITEM = re.compile(r"((?:[^\\,]|\\.)*)(?:,|$)", re.DOTALL)

_HOLE: Final = "\0"
"""Where a value stands in the layout of a component; the layout says which kind of value."""
_WORD: Final = ("",)
"""The layout of a component without a number: the whole of it is one value."""

_Value = int | str
_Layout = tuple[str, ...]
_Axis = tuple[_Value, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """
    One fold and how many keys it stands for.
    """

    text: str
    count: int


class _Box(NamedTuple):
    """
    A cross product: the layouts of the components, and the values at each of their holes in order.
    """

    layouts: tuple[_Layout, ...]
    axes: tuple[_Axis, ...]

    @property
    def size(self) -> int:
        total = 1
        for axis in self.axes:
            total *= len(axis)
        return total


def fold(keys: Iterable[str]) -> tuple[str, ...]:
    """
    Fold keys, repeats once, in natural order (`layers.2` before `layers.10`).
    """
    return tuple(_render(box) for box in _boxes(keys))


def folds(keys: Iterable[str], longest: int = LONGEST) -> Iterator[Fold]:
    """
    Fold keys for reading: a fold of more than `longest` characters is split, and a single name that long is cut.
    """
    for box in _boxes(keys):
        yield from _short(box, longest)


def key_list(keys: Iterable[str], limit_bytes: int = LIMIT_BYTES) -> KeyList:
    """
    Fold keys into at most `limit_bytes` of text (but one fold at least), and count what is left out.
    """
    return bounded(folds(keys), limit_bytes)


def bounded(folded: Iterable[Fold], limit_bytes: int = LIMIT_BYTES) -> KeyList:
    """
    Keep the first folds, at most `limit_bytes` of text (but one fold at least), and count what is left out.
    """
    lines: list[str] = []
    total = shown = size = 0
    for found in folded:
        total += found.count
        size += len(found.text.encode())
        if size <= limit_bytes or not lines:
            lines.append(found.text)
            shown += found.count
        else:
            size = limit_bytes + 1  # nothing that comes later, even if it were short enough
    return KeyList(count=total, keys=tuple(lines), omitted=total - shown) if total else NO_KEYS


def expand(folded: str | Iterable[str]) -> list[str]:
    """
    Give the keys that one fold, or several, stand for. Raises ValueError for text that is no fold.
    """
    if isinstance(folded, str):
        return ["".join(parts) for parts in product(*_pieces(folded))]
    return [key for text in folded for key in expand(text)]


def natural(name: str) -> tuple[_Value, ...]:
    """
    Give the sort key that puts numbers in the order of their values. Text and numbers alternate, so any two compare.
    """
    parts: list[_Value] = list(_NUMBER.split(name))
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)


def _boxes(keys: Iterable[str]) -> list[_Box]:
    by_layout: dict[tuple[_Layout, ...], list[tuple[Any, ...]]] = {}
    known: dict[str, tuple[_Layout, _Axis]] = {}
    for key in set(keys):
        layouts: list[_Layout] = []
        values: list[_Value] = []
        for component in key.split("."):
            found = known.get(component)
            if found is None:
                found = known[component] = _layout(component)
            layouts.append(found[0])
            values += found[1]
        by_layout.setdefault(tuple(layouts), []).append(tuple(values))
    boxes = [_Box(layouts, axes) for layouts, rows in by_layout.items() for axes in _merge(layouts, rows)]
    boxes.sort(key=lambda box: natural(_first(box)))
    return boxes


def _layout(component: str) -> tuple[_Layout, _Axis]:
    parts = _NUMBER.split(component)
    if len(parts) == 1:
        return _WORD, (component,)
    return tuple(parts[0::2]), tuple(map(int, parts[1::2]))


def _merge(layouts: tuple[_Layout, ...], rows: list[tuple[Any, ...]]) -> list[tuple[_Axis, ...]]:
    """
    Merge rows of values into cross products: one hole after the other, what agrees everywhere else becomes one row.

    Merging along one hole keeps rows disjoint and adds nothing, so the result is exact in any order of holes. Numbers
    come first, the last first: the repeated blocks of models differ in them.
    """
    kinds = [kind for layout in layouts for kind in ([str] if layout is _WORD else [int] * (len(layout) - 1))]
    width = len(kinds)
    order = [hole for hole in range(width - 1, -1, -1) if kinds[hole] is int]
    order += [hole for hole in range(width - 1, -1, -1) if kinds[hole] is str]
    interned: dict[frozenset[_Value], frozenset[_Value]] = {}
    for hole in order:
        if len(rows) == 1:
            break
        if len({row[hole] for row in rows}) > 1:
            rows = _merge_hole(rows, hole, width, interned)
    return [tuple(_axis(value) for value in row) for row in rows]


def _merge_hole(
    rows: list[tuple[Any, ...]], hole: int, width: int, interned: dict[frozenset[_Value], frozenset[_Value]]
) -> list[tuple[Any, ...]]:
    others = [position for position in range(width) if position != hole]
    rest = itemgetter(*others) if others else _nothing
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for row in rows:
        groups.setdefault(rest(row), []).append(row)
    merged = []
    for group in groups.values():
        first = group[0]
        if len(group) > 1:
            values = frozenset(row[hole] for row in group)
            first = (*first[:hole], interned.setdefault(values, values), *first[hole + 1 :])
        merged.append(first)
    return merged


def _nothing(_row: object) -> tuple[()]:
    return ()


def _axis(value: _Value | frozenset[_Value]) -> _Axis:
    if isinstance(value, frozenset):
        return tuple(sorted(value, key=_order))
    return (value,)


def _order(value: _Value) -> Any:
    return value if isinstance(value, int) else natural(value)


def _first(box: _Box) -> str:
    return _write(box.layouts, [str(axis[0]) for axis in box.axes], plain=str)


def _render(box: _Box) -> str:
    return _write(box.layouts, [_braces(axis) for axis in box.axes], plain=escape)


def _write(layouts: tuple[_Layout, ...], values: list[str], plain: Any) -> str:
    texts = iter(values)
    components = []
    for layout in layouts:
        if layout is _WORD:
            components.append(next(texts))
        else:
            components.append(plain(layout[0]) + "".join(next(texts) + plain(part) for part in layout[1:]))
    return ".".join(components)


def _braces(axis: _Axis) -> str:
    if len(axis) == 1:
        return escape(str(axis[0]))
    if isinstance(axis[0], int):
        runs = spans(value for value in axis if isinstance(value, int))
        items = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    else:
        items = [escape(str(value)) for value in axis]
    return "{" + ",".join(items) + "}"


def _short(box: _Box, longest: int) -> Iterator[Fold]:
    pending = [box]
    while pending:
        last = pending.pop()
        text = _render(last)
        if len(text) > longest and last.size > 1:
            pending += reversed(_split(last, len(text) / longest))
        else:
            yield Fold(cut(text, longest), last.size)


def _split(box: _Box, too_long: float) -> list[_Box]:
    """
    Split a box, `too_long` times as long as it may be, along the axis whose text is the longest.
    """
    widest = max((hole for hole, axis in enumerate(box.axes) if len(axis) > 1), key=lambda h: len(_braces(box.axes[h])))
    axis = box.axes[widest]
    before, after = box.axes[:widest], box.axes[widest + 1 :]
    size = max(1, min(len(axis) // 2, int(len(axis) / too_long)))
    return [_Box(box.layouts, (*before, axis[start : start + size], *after)) for start in range(0, len(axis), size)]


def _pieces(text: str) -> Iterator[list[str]]:
    position = 0
    while position < len(text):
        match = _PIECE.match(text, position)
        if match is None:
            raise ValueError(f"not a fold, from character {position} on: {text!r}")
        yield [unescape(match[2])] if match[1] is None else list(_items(match[1]))
        position = match.end()


def _items(inside: str) -> Iterator[str]:
    position = 0
    while position <= len(inside):
        match = _ITEM.match(inside, position)
        assert match is not None  # noqa: S101 - an empty item matches everywhere
        numbers = _RANGE.fullmatch(match[1])
        if numbers:
            yield from map(str, range(int(numbers[1]), int(numbers[2]) + 1))
        else:
            yield unescape(match[1])
        if match.end() == match.end(1):
            return
        position = match.end()
