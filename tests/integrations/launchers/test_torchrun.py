from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_sentry.integrations.launchers import torchrun
from ckpt_sentry.integrations.launchers.torchrun import _run_id


def config(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**({"run_id": "none", "max_nodes": 1, "rdzv_endpoint": "node0:29500"} | fields))


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPT_SENTRY_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_the_program_gives_the_run_its_name() -> None:
    assert _run_id(config(), sys.executable, ["-u", "/jobs/train.py", "--lr", "1"]).startswith("train-")
    assert _run_id(config(), "bash", ["-c", "true"]).partition("-")[0] != "train"


def test_one_node_without_an_id_is_a_new_run_each_time() -> None:
    names = {_run_id(config(), sys.executable, ["train.py"]) for _ in range(5)}
    assert len(names) == 5


def test_nodes_agree_by_the_id_of_the_rendezvous_or_else_by_its_address() -> None:
    def name(**fields: object) -> str:
        return _run_id(config(max_nodes=2, **fields), sys.executable, ["train.py"])

    assert name(run_id="job7") == name(run_id="job7", rdzv_endpoint="node1:1")
    assert name() == name()
    assert name() != name(rdzv_endpoint="node0:29501")


def test_a_scheduled_job_is_told_from_the_last_one_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for job in ("100", "101"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        names.add(_run_id(config(max_nodes=2), sys.executable, ["train.py"]))
    assert len(names) == 2


def test_a_name_that_the_user_gives_is_kept_but_not_by_launchers_inside_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CKPT_SENTRY_RUN_ID", "mine")
    assert _run_id(config(), sys.executable, ["train.py"]) == "mine"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    assert _run_id(config(), sys.executable, ["train.py"]) != "mine"


class Broken:
    """
    A launch that cannot be closed.
    """

    closed = 0

    def leave(self, _: object) -> None:
        pass

    def close(self, *, ok: bool) -> None:
        self.closed += 1
        raise OSError(ok)


@pytest.mark.parametrize("is_command", [False, True])
def test_the_end_of_a_launch_raises_no_error_of_our_own(monkeypatch: pytest.MonkeyPatch, *, is_command: bool) -> None:
    later: list[Callable[[], Any]] = []
    monkeypatch.setenv("CKPT_SENTRY_GUARD", "swallow")
    monkeypatch.setattr(torchrun, "_is_command", lambda: is_command)
    monkeypatch.setattr(atexit, "register", lambda function, *args, **kw: later.append(lambda: function(*args, **kw)))
    launch: Any = Broken()
    torchrun._end(launch, RuntimeError("a worker failed"))
    assert (launch.closed, len(later)) == ((0, 1) if is_command else (1, 0))
    for call in later:
        call()
    assert launch.closed == 1
