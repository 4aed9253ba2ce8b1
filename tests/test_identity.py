"""
Who speaks, by environment, process group and fork.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry import identity as subject

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "2",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "812", "ENVIRONMENT": "BATCH"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-node0-1234@1",
}


def place(environ: dict[str, str]) -> tuple[int, int, int, int]:
    found = subject.identity(environ)
    return found.rank, found.world_size, found.local_rank, found.local_world_size


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, (0, 1, 0, 1), id="nothing"),
        pytest.param(TORCHRUN, (5, 8, 1, 4), id="torchrun"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2), id="by hand"),
        pytest.param(SRUN, (3, 4, 1, 4), id="srun"),
        pytest.param(SRUN | {"SLURM_STEP_NUM_TASKS": "8"}, (3, 8, 1, 8), id="srun with other tasks than the job"),
        pytest.param(SRUN | TORCHRUN, (5, 8, 1, 4), id="torchrun under srun"),
        pytest.param(BATCH, (0, 1, 0, 1), id="batch script"),
        pytest.param(BATCH | {"SLURM_STEP_ID": "4294967291"}, (0, 1, 0, 1), id="batch script as a step"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "4294967290"}, (0, 1, 0, 1), id="interactive step"),
        pytest.param(MPIRUN, (2, 3, 0, 1), id="Open MPI"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, (1, 4, 1, 4), id="MPICH"),
        pytest.param(MPIRUN | {"RANK": "abc", "WORLD_SIZE": "2"}, (2, 3, 0, 1), id="bad rank: the next source"),
        pytest.param({"RANK": "4", "WORLD_SIZE": "4"}, (0, 1, 0, 1), id="rank beyond the world"),
        pytest.param({"RANK": "-1", "WORLD_SIZE": "4"}, (0, 1, 0, 1), id="negative"),
        pytest.param({"RANK": "", "WORLD_SIZE": ""}, (0, 1, 0, 1), id="empty"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "0"}, (0, 1, 0, 1), id="no world"),
        pytest.param({"RANK": "²", "WORLD_SIZE": "4"}, (0, 1, 0, 1), id="a digit that is no number"),
        pytest.param(TORCHRUN | {"LOCAL_RANK": "9"}, (5, 8, 1, 4), id="local rank beyond the node"),
    ],
)
def test_place(environ: dict[str, str], expected: tuple[int, int, int, int]) -> None:
    assert place(environ) == expected


def test_identity_of_this_process() -> None:
    found = subject.identity(TORCHRUN)
    assert (found.run_id, found.attempt, found.pid) == ("job7", 2, os.getpid())
    assert found.node == os.uname().nodename


@pytest.mark.parametrize(
    ("environ", "group", "expected"),
    [
        pytest.param({}, (2, 4), (2, 4, 2, 4), id="group alone"),
        pytest.param(SRUN, (9, 16), (9, 16, 9, 16), id="tasks that spawn: the group is larger"),
        pytest.param(TORCHRUN, (1, 4), (5, 8, 1, 4), id="a group of some ranks: the launcher's numbers are unique"),
        pytest.param({}, (-1, 4), (0, 1, 0, 1), id="not in the group"),
    ],
)
def test_process_group(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    group: tuple[int, int],
    expected: tuple[int, int, int, int],
) -> None:
    distributed = SimpleNamespace(
        is_initialized=lambda: True, get_rank=lambda: group[0], get_world_size=lambda: group[1]
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    assert place(environ) == expected


def test_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace())
    assert place({}) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN | {"CKPT_SENTRY_RUN_ID": "given"}, "given"),
        (TORCHRUN, "job7"),
        (SRUN | TORCHRUN | {"SLURM_RESTART_COUNT": "1"}, "job7.r1"),
        (SRUN | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "slurm-812.2"),
        (SRUN | {"SLURM_RESTART_COUNT": "0"}, "slurm-812.2"),
    ],
)
def test_run_id(environ: dict[str, str], expected: str) -> None:
    assert subject.run_id(environ) == expected


def test_run_id_is_the_same_on_all_ranks() -> None:
    by_hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for environ, other in (
        (MPIRUN, MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"}),
        (by_hand | {"RANK": "0"}, by_hand | {"RANK": "1"}),
    ):
        assert subject.run_id(environ) == subject.run_id(other)
    assert subject.run_id(by_hand | {"RANK": "0"}) != subject.run_id(by_hand | {"RANK": "0", "MASTER_PORT": "1"})


def test_run_id_of_a_lone_process_is_readable_and_stays() -> None:
    first = subject.run_id({})
    assert re.fullmatch(r"[A-Za-z0-9._-]+-[0-9a-f]{6}", first)
    assert subject.run_id({}) == first
    assert subject.run_id(BATCH) == first


def test_new_run_id() -> None:
    assert subject.new_run_id("train", "rendezvous") == subject.new_run_id("train", "rendezvous")
    assert subject.new_run_id("train") != subject.new_run_id("train")


@given(st.text(min_size=1))
def test_run_id_is_always_a_file_name(given_id: str) -> None:
    name = subject.run_id({"CKPT_SENTRY_RUN_ID": given_id})
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name)


def test_run_ids_that_differ_stay_apart() -> None:
    assert subject.run_id({"CKPT_SENTRY_RUN_ID": "a/b"}) != subject.run_id({"CKPT_SENTRY_RUN_ID": "a:b"})


@given(st.text(), st.integers(0, 9), st.text(), st.integers(0, 9), st.text())
def test_ids(run_id: str, attempt: int, operation: str, ordinal: int, salt: str) -> None:
    load_id = subject.load_id(run_id, attempt, operation, ordinal, salt)
    assert re.fullmatch("[0-9a-f]{32}", load_id)
    assert re.fullmatch("[0-9a-f]{16}", subject.root_span_id(load_id))
    assert load_id == subject.load_id(run_id, attempt, operation, ordinal, salt)
    assert load_id != subject.load_id(run_id, attempt, operation, ordinal + 1, salt)


def test_an_id_never_is_all_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hashlib.blake2b", lambda _data, digest_size: SimpleNamespace(digest=lambda: bytes(digest_size))
    )
    assert subject.load_id("run", 0, "dcp.load", 0) == "0" * 31 + "1"
    assert subject.root_span_id("f" * 32) == "0" * 15 + "1"


def test_ordinals_count_each_operation_over_all_threads() -> None:
    seen: list[int] = []

    def count() -> None:
        seen.extend(subject.next_ordinal("test.threads") for _ in range(200))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(800))
    assert subject.next_ordinal("test.other") == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{'a' * 32}-{'b' * 16}-01", ("a" * 32, "b" * 16)),
        (f"01-{'a' * 32}-{'b' * 16}-01-more", ("a" * 32, "b" * 16)),
        (f"00-{'a' * 32}-{'b' * 16}-01-more", None),
        (f"ff-{'a' * 32}-{'b' * 16}-01", None),
        (f"00-{'0' * 32}-{'b' * 16}-01", None),
        (f"00-{'a' * 32}-{'0' * 16}-01", None),
        (f"00-{'A' * 32}-{'b' * 16}-01", None),
        (f"00-{'a' * 31}-{'b' * 16}-01", None),
        ("", None),
    ],
)
def test_traceparent(value: str, expected: tuple[str, str] | None) -> None:
    assert subject.traceparent({"TRACEPARENT": value}) == expected


CHILD = """
import os, sys
os.environ.update(RANK="1", WORLD_SIZE="2", CKPT_SENTRY_RUN_ID="run")
from ckpt_sentry import identity
def facts():
    found = identity.identity()
    return identity.is_forked_child(), found.rank, found.world_size, found.run_id, identity.salt() == str(os.getpid())
