"""
Whatever part of the agent breaks, a load ends as it does without the agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.jobs import harness

if TYPE_CHECKING:
    from pathlib import Path


def test_no_broken_function_reaches_a_dcp_load(tmp_path: Path) -> None:
    result = harness.chaos("dcp_chaos.py", tmp_path, CKPT_SENTRY="1")

    assert result["different"] == []
    assert result["points"] > result["reached"] >= 100
