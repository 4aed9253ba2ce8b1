"""
Loads by nn.Module alone, from the environment variable to the report, with and without a launcher.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.jobs import harness

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "module_loads.py"
RANKS = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("ranks", RANKS)
def test_good_loads_are_recorded_once_and_not_printed(tmp_path: Path, ranks: int) -> None:
    outcome = harness.run(PROGRAM, "good", folder=tmp_path, ranks=ranks)
    assert (outcome.code, outcome.block()) == (0, [])
    (load,) = outcome.loads()
    assert (load["framework"], load["verdict"], load["world_size"]) == ("torch", "ok", ranks)
    assert load["ranks_reported"] == ("0" if ranks == 1 else "0-1")


@pytest.mark.parametrize("ranks", RANKS)
def test_a_load_of_nothing_is_one_block(tmp_path: Path, ranks: int) -> None:
    outcome = harness.run(PROGRAM, "loose", folder=tmp_path, ranks=ranks)
    assert outcome.code == 0
    assert [line for line in outcome.block() if line.startswith("ckpt_sentry")] == [outcome.block()[0]]
    (load,) = outcome.loads()
    assert (load["verdict"], load["rename"]["coverage"], len(load["groups"])) == ("no_op", 1.0, 1)


@pytest.mark.slow
def test_a_rank_that_loads_alone_is_missed_by_nobody(tmp_path: Path) -> None:
    outcome = harness.run(PROGRAM, "first_only", folder=tmp_path, ranks=2)
    (load,) = outcome.loads()
    assert (load["verdict"], load["ranks_reported"], load["unfinished"]) == ("no_op", "0", [])
    assert not {finding["code"] for finding in load["findings"]} & {"rank_absent", "rank_exited", "rank_stalled"}
    assert len([line for line in outcome.block() if line.startswith("ckpt_sentry")]) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_the_traceback_has_the_rule(tmp_path: Path) -> None:
    outcome = harness.run(PROGRAM, "strict", folder=tmp_path)
    assert outcome.code == 1
    assert "RuntimeError: Error(s) in loading state_dict for ModuleDict" in outcome.err
    assert 'strip the prefix "module."' in outcome.err.rpartition("Traceback")[2]
    (load,) = outcome.loads()
    assert (load["verdict"], load["error"]["type"]) == ("failed", "RuntimeError")


@pytest.mark.slow
def test_no_broken_function_reaches_a_load(tmp_path: Path) -> None:
    result = harness.chaos("module_chaos.py", tmp_path)

    assert result["different"] == []
    assert result["reached"] >= 60