identity.next_ordinal("load")
print(facts(), identity.next_ordinal("load"), flush=True)
if os.fork() == 0:
    print(facts(), identity.next_ordinal("load"), flush=True)
    os.environ["RANK"] = "0"
    print(facts(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_no_rank_until_it_is_given_one() -> None:
    out = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout
    assert out.splitlines() == [
        "(False, 1, 2, 'run', False) 1",
        "(True, 0, 1, 'run', True) 0",
        "(True, 0, 2, 'run', False)",
    ]


def test_importing_brings_no_torch() -> None:
    code = "import sys; import ckpt_sentry.identity; print([m for m in ('torch', 'opentelemetry') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


SPAWN = """
import multiprocessing, os, sys
from types import SimpleNamespace
def worker(rank, method):
    from ckpt_sentry import identity
    sys.modules["torch.distributed"] = SimpleNamespace(
        is_initialized=lambda: True, get_rank=lambda: rank, get_world_size=lambda: 2
    )
    found = identity.identity()
    print(found.rank, found.world_size, found.run_id, identity.salt(), identity.next_ordinal("load"), flush=True)
if __name__ == "__main__":
    import ckpt_sentry.identity
    context = multiprocessing.get_context(sys.argv[1])
    for rank in range(2):
        child = context.Process(target=worker, args=(rank, sys.argv[1]))
        child.start(), child.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_multiprocessing_are_ranks_of_one_run(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWN)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

    def run() -> list[list[str]]:
        command = [sys.executable, str(script), method]
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout
        return [line.split(" ") for line in out.splitlines()]

    first, second = run()
    assert (first[:2], second[:2], first[3:], second[3:]) == (["0", "2"], ["1", "2"], ["", "0"], ["", "0"])
    assert first[2] == second[2] != run()[0][2]
    assert re.fullmatch("train-[0-9a-f]{6}", first[2])


def test_who_a_process_is_follows_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = subject.identity()
    assert subject.identity() is before
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert subject.identity() == subject.identity(os.environ)
    assert (subject.identity().rank, subject.identity().world_size) == (3, 4)
    monkeypatch.undo()
    assert subject.identity() == before
