"""
Whatever part of the agent breaks, a load ends as it does without the agent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.integration import harness

if TYPE_CHECKING:
    from pathlib import Path


def test_no_broken_function_reaches_a_dcp_load(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(harness.PROGRAMS / "dcp_chaos.py")],
        env=harness.environment(CKPT_SENTRY="1", CKPT_SENTRY_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == []
    assert result["points"] > result["reached"] >= 100
