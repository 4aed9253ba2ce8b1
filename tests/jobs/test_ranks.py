"""
Ranks that are killed, raise, leave or never come, on four real ranks.

All combinations of phase, signal and rank are run by `benchmarks/rank_ends.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import ranks
from tests.jobs.harness import PROGRAMS

pytestmark = pytest.mark.slow


def torchrun(folder: Path, *words: str, flags: tuple[str, ...] = (), count: int = 3, **settings: str) -> ranks.Outcome:
    line = [*ranks.TORCHRUN, "--nproc-per-node", str(count), *flags, ranks.PROGRAM, *words, str(folder / "work")]
    return ranks.launch(line, folder, **settings)


def test_a_rank_killed_in_the_barrier(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "barrier", "1", "SIGKILL")
    load = ranks.last(done)
    assert done.code == 1
    assert ranks.first(load) == ("SIGKILL", 1, "barrier")
    assert "rank 1 was killed by SIGKILL while waiting for the others" in "\n".join(done.block())


def test_a_rank_that_somebody_terminates_before_the_load(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "before", "2", "SIGTERM")
    assert ranks.first(ranks.last(done)) == ("SIGTERM", 2, None)


def test_a_rank_that_raises_before_the_load_is_in_our_report_and_in_torchruns_table(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "before", "1", "raise")
    load = ranks.last(done)
    assert ranks.first(load) == ("ValueError", 1, None)
    assert ranks.texts(load, "rank_absent") == ["rank 1 never came to this load: raised ValueError: user bug in before"]
    table = done.err.partition("FAILED\n")[2].partition("ckpt_sentry ")[0]
    assert "ValueError: user bug in before" in table


def test_a_load_that_fails_is_in_torchruns_table(tmp_path: Path) -> None:
    line = [*ranks.TORCHRUN, "--nproc-per-node", "2", str(PROGRAMS / "dcp_loads.py"), "missing", str(tmp_path)]
    done = ranks.launch(line, tmp_path)
    table = done.err.partition("FAILED\n")[2]
    assert "traceback : ckpt_sentry: dcp.load" in table
    assert "missing from the checkpoint" in table.partition("ckpt_sentry ")[0]


def test_a_rank_that_leaves_with_a_code(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "before", "1", "exit3", PG_TIMEOUT="20")
    load = ranks.last(done)
    assert ranks.texts(load, "rank_absent") == ["rank 1 never came to this load: exited with code 3"]


def test_an_end_after_the_load_is_named_and_is_not_its_fault(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "after", "1", "SIGKILL")
    load = ranks.last(done)
    assert (load["verdict"], load["error"]) == ("ok", None)
    assert ranks.texts(load, "rank_killed") == ["rank 1 was killed by SIGKILL after this load had ended there"]
    assert done.block()[-1] == "ckpt_sentry rank 1 was killed by SIGKILL after its last load (dcp.load) had ended"


def test_a_restart_is_another_attempt_of_the_same_run(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "plan", "1", "SIGKILL", flags=("--max-restarts", "1"), count=2, BAD_ATTEMPTS="1")
    assert done.code == 0, done.err[-2000:]
    before, after = done.loads()
    assert ranks.first(before) == ("SIGKILL", 1, "plan")
    assert (after["verdict"], after["run_id"]) == ("ok", before["run_id"])
    lines = [line for line in done.block() if line.startswith("ckpt_sentry")]
    assert [line.split()[1] for line in lines] == ["✗", "✓"]
    assert "attempt 2" in lines[1]


def test_two_thousand_idle_connections_do_not_stop_a_restart(tmp_path: Path) -> None:
    words = ["--nproc-per-node", "2", "--max-restarts", "1", ranks.PROGRAM, "plan", "1", "SIGKILL", f"{tmp_path}/work"]
    line = ["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh", *ranks.TORCHRUN, *words]
    done = ranks.launch(line, tmp_path, CROWD="2000", BAD_ATTEMPTS="1")
    assert done.code == 0, done.err[-2000:]
    assert "a crowd of 2000\n" in done.out
    before, after = done.loads()
    assert ranks.first(before) == ("SIGKILL", 1, "plan")
    assert (after["verdict"], after["ranks_reported"]) == ("ok", "0-1")
    lines = [line.split()[1] for line in done.block() if line.startswith("ckpt_sentry")]
    assert lines == ["✗", "✓"]


def test_a_stall_is_reported_while_it_lasts_and_the_load_goes_on(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "none", "0", "none", count=2, CKPT_SENTRY_STALL_AFTER="1", SLOW_RANK="1", SLOW_READ="8")
    assert done.code == 0, done.err[-2000:]
    assert ranks.last(done)["verdict"] == "ok"
    hangs, well = (line for line in done.block() if line.startswith("ckpt_sentry"))
    assert hangs.endswith("2 of 2 ranks wait")
    assert "✓" in well
    block = "\n".join(done.block())
    assert "rank 1 waits while reading" in block
    assert "in resolve_tensor" in block
    assert "rank 0 waits while waiting for the others" in block


def test_a_rank_that_still_reads_gets_more_time(tmp_path: Path) -> None:
    done = torchrun(tmp_path / "short", "none", "0", "none", count=2, PG_TIMEOUT="8", SLOW_RANK="1", SLOW_READ="30")
    load = ranks.last(done)
    assert ranks.texts(load, "rank_stalled") == ["rank 1 was still reading when rank 0 gave up waiting"]
    (step,) = (found["next"] for found in load["findings"] if found["code"] == "rank_stalled")
    assert step.endswith("or give the process group more time: init_process_group(timeout=…).")
    assert "another rank failed" not in "\n".join(done.block())
    done = torchrun(tmp_path / "long", "none", "0", "none", count=2, PG_TIMEOUT="60", SLOW_RANK="1", SLOW_READ="9")
    assert (done.code, ranks.last(done)["verdict"]) == (0, "ok")
