"""
Counting what a fold stands for (see `core.fold`), without expanding it: a fold from outside may stand for billions.
"""

from __future__ import annotations

import itertools
import re
from typing import Final

_BRACES: Final = re.compile(r"\\.|\{((?:\\.|[^{}\\])*)\}", re.DOTALL)
_COMMA: Final = re.compile(r"\\.|(,)", re.DOTALL)
_RANGE: Final = re.compile(r"(\d+)-(\d+)")


def size(folded: str) -> int:
    """
    How many keys a fold stands for, without expanding it.
    """
    total = 1
    for match in _BRACES.finditer(folded):
        if match[1] is not None:
            total *= sum(_item_size(item) for item in _split(match[1]))
    return total


def _split(inside: str) -> list[str]:
    edges = [-1, *(match.start() for match in _COMMA.finditer(inside) if match[1]), len(inside)]
    return [inside[low + 1 : high] for low, high in itertools.pairwise(edges)]


def _item_size(item: str) -> int:
    numbers = _RANGE.fullmatch(item)
    return max(1, int(numbers[2]) - int(numbers[1]) + 1) if numbers else 1
