"""Ranks as compact ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.ranks import compact, parse


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([0], "0"), ([0, 1, 3], "0-1,3"), ([3, 1, 0, 1], "0-1,3"), (range(4096), "0-4095"), ([7, 9], "7,9")],
)
def test_compact(numbers, text):
    assert compact(numbers) == text


@given(st.sets(st.integers(0, 100_000)))
def test_round_trip(numbers):
    assert parse(compact(numbers)) == tuple(sorted(numbers))


def test_parse_reads_no_further_than_it_is_told():
    assert parse("1-2,7-999999999", 9) == (1, 2, 7, 8)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "1 ", "\u0661"])
def test_parse_refuses(text):
    with pytest.raises(ValueError, match="rank"):
        parse(text)
