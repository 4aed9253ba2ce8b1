"""
Real loads by torch.distributed.checkpoint, alone and on four ranks under torchrun, from the environment variable to
the report.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.jobs import harness

if TYPE_CHECKING:
    from pathlib import Path

    from tests.jobs.harness import Outcome

PROGRAM = "dcp_loads.py"
RANKS = [1, 4]


def run(scenario: str, folder: Path, ranks: int = 1, **options: str) -> Outcome:
    return harness.run(PROGRAM, scenario, str(folder), folder=folder, ranks=ranks, **options)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_good_load_is_one_line(tmp_path: Path, ranks: int) -> None:
    outcome = run("good", tmp_path, ranks)

    assert outcome.code == 0
    (load,) = outcome.loads()
    assert load["verdict"] == "ok"
    assert load["coverage"] == {"keys": 1.0, "elements": 1.0, "judged": 1.0}
    assert load["step"] == 1200
    assert load["step_source"] == "folder name"
    assert load["path"] == str(tmp_path / "step-1200")
    assert len(load["groups"]) == 1
    assert load["findings"] == []
    (line,) = outcome.block()
    assert line.startswith("ckpt_sentry ✓ dcp.load  step 1200 · ")


@pytest.mark.parametrize("ranks", RANKS)
def test_every_missing_key_is_named_at_once(tmp_path: Path, ranks: int) -> None:
    outcome = run("missing", tmp_path, ranks)

    assert outcome.code == 1
    (load,) = outcome.loads()
    assert load["verdict"] == "failed"
    assert load["missing"] == {"count": 800, "keys": ["model.adapter{0-799}"]}
    assert load["error"]["type"] == "RuntimeError"
    assert load["error"]["phase"] == "plan"
    assert [(finding["code"], finding["level"]) for finding in load["findings"]] == [("missing_keys", "error")]
    assert load["ranks_reported"] == ("0" if ranks == 1 else "0-3")


def test_the_agent_is_short_and_torch_says_each_failure_once_a_rank(tmp_path: Path) -> None:
    outcome = run("missing", tmp_path, 4)

    lines = outcome.err.splitlines()
    notes = [line for line in lines if re.match(r"\[rank\d\]:( ckpt_sentry:|   \w)", line) and "File" not in line]
    table = [line for line in lines if line.startswith("  traceback : ckpt_sentry: ")]
    assert len(outcome.block()) + len(notes) + len(table) <= 30
    assert len(table) == 4
    # One line for each rank's own exception text; torch alone prints sixteen.
    assert len(re.findall(r"^(?:\[rank\d\]: )?RuntimeError: Missing key in checkpoint", outcome.err, re.MULTILINE)) == 4
    assert lines[-1] == outcome.block()[-1]


def test_the_rank_that_differs_is_named(tmp_path: Path) -> None:
    outcome = run("mismatch_on_one_rank", tmp_path, 4)

    (load,) = outcome.loads()
    assert load["error"]["first_rank"] == 1
    assert load["mismatched"]["items"] == [
        {"keys": "model.head.bias", "module": "model.head", "model_shape": [32], "checkpoint_shape": [16]},
        {"keys": "model.head.weight", "module": "model.head", "model_shape": [32, 8], "checkpoint_shape": [16, 8]},
    ]
    assert [group["ranks"] for group in load["groups"]] == ["0,2-3", "1"]
    assert {f["code"]: f["ranks"] for f in load["findings"]} == {"shape_mismatch": "1", "peer_failed": "0,2-3"}
    assert "rank 1" in outcome.text()


def test_sharded_tensors_are_compared_by_their_global_shapes(tmp_path: Path) -> None:
    outcome = run("fsdp_wider_head", tmp_path, 4)

    (load,) = outcome.loads()
    assert load["mismatched"]["count"] == 2
    assert load["mismatched"]["items"][1]["model_shape"] == [32, 8]
    assert len(load["groups"]) == 1


@pytest.mark.parametrize("ranks", RANKS)
def test_a_failure_that_the_program_catches_is_reported_all_the_same(tmp_path: Path, ranks: int) -> None:
    outcome = run("caught", tmp_path, ranks)

    assert outcome.code == 0
    assert outcome.out.count("CAUGHT") == ranks
    assert [load["verdict"] for load in outcome.loads()] == ["failed"]
    assert outcome.block()


def test_loads_in_threads_are_reported_each(tmp_path: Path) -> None:
    outcome = run("in_threads", tmp_path)

    assert outcome.code == 0
    assert sorted((load["ordinal"], load["verdict"]) for load in outcome.loads()) == [(0, "ok"), (1, "ok")]


def test_a_forked_child_that_loads_is_reported(tmp_path: Path) -> None:
    outcome = run("in_forked_child", tmp_path)

    assert outcome.code == 0
    assert [load["verdict"] for load in outcome.loads()] == ["ok"]


@pytest.mark.parametrize("flags", [("-O",), ("-I",), ("-X", "dev")])
def test_interpreter_flags_change_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    outcome = harness.run(PROGRAM, "missing", str(tmp_path), folder=tmp_path, flags=flags)

    assert outcome.code == 1
    assert outcome.loads()[0]["missing"]["count"] == 800


def test_names_from_a_checkpoint_cannot_act(tmp_path: Path) -> None:
    outcome = run("hostile_names", tmp_path)

    for text in (outcome.text(), "\n".join(outcome.block())):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "d" * 301 not in text
    assert outcome.loads()[0]["missing"]["count"] == 5
    assert "[bold]c[/bold]" in outcome.text()
    assert r"b\nline" in outcome.text()


def test_unset_nothing_happens(tmp_path: Path) -> None:
    outcome = run("missing", tmp_path, CKPT_SENTRY="0")

    assert outcome.code == 1
    assert not re.search(r"ckpt_sentry[: ]", outcome.err)
    assert not outcome.records.exists()


def test_log_off_leaves_the_terminal_alone(tmp_path: Path) -> None:
    outcome = run("good", tmp_path, CKPT_SENTRY_LOG="off")

    assert outcome.block() == []
    assert outcome.loads()[0]["verdict"] == "ok"
