from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.fold import fold
from ckpt_sentry.render.folded import size


@pytest.mark.parametrize(
    ("folded", "count"),
    [("a.b", 1), ("a{0-799}", 800), ("l.{0-3,5}.{wq,wk}.w", 10), ("a\\{0-9\\}", 1), ("{0-999999999}.{0-9}", 10**10)],
)
def test_size(folded: str, count: int) -> None:
    assert size(folded) == count


@given(st.sets(st.text("ab.01{},\\-", max_size=6), max_size=20))
def test_size_is_what_was_folded(keys: set[str]) -> None:
    assert sum(map(size, fold(keys))) == len(keys)
