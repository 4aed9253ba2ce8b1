"""Names made harmless."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.escape import LONGEST, cut, escape, shown, unescape

ANY_TEXT = st.text(st.characters(categories=None))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("größe 重み", "größe 重み"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb\r\t", "a\\nb\\r\\t"),
        ("a\\n", "a\\\\n"),
        ("{a,b}", "\\{a\\,b\\}"),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("\u2028\u00a0", "\\u2028\\xa0"),
    ],
)
def test_escape(name, text):
    assert escape(name) == text
    assert unescape(text) == name


@given(ANY_TEXT)
def test_escape_is_one_printable_line_and_reversible(name):
    text = escape(name)
    assert text.isprintable()
    assert text.encode().decode() == text
    assert unescape(text) == name


@given(st.text(st.sampled_from("ab\\\n\x1b{"), max_size=60), st.integers(1, 40))
def test_cut_never_ends_amid_an_escape(name, longest):
    text = escape(name)
    result = cut(text, longest)
    if len(text) <= longest:
        assert result == text
        return
    kept, _, note = result.partition("... (+")
    assert name.startswith(unescape(kept))
    assert escape(unescape(kept)) == kept
    assert int(note.removesuffix(" characters)")) == len(text) - len(kept)


def test_shown_cuts_a_long_name():
    assert shown("x" * 10_000) == "x" * LONGEST + "... (+9700 characters)"
