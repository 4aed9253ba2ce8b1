"""
No secret survives; what is none does.
"""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.checkpoints.paths import mask, mask_text, shown_path

MASKED = {
    "s3://AKIAKEY:SeCrEt@bucket/step-100": "s3://***@bucket/step-100",
    "s3://key:se/cr+et=@bucket/step-100": "s3://***@bucket/step-100",
    "s3://key:12/34@bucket/a": "s3://***@bucket/a",
    "s3://u:p@ss@bucket/k": "s3://***@bucket/k",
    "https://ghtoken@host.example/x": "https://***@host.example/x",
    "https://a.blob.core.windows.net/c/step-100?sv=2022&sig=ab%2Fc%3D&se=1": (
        "https://a.blob.core.windows.net/c/step-100?sv=2022&sig=***&se=1"
    ),
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=AKIA/2020/us&X-Amz-Signature=dead&X-Amz-Date=1": (
        "https://b.s3.amazonaws.com/k?X-Amz-Credential=***&X-Amz-Signature=***&X-Amz-Date=1"
    ),
    "https://s.googleapis.com/o?GoogleAccessId=me@x&Expires=1&Signature=abc": (
        "https://s.googleapis.com/o?GoogleAccessId=***&Expires=1&Signature=***"
    ),
    "https://x/o?x-amz-security-token=abc": "https://x/o?x-amz-security-token=***",
    "https://x/o?next=%2Fy%3FX-Goog-Signature%3Dabc": "https://x/o?next=%2Fy%3FX-Goog-Signature%3D***",
    "https://x/o?key=abc": "https://x/o?key=***",
    "/p?token=abc&step=3": "/p?token=***&step=3",
    "AccountName=a;AccountKey=abc==;EndpointSuffix=x": "AccountName=a;AccountKey=***;EndpointSuffix=x",
}
UNTOUCHED = [
    "/data/run/step-100",
    "m--val_loss=2.34-step=999-consumed_samples=8000.0-last/weights",
    "/data/consumed_tokens=800/step=3",
    "hdfs://namenode:9000/user@home/step-1",
    "abfss://container@account.dfs.core.windows.net/step-1",
    "s3://bucket/user@host/x",
    "Missing key in checkpoint state_dict: model.key=3, tokenizer.json",
    "key=model.weight",
    "",
]


@pytest.mark.parametrize("path", MASKED)
def test_masked(path: str) -> None:
    assert mask(path) == MASKED[path]
    assert mask_text(f"cannot open '{path}', giving up") == f"cannot open '{MASKED[path]}', giving up"


@pytest.mark.parametrize("path", UNTOUCHED)
def test_untouched(path: str) -> None:
    assert mask(path) == path
    assert mask_text(path) == path


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdef.hunter2",
        "authorization: basic aHVudGVyMg==hunter2",
        "{'token': 'hunter2', 'a': 1}",
        '{"aws_secret_access_key": "hunter2"}',
        'secret="hunter2 hunter2" step=3',
        "password=hunter2",
        "hf_hunter2" + "a" * 20,
        "https://u:hunter2@host/a and s3://k:hunter2@b/c",
    ],
)
def test_free_text(text: str) -> None:
    assert "hunter2" not in mask_text(text)


NAMES = [
    "sig",
    "Signature",
    "token",
    "access_token",
    "X-Amz-Signature",
    "X-Amz-Security-Token",
    "api_key",
    "AccountKey",
]
SECRET = st.text(string.ascii_letters + string.digits + "+/=%-_.~", min_size=4).map(lambda text: f"S3CR3T{text}S3CR3T")


@given(secret=SECRET, name=st.sampled_from(NAMES), before=st.sampled_from(["?", "?a=b&", "?a=b;"]))
def test_no_parameter_survives(secret: str, name: str, before: str) -> None:
    url = f"https://host/step-100{before}{name}={secret}&c=d"
    for masked in (mask(url), mask_text(f"in '{url}': failed")):
        assert "S3CR3T" not in masked
        assert "step-100" in masked
        assert "c=d" in masked


@given(
    key=st.text(string.ascii_letters, min_size=1), secret=SECRET, scheme=st.sampled_from(["s3", "gs", "https", "ftp"])
)
def test_no_user_information_survives(key: str, secret: str, scheme: str) -> None:
    url = f"{scheme}://{key}:{secret}@bucket/step-100"
    for masked in (mask(url), mask_text(f"in '{url}': failed")):
        assert "S3CR3T" not in masked
        assert "@bucket/step-100" in masked


@given(text=st.text() | st.sampled_from([*MASKED, *UNTOUCHED]))
def test_masking_twice_is_masking_once(text: str) -> None:
    for masked in (mask(text), mask_text(text)):
        assert mask(masked) in (masked, mask(mask(masked)))
    assert mask_text(mask_text(text)) == mask_text(text)
    assert mask(mask(text)) == mask(text)


@given(text=st.text())
def test_shown_is_printable_and_short(text: str) -> None:
    shown = shown_path(text)
    assert shown.isprintable()
    assert len(shown) < 400


def test_shown_keeps_what_the_fold_syntax_would_escape() -> None:
    assert shown_path("/a/{x},\x1b[0m") == "/a/{x},\\x1b[0m"
