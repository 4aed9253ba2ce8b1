"""
No secret survives; what is none does.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.collector.aggregate import Aggregator
from ckpt_sentry.core.report import Finding, LoadError
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.masking import clean, mask, mask_text
from ckpt_sentry.patching import guard
from ckpt_sentry.render import json_
from ckpt_sentry.render import text as text_
from ckpt_sentry.render.page import UNICODE
from ckpt_sentry.transport import otlp_json
from tests.collector.jobs import failing, finished, started

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
    "/data/token=abc/step-3": "/data/token=***/step-3",
    "s3://bucket/token=abc/step-3": "s3://bucket/token=***/step-3",
    "https://x/o#access_token=abc&step=3": "https://x/o#access_token=***&step=3",
    "https://x/o#key=abc": "https://x/o#key=***",
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
    "model.token_embedding.weight",
    "/models/sk-learn-intro-tutorial-models-v2/weights",
    "/models/sk-learn",
    "model.sk-attention.hf_proj.weight",
    "/models/hf_quantizer_config/hf_transformerscheckpoints",
    "risk-2024abcdefgh12345678/step-3",
    "num_tokens=3, pad_token_id=4",
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
        "hf_hunter2" + "a" * 25,
        "api-key: hunter2",
        "x-amz-security-token: hunter2/abc",
        "401 for token sk-proj-hunter2" + "a" * 20,
        "sk-hunter2" + "a1" * 12,
        "ghp_hunter2" + "a" * 30,
        "github_pat_hunter2" + "a" * 60,
        "hf_hunter2" + "A" * 30,
        "xoxb-hunter2-abcdefgh",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.hunter2",
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


@given(secret=SECRET, name=st.sampled_from(NAMES), before=st.sampled_from(["?", "?a=b&", "?a=b;", "#", "?a=b#"]))
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


@given(text=st.text(string.ascii_lowercase + string.digits + "._-/", max_size=400))
def test_names_without_a_sign_of_a_secret_stay(text: str) -> None:
    for known in ("sk-", "hf_", "gh", "github_pat_", "glpat-", "xox", "eyj", "sk_", "rk_"):
        text = text.replace(known, "")
    assert mask_text(text) == text


@pytest.mark.parametrize(
    "part", ["a://", "token=", "'_", "sk-a-", "x-", "eyJ", "hf_", "/token=", "a@a://", '"token": ', "Bearer "]
)
def test_a_long_text_is_masked_once_through(part: str) -> None:
    mask_text(part * 2_000 + "@")
    mask(part * 2_000)


def test_whatever_holds_strings_is_cleaned() -> None:
    secret = Finding("c", "error", "cannot open s3://k:hunter2@b/x", "give token=hunter2")
    dull = Finding("c", "error", "cannot open s3://b/x")
    assert clean(dull) is dull
    both = (secret, dull)
    assert "hunter2" not in repr(clean(both))
    assert clean(both)[1] is dull
    assert clean({"path": "/a b?token=hunter2 c", "text": ["password=hunter2", 3, None]}) == {
        "path": "/a b?token=***",
        "text": ["password=***", 3, None],
    }


URL = "s3://AKIAKEY:hunter2@bucket/run/step-5?X-Amz-Signature=hunter2"
ERROR = LoadError("OSError", f"cannot open {URL}", "read")


def test_the_wire_and_the_records_hold_no_credentials() -> None:
    events = (replace(started(0), path=URL), failing(0, ERROR), finished(0, path=URL, verdict="failed", error=ERROR))
    text = json.dumps(otlp_json.encode(events))
    assert "hunter2" not in text
    assert text.count("s3://***@bucket/run/step-5?X-Amz-Signature=***") >= len(events)


def test_what_is_shown_of_anybodys_records_holds_no_credentials() -> None:
    aggregator = Aggregator()
    for event in (
        replace(started(0), path=URL),
        failing(0, ERROR),
        finished(0, path=URL, verdict="failed", error=ERROR),
    ):
        aggregator.add(event)
    (load,) = aggregator.loads(settled=True)
    assert "hunter2" not in json_.text(json_.document([load]))
    assert "hunter2" not in text_.plain(text_.full(load, 100, UNICODE, None))
    assert "bucket/run/step-5" in repr(load)


def test_what_the_agent_raises_and_logs_holds_no_credentials(caplog: pytest.LogCaptureFixture) -> None:
    assert "hunter2" not in repr(LowCoverageError(f"nothing of {URL} was loaded"))
    guard.log("masking.test", OSError(f"cannot open {URL}"))
    assert "bucket/run/step-5" in caplog.text
    assert "hunter2" not in caplog.messages[0]


def test_a_load_of_a_signed_url_gives_nothing_away(tmp_path: Path) -> None:
    program = f"""
import accelerate, torch
try:
    accelerate.load_checkpoint_in_model(torch.nn.Linear(2, 2), {URL!r})
except ValueError as error:
    print(error.ckpt_sentry, *error.__notes__)
"""
    env = {**os.environ, "CKPT_SENTRY": "1", "CKPT_SENTRY_DIR": str(tmp_path), "CKPT_SENTRY_LOG": "console"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    (kept,) = tmp_path.iterdir()
    for text in (done.stdout, done.stderr, kept.read_text()):
        assert "bucket/run/step-5" in text
        assert "hunter2" not in text
