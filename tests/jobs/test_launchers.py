"""
Other ways to start ranks than torchrun: the same report.
"""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.jobs import ranks
from tests.jobs.harness import PROGRAMS

pytestmark = pytest.mark.slow

MPIRUN = shutil.which("mpirun")
RUN = (*ranks.CKPT_SENTRY, "run", "--")
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun: apt-get install openmpi-bin")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def mpirun(folder: Path, *words: str) -> ranks.Outcome:
    line = [*RUN, str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, ranks.PROGRAM]
    return ranks.launch([*line, *words, str(folder / "work")], folder, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())


def spawn(folder: Path, *words: str) -> ranks.Outcome:
    return ranks.launch([*RUN, sys.executable, ranks.PROGRAM, *words, str(folder / "work")], folder, SPAWN="3")


@needs_mpi
def test_a_good_load_under_open_mpi_is_one_line(tmp_path: Path) -> None:
    done = mpirun(tmp_path, "none", "0", "none")
    assert done.code == 0, done.err[-2000:]
    (line,) = done.block()
    assert line.startswith("ckpt_sentry ✓ dcp.load  step 7 · 3 ranks · 1 key, 100 %")
    assert ranks.last(done)["ranks_reported"] == "0-2"


@needs_mpi
def test_a_rank_killed_under_open_mpi(tmp_path: Path) -> None:
    done = mpirun(tmp_path, "plan", "1", "SIGKILL")
    assert done.code == 137
    assert ranks.first(ranks.last(done)) == ("SIGKILL", 1, "plan")


def test_a_spawned_rank_that_is_killed(tmp_path: Path) -> None:
    done = spawn(tmp_path, "read", "2", "SIGKILL")
    assert ranks.first(ranks.last(done)) == ("SIGKILL", 2, "read")


def test_a_spawned_rank_that_raises_before_the_load(tmp_path: Path) -> None:
    done = spawn(tmp_path, "before", "1", "raise")
    assert ranks.first(ranks.last(done)) == ("ValueError", 1, None)
    assert [line.split()[1] for line in done.block() if line.startswith("ckpt_sentry")] == ["✗"]


def test_torchrun_below_another_parent_tells_it_what_it_knows(tmp_path: Path) -> None:
    line = [*RUN, *ranks.TORCHRUN, "--nproc-per-node", "2", ranks.PROGRAM, "plan", "1", "SIGTERM", str(tmp_path / "w")]
    done = ranks.launch(line, tmp_path)
    assert ranks.first(ranks.last(done)) == ("SIGTERM", 1, "plan")
    assert len([line for line in done.block() if line.startswith("ckpt_sentry")]) == 1


def test_two_runs_of_one_command_are_two_runs(tmp_path: Path) -> None:
    single = f"{' '.join(ranks.TORCHRUN)} --nproc-per-node 2 {ranks.PROGRAM} none 0 none {tmp_path}/w"
    done = ranks.launch([*RUN, "sh", "-c", f"{single}; {single}"], tmp_path)
    assert [line.split()[1] for line in done.block()] == ["✓", "✓"]


def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    words = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    line = [sys.executable, "-m", "accelerate.commands.launch", *words, ranks.PROGRAM, "plan", "1", "SIGKILL"]
    done = ranks.launch([*line, str(tmp_path / "work")], tmp_path)
    assert ranks.first(ranks.last(done)) == ("SIGKILL", 1, "plan")


@pytest.mark.parametrize(("how", "error"), [("raise", "ValueError"), ("SIGTERM", "SIGTERM")])
def test_elastic_launch_from_python(tmp_path: Path, how: str, error: str) -> None:
    line = [sys.executable, str(PROGRAMS / "elastic_from_python.py"), "before", "1", how, str(tmp_path / "work")]
    done = ranks.launch(line, tmp_path)
    assert "CAUGHT ChildFailedError" in done.out
    assert ranks.first(ranks.last(done)) == (error, 1, None)
