"""
Ranks, and other sets of small integers, as compact ranges: `0-1,3`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def compact(numbers: Iterable[int]) -> str:
    """
    Write numbers (0 or more each, any order, repeats allowed) as ranges: `compact([0, 1, 3]) == "0-1,3"`.
    """
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans(numbers))


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """
    Give the runs of consecutive numbers as (first, last), both included, in ascending order.
    """
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def parse(text: str, below: int = sys.maxsize) -> tuple[int, ...]:
    """
    Read what `compact` wrote, in ascending order without repeats; only numbers `below` that.

    Raises ValueError for any other text.
    """
    numbers: set[int] = set()
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"not a list of ranks such as 0-1,3: {text!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(f"a range of ranks that ends before it begins: {part!r}")
        numbers.update(range(low, min(high + 1, below)))
    return tuple(sorted(numbers))
