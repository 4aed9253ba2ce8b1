"""
Numbers of things in words: "1 key", "2,400 keys", "98.6 %".
"""

from __future__ import annotations

from math import floor


def counted(count: int, noun: str) -> str:
    """
    Count things in words: "1 tensor", "2 tensors".
    """
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def keys(count: int) -> str:
    """
    Count keys in words: "1 key", "2 keys".
    """
    return counted(count, "key")


def verb(count: int, one: str, many: str) -> str:
    """
    The verb for one, or for so many.
    """
    return one if count == 1 else many


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
