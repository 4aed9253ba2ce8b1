"""
Integrations that are a single file: the example of docs/integrations.md, brought in by an entry point, in a process of
its own; and what `base` does where an integration errs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_sentry import integrations

GUIDE = Path(__file__).parents[2] / "docs" / "integrations.md"

FRAMEWORK = """
import os

import torch
from safetensors.torch import load_file


def load(folder, into, strict=False):
    saved = load_file(os.path.join(folder, "weights.safetensors"))
    missing = [key for key in into if key not in saved]
    for key in into.keys() & saved.keys():
        into[key].copy_(saved[key])
    if strict and missing:
        raise KeyError(f"missing: {missing}")
    return into
"""

PROGRAM = """
import json, os, sys
import torch
from safetensors.torch import save_file
from toyload import load
import ckpt_sentry

def attempt(folder, names, saved, **how):
    os.makedirs(folder)
    save_file({name: torch.ones(3) for name in saved}, os.path.join(folder, "weights.safetensors"))
    into = {name: torch.zeros(3) for name in names}
    try:
        load(folder, into, **how)
    except Exception as error:
        return type(error).__name__, sum(map(float, (one.sum() for one in into.values())))
    return None, sum(map(float, (one.sum() for one in into.values())))

def damaged(folder):
    os.makedirs(folder)
    with open(os.path.join(folder, "weights.safetensors"), "wb") as file:
        file.write(b"version https://git-lfs.github.com/spec/v1\\noid sha256:" + b"4d" * 32 + b"\\nsize 548105171\\n")
    try:
        load(folder, {"a": torch.zeros(3)})
    except Exception as error:
        return type(error).__name__, 0.0

print(json.dumps([
    attempt("step-7", ["a", "b"], ["module.a", "module.b"]),
    attempt("step-8", ["a", "b"], ["a", "b"]),
    attempt("step-9", ["a", "b"], ["a"]),
    attempt("step-10", ["a", "b"], ["a"], strict=True),
    attempt("step-11", ["a", "b"], ["module.a"], strict=False),
    attempt("step-12", ["a"], ["a"], nonsense=True),
    damaged("step-13"),
]))
"""


def example() -> str:
    """
    The integration in the guide.
    """
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[0]


def distributed(folder: Path, integration: str) -> Path:
    """
    The framework, and a distribution with an integration for it.
    """
    info = folder / "toyload_sentry-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyload-sentry\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpt_sentry.integrations]\ntoyload = toyload_sentry:INTEGRATION\n")
    (folder / "toyload.py").write_text(FRAMEWORK)
    (folder / "toyload_sentry.py").write_text(integration, encoding="utf-8")
    return folder


def run(folder: Path, **variables: str) -> tuple[list[list[object]], str, list[dict[str, object]]]:
    """
    What came of each attempt, what was printed, and the loads as `report --json` has them.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("CKPT_SENTRY")}
    work = folder / "work"
    work.mkdir()
    own = {"CKPT_SENTRY": "1", "CKPT_SENTRY_DIR": str(work / "records"), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=kept | own | variables,
        cwd=work,
        capture_output=True,
        text=True,
        check=True,
    )
    report = subprocess.run(
        [sys.executable, "-m", "ckpt_sentry", "report", "--json", str(work / "records")],
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    loads = json.loads(report.stdout)["loads"] if report.stdout else []
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, loads


@pytest.mark.slow
def test_the_example_of_the_guide(tmp_path: Path) -> None:
    outcomes, said, loads = run(distributed(tmp_path / "site", example()))
    # The framework's own call has run, whole, before anything is refused; and its errors are its own.
    assert outcomes == [
        ["LowCoverageError", 0.0],
        [None, 6.0],
        [None, 3.0],
        ["KeyError", 3.0],
        [None, 0.0],
        ["TypeError", 0.0],
        ["SafetensorError", 0.0],
    ]
    assert [(one["path"], one["framework"], one["verdict"], one["step"]) for one in loads] == [
        ("step-7", "toyload", "no_op", 7),
        ("step-8", "toyload", "ok", 8),
        ("step-9", "toyload", "partial", 9),
        ("step-10", "toyload", "failed", 10),
        ("step-11", "toyload", "no_op", 11),
        ("step-13", "toyload", "failed", 13),
    ]
    # Of a file that cannot be read nothing is said but what it is.
    assert [one["code"] for one in loads[5]["findings"]] == ["lfs_pointer"]
    assert loads[5]["missing"]["count"] == 0
    assert loads[2]["missing"] == {"count": 1, "keys": ["b"]}
    blocks = re.findall(r"```\n(ckpt_sentry.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    printed = re.sub(r"\w+-[0-9a-f]{6}\b", "RUN", re.sub(r"(after|in) [0-9.e-]+ s", r"\1 N s", said))
    for block in blocks:
        assert block in printed


ERRING = """
from ckpt_sentry.integrations.base import Integration, Loader

def path(call):
    return call["folder"]

def compare(call):
    raise RuntimeError("ours")

INTEGRATION = Integration("toyload", (Loader("toyload:load", path, compare), Loader("toyload:gone", path, compare)))
"""


@pytest.mark.slow
def test_an_integration_that_errs_blames_nothing(tmp_path: Path) -> None:
    outcomes, said, loads = run(distributed(tmp_path / "site", ERRING), CKPT_SENTRY_LOG="off")
    ended = [outcome for outcome, _ in outcomes]
    assert ended == [None, None, None, "KeyError", None, "TypeError", "SafetensorError"]
    assert {one["verdict"] for one in loads[:3]} == {"ok"}
    assert [finding["code"] for finding in loads[0]["findings"]] == ["not_compared"]
    assert loads[3]["verdict"] == "failed"
    assert "own error in toyload.load.after" in said


@pytest.mark.slow
def test_an_integration_that_cannot_be_imported_is_no_concern_of_the_job(tmp_path: Path) -> None:
    outcomes, said, loads = run(distributed(tmp_path / "site", "import no_such_module_anywhere\n"))
    assert outcomes[1] == [None, 6.0]
    assert loads == []
    assert "no_such_module_anywhere" in said


NOTHING = ERRING.replace('raise RuntimeError("ours")', "return None")


@pytest.mark.slow
def test_a_call_that_cannot_be_compared_is_no_error(tmp_path: Path) -> None:
    _, said, loads = run(distributed(tmp_path / "site", NOTHING))
    assert {(one["verdict"], one["findings"][0]["code"]) for one in loads[:3]} == {("ok", "not_compared")}
    assert "own error" not in said


def test_single_files_are_found_by_their_names() -> None:
    assert "torch_checkpointing" in integrations.single_files()
    assert not {"base", "trials", "dcp"} & set(integrations.single_files())
    waits = dict(integrations.seams())
    assert waits["torch_checkpointing"] == "ckpt_sentry.integrations.torch_checkpointing:INTEGRATION.instrument"
