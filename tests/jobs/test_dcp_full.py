"""
What DCP loads do with the agent and without, right ones and wrong ones, alone and on four ranks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.integrations.hosts import takes_no_dist
from tests.jobs import harness

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
RANKS = [1, 4]
OURS = {"__notes__", "ckpt_sentry", "_ckpt_sentry_text", "_ckpt_sentry_packed"}


def outcomes(folder: Path, ranks: int, mode: str) -> list[dict[str, Any]]:
    """
    By rank, what `dcp_outcomes.py` saw of each of its cases.
    """
    done = harness.run(
        "dcp_outcomes.py", str(folder / "files"), folder=folder, ranks=ranks, CKPT_SENTRY=mode, CKPT_SENTRY_LOG="off"
    )
    assert done.code == 0, done.err
    return json.loads(next(line for line in done.out.splitlines() if line.startswith("[{")))


@pytest.mark.parametrize("ranks", RANKS)
def test_exceptions_stay_what_they_are(tmp_path: Path, ranks: int) -> None:
    without, watched = outcomes(tmp_path, ranks, "0"), outcomes(tmp_path, ranks, "1")

    for rank in range(ranks):
        for name, before in without[rank].items():
            after = watched[rank][name]
            assert set(after["outcome"].pop("keys", ())) - set(before["outcome"].pop("keys", ())) <= OURS, name
            assert after["outcome"] == before["outcome"], (rank, name)
            lost = [line for line in before["texts"] if line.strip() and not _is_said(line, after["texts"])]
            assert lost == [], (rank, name)


def _is_said(line: str, texts: list[str]) -> bool:
    # Ranks share a traceback; a generator is replaced by its items; our wrapper's frame stands beside torch's.
    if line.startswith(("CheckpointException ranks:", "Traceback ")):
        return True
    if "<generator" in line:
        return any(text.startswith(line.partition("<generator")[0]) for text in texts)
    return line in texts


@pytest.mark.parametrize("ranks", RANKS)
def test_every_failure_says_rank_step_path_and_shapes(tmp_path: Path, ranks: int) -> None:
    for seen in outcomes(tmp_path, ranks, "1"):
        assert {name: case["faults"] for name, case in seen.items() if case["faults"]} == {}
        # The generator, which `any` had begun to use up, is told whole.
        said = "\n".join(seen["generator_in_the_text"]["texts"])
        assert "absent: [model.head.{bias,weight}], known: ['a'], <object object>" in said


def test_causes_that_cannot_travel_arrive(tmp_path: Path) -> None:
    for seen in outcomes(tmp_path, 4, "1"):
        assert seen["unpicklable"]["outcome"]["failures"]["3"]["text"] == "RuntimeError: __main__.LockedError: x-y"
        assert seen["unbuildable"]["outcome"]["failures"]["3"]["type"] == "KeyError"


@pytest.mark.parametrize("ranks", RANKS)
def test_right_loads_give_no_warning(tmp_path: Path, ranks: int) -> None:
    done = harness.run("dcp_legitimate.py", "wrappers", str(tmp_path), folder=tmp_path, ranks=ranks)

    assert done.code == 0, done.err
    loads = [load for load in done.loads() if load["framework"] == "dcp"]
    assert len(loads) == (5 if ranks == 1 else 9)
    alarms = {
        load["path"]: load["findings"]
        for load in loads
        if load["verdict"] != "ok" or any(one["level"] != "info" for one in load["findings"])
    }
    assert alarms == {}
    assert {load["coverage"]["judged"] for load in loads} == {1.0}
    assert {load["step"] for load in loads} == {7}
    said = [one["text"] for load in loads for one in load["findings"] if one["code"] == "not_asked_for"]
    assert len(said) == 1
    assert 'under "optim"' in said[0]
    assert said[0].endswith("were not asked for.")


def test_resharding_is_right(tmp_path: Path) -> None:
    for ranks in (1, 4):
        saved = harness.run(
            "dcp_legitimate.py", "save", str(tmp_path), folder=tmp_path / f"save{ranks}", ranks=ranks, CKPT_SENTRY="0"
        )
        assert saved.code == 0, saved.err
    for ranks in (1, 2, 4):
        done = harness.run("dcp_legitimate.py", "load", str(tmp_path), folder=tmp_path / f"load{ranks}", ranks=ranks)
        assert done.code == 0, done.err
        assert [(load["verdict"], load["findings"], load["coverage"]["judged"]) for load in done.loads()] == [
            ("ok", [], 1.0)
        ] * 2


@pytest.mark.skipif(not takes_no_dist(), reason="this torch has no no_dist in dcp.load")
def test_ranks_that_load_apart_do_not_shift_the_loads_of_all(tmp_path: Path) -> None:
    done = harness.run("dcp_legitimate.py", "apart", str(tmp_path), folder=tmp_path, ranks=3)

    assert done.code == 0, done.err
    seen = [(load["step"], load["ranks_reported"], load["verdict"], load["findings"]) for load in done.loads()]
    assert sorted(seen) == [
        (0, "0", "ok", []),
        (0, "0", "ok", []),
        (0, "0", "ok", []),
        (1, "0-2", "ok", []),
        (1, "1", "ok", []),
        (2, "0-1", "ok", []),
        (2, "2", "ok", []),
        (3, "0-2", "ok", []),
        (3, "0-2", "ok", []),
        (4, "0-2", "ok", []),
    ]
    # The ranks that make it are said, where they are not all.
    assert sum("step 0 · rank 0 ·" in line for line in done.block()) == 3
    assert sum("step 2 · ranks 0-1 ·" in line for line in done.block()) == 1
