from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.render import cells


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain · text", "plain · text"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb\tc", "a b c"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert cells.visible(text) == shown


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("模型", 4), ("e\u0301", 1), ("", 0)])
def test_width(text: str, width: int) -> None:
    assert cells.width(text) == width


def test_cut_keeps_both_ends() -> None:
    assert cells.cut("model.layers.weight", 11) == "model…eight"
    assert cells.cut("short", 11) == "short"


def test_wrap_breaks_between_words_and_inside_long_ones() -> None:
    assert list(cells.wrap("one two three", 7)) == ["one two", "three"]
    assert list(cells.wrap("abcdefgh ij", 3)) == ["abc", "def", "gh", "ij"]


def test_wrap_keeps_a_number_with_its_unit() -> None:
    assert list(cells.wrap("96 keys · 381 kB", 13)) == ["96 keys ·", "381 kB"]
    assert list(cells.wrap("read 0.078 s", 10)) == ["read", "0.078 s"]


def test_wrap_breaks_a_fold_where_it_has_a_joint() -> None:
    assert list(cells.wrap("model.blocks.{0-2}.fc1", 16)) == ["model.blocks.", "{0-2}.fc1"]
    assert list(cells.wrap("a.{exp_avg,exp_avg_sq}", 15)) == ["a.{exp_avg,", "exp_avg_sq}"]


@given(st.text(), st.integers(2, 50))
def test_wrap_loses_only_spaces_and_fits(text: str, room: int) -> None:
    lines = list(cells.wrap(text, room))
    assert all(cells.width(line) <= room for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@given(st.text(), st.integers(1, 50))
def test_cut_fits(text: str, room: int) -> None:
    assert cells.width(cells.cut(text, room)) <= max(room, 1)


@given(st.text())
def test_visible_text_is_printable_and_stays_so(text: str) -> None:
    shown = cells.visible(text)
    assert shown.isprintable()
    assert cells.visible(shown) == shown
