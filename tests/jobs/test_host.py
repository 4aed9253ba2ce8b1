"""
What is the host's stays the host's.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.jobs import harness

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "dcp_host.py"


@pytest.mark.parametrize(
    "scenario",
    [
        "telemetry_of_its_own",
        "nothing_left_behind",
        "nothing_kept_alive",
        "randomness_of_its_own",
        "put_back",
        "a_handler_that_loads",
    ],
)
def test_a_load_leaves_it_as_it_is(tmp_path: Path, scenario: str) -> None:
    outcome = harness.run(PROGRAM, scenario, str(tmp_path), folder=tmp_path)

    assert (outcome.code, outcome.out.splitlines()[-1:]) == (0, ["OK"]), outcome.err[-3000:]


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_standard_error_may_be_closed_or_full(tmp_path: Path, redirection: str) -> None:
    records = tmp_path / "records"
    program = harness.PROGRAMS / "dcp_loads.py"
    codes = {}
    for setting in ("0", "1"):
        done = subprocess.run(
            f"exec {sys.executable} {program} missing {tmp_path} {redirection}",
            shell=True,
            env=harness.environment(CKPT_SENTRY=setting, CKPT_SENTRY_DIR=str(records)),
            check=False,
            timeout=harness.TIMEOUT,
        )
        codes[setting] = done.returncode

    assert codes["1"] == codes["0"]
    assert harness.Outcome(0, "", "", records).loads()[0]["missing"]["count"] == 800


def test_no_secret_of_a_path_comes_out(tmp_path: Path) -> None:
    outcome = harness.run(PROGRAM, "secret_path", str(tmp_path), folder=tmp_path)

    (record,) = outcome.records.glob("*.jsonl")
    for text in (outcome.err, outcome.text(), record.read_text()):
        assert "bucket" in text
        assert "hunter2" not in text
        assert "abcdef0123" not in text


HEAVY = ("torch.distributed.checkpoint", "sympy", "structlog", "rich", "click", "opentelemetry")


@pytest.mark.parametrize("host", ["torch", "accelerate", "torch.distributed"])
def test_an_import_of_the_host_brings_nothing_heavy_with_it(host: str) -> None:
    program = (
        f"import sys, {host}, torch\n"
        "torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 2).state_dict())\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    )
    seen = {
        setting: subprocess.run(
            [sys.executable, "-c", program],
            env=harness.environment(CKPT_SENTRY=setting, CKPT_SENTRY_DIR="/nonexistent"),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for setting in ("0", "1")
    }

    assert seen["1"] == seen["0"]
