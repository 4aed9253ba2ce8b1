"""
Numbers and ranks in words: "1.2 GB", "98.6 %", "3.1 s", "ranks 0-1,3".
"""

from __future__ import annotations

import math
from typing import Final

from ckpt_sentry.core import ranks

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_LONGEST_RANKS: Final = 40
_MINUTE, _HOUR = 60, 3_600


def size(number: float) -> str:
    """
    Bytes in decimal units, two figures at least.
    """
    power = 0
    while number >= 999.5 and power < len(_UNITS) - 1:  # noqa: PLR2004 - what would be written as 1000
        number, power = number / 1000, power + 1
    return f"{number:.1f} {_UNITS[power]}" if power and number < 100 else f"{number:.0f} {_UNITS[power]}"  # noqa: PLR2004


def seconds(number: float) -> str:
    """
    A duration: "0.42 s", "3.1 s", "42 s", "12 min", "2 h 5 min".
    """
    if not math.isfinite(number):
        return "? s"
    if number < 1:
        return f"{number:.2g} s"
    if number < 10:  # noqa: PLR2004 - where a tenth still says something
        return f"{number:.1f} s"
    if number < 5 * _MINUTE:
        return f"{number:.0f} s"
    if number < 2 * _HOUR:
        return f"{number / _MINUTE:.0f} min"
    return f"{number // _HOUR:.0f} h {number % _HOUR // _MINUTE:.0f} min"


def percent(part: float) -> str:
    """
    A part of 1, rounded down: "100 %" is said of the whole alone, and "0 %" of nothing alone.
    """
    if not 0 < part < 1:
        return f"{100 * min(1, max(0, part)):.0f} %" if part == part else "? %"  # noqa: PLR0124 - NaN
    if part < 0.001:  # noqa: PLR2004 - what would be written as 0.0
        return "<0.1 %"
    return f"{math.floor(part * 1000 + 1e-9) / 10:.1f} %"


def count(number: int, noun: str) -> str:
    """
    "1 key", "2,400 keys".
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def some_ranks(compact: str) -> str:
    """
    "rank 2", "ranks 0-1,3", and where that is too long "ranks 0,2,4,... (8,192 ranks)".
    """
    if len(compact) > _LONGEST_RANKS:
        shown = compact[: compact.rfind(",", 0, _LONGEST_RANKS)]
        return f"ranks {shown},... ({len(ranks.parse(compact)):,} ranks)"
    return f"rank {compact}" if compact.isdigit() else f"ranks {compact}"


def shape(dimensions: tuple[int, ...]) -> str:
    """
    "[32, 8]"; many dimensions are cut.
    """
    shown = ", ".join(map(str, dimensions[:8]))
    return f"[{shown}, ...]" if len(dimensions) > 8 else f"[{shown}]"  # noqa: PLR2004
