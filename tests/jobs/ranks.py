"""
Runs `tests/programs/rank_ends.py` under launchers, and says how its ranks ended by the report.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.jobs.harness import PROGRAMS, Outcome, environment, finish

PROGRAM = str(PROGRAMS / "rank_ends.py")
CKPT_SENTRY = (sys.executable, "-m", "ckpt_sentry")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def launch(line: Sequence[str], folder: Path, **settings: str) -> Outcome:
    """
    Run a command line with the agent on; what is left of it after `TIMEOUT` is killed with its children.
    """
    records = folder / "records"
    environ = environment(**{"CKPT_SENTRY": "1", "CKPT_SENTRY_DIR": str(records)} | settings)
    return finish(line, environ, records)


def last(outcome: Outcome) -> dict[str, Any]:
    """
    The last load of the report.
    """
    return outcome.loads()[-1]


def first(load: dict[str, Any]) -> tuple[str, int, str | None]:
    """
    What ended the load: type, rank and phase of its error.
    """
    error = load["error"]
    return error["type"], error["first_rank"], error["phase"]


def texts(load: dict[str, Any], code: str) -> list[str]:
    """
    The texts of the findings with this code.
    """
    return [found["text"] for found in load["findings"] if found["code"] == code]
