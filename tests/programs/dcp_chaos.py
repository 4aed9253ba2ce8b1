"""
Loads with each function of the agent broken in turn, compared with the same loads without the agent.

Prints what `tests.chaos.run` does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
os.environ |= {"CKPT_SENTRY_GUARD": "swallow", "CKPT_SENTRY_LOG": "auto"}
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from ckpt_sentry import install, uninstall  # noqa: E402
from tests import chaos  # noqa: E402

FOLDER = Path(tempfile.mkdtemp(prefix="ckpt-sentry-chaos-"))


def outcome(state: dict[str, Any], path: Path) -> tuple[Any, ...]:
    """
    All that a program can see of a load.
    """
    try:
        result: Any = dcp.load(state, checkpoint_id=path)
    except BaseException as error:
        failures = getattr(error, "failures", {})
        inner = [(rank, type(exc), str(exc), exc.args) for rank, (exc, _) in failures.items()]
        return (type(error), error.args[:1], inner, values(state))
    return (result, values(state))


def values(state: dict[str, Any]) -> dict[str, Any]:
    """
    Plain numbers, which compare.
    """
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def outcomes() -> list[tuple[Any, ...]]:
    """
    A good load, missing keys and a mismatch, a path that is not there.
    """
    return [
        outcome({"a": torch.zeros(3), "b": torch.zeros(2), "n": 0}, FOLDER / "step-7"),
        outcome({"a": torch.zeros(4), "c": torch.zeros(2)}, FOLDER / "step-7"),
        outcome({"a": torch.zeros(3)}, FOLDER / "step-8"),
    ]


def main() -> None:
    """
    Without the agent, with it, and with each point broken.
    """
    dcp.save({"a": torch.ones(3), "b": torch.ones(2), "n": 5}, checkpoint_id=FOLDER / "step-7")
    uninstall()
    wanted = outcomes()
    install()
    chaos.run(outcomes, wanted, lambda _: True)


if __name__ == "__main__":
    main()
