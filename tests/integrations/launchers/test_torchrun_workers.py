from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_sentry.integrations.launchers.torchrun_workers import ended, signal_name

torch_processes = pytest.importorskip("torch.distributed.elastic.multiprocessing")

SCRIPTS = {0: "exec sleep 60", 1: "exit 3", 2: "kill -9 $$", 3: "exit 0"}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Any]:
    """
    Four shells that torchrun's own code has started; all but the first have ended.
    """
    specs = torch_processes.DefaultLogsSpecs(log_dir=str(tmp_path))
    made = torch_processes.start_processes(
        name="shells",
        entrypoint="/bin/sh",
        args={rank: ("-c", script) for rank, script in SCRIPTS.items()},
        envs={rank: {"RANK": str(rank + 4), "WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "1"} for rank in SCRIPTS},
        logs_specs=specs,
    )
    for rank in (1, 2, 3):
        made.subprocess_handlers[rank].proc.wait(60)
    yield made
    made.close()


def test_who_ended_before_the_launcher_stopped_anybody(context: Any) -> None:
    ends = [worker.end("run7") for worker in ended(context, closing=True)]
    assert [(end.identity.rank, end.how, end.exit_code, end.signal) for end in ends] == [
        (6, "killed", None, "SIGKILL"),
        (7, "exited", 0, None),
        (5, "exited", 3, None),
    ]
    assert {(end.identity.world_size, end.identity.attempt, end.identity.run_id) for end in ends} == {(8, 1, "run7")}


def test_who_was_stopped_by_the_launcher(context: Any) -> None:
    context.close()
    stopped = [worker.end("run7") for worker in ended(context, closed=True) if worker.local_rank == 0]
    assert [(end.how, end.signal) for end in stopped] == [("stopped", "SIGTERM")]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"message": "ValueError: x = 1", "extraInfo": {"timestamp": "1"}}, ("ValueError", "x = 1")),
        ("odd words: here", ("Exception", "odd words: here")),
        ({"other": 1}, None),
    ],
)
def test_what_a_program_has_recorded_is_how_it_ended(
    context: Any, message: object, error: tuple[str, str] | None
) -> None:
    Path(context.error_files[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(context.error_files[1]).write_text(json.dumps({"message": message}))
    (worker,) = (worker for worker in ended(context, closing=True) if worker.local_rank == 1)
    end = worker.end("run7")
    assert (end.error and (end.error.type, end.error.message)) == error
    assert end.how == ("raised" if error else "exited")


def test_signals_without_a_name() -> None:
    assert (signal_name(9), signal_name(99)) == ("SIGKILL", "signal 99")
