from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.formats.paths import shown_path


@given(text=st.text())
def test_shown_is_printable_and_short(text: str) -> None:
    shown = shown_path(text)
    assert shown.isprintable()
    assert len(shown) < 400


def test_shown_keeps_what_the_fold_syntax_would_escape() -> None:
    assert shown_path("/a/{x},\x1b[0m") == "/a/{x},\\x1b[0m"


def test_credentials_are_masked_before_the_rest_is_cut_off() -> None:
    assert shown_path("s3://key:" + "S3CR3T" * 100 + "@bucket/x") == "s3://***@bucket/x"
    assert shown_path("/p?sig=" + "S3CR3T" * 100) == "/p?sig=***"
