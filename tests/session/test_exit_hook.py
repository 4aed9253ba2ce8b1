"""
Programs that end by an exception, and what their launcher hears of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from ckpt_sentry.launcher.socket_server import LauncherSocket
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import Event, RankEnded
from tests.jobs.harness import environment

LISTEN = "from ckpt_sentry.session import exit_hook\nexit_hook.listen()\n"


class Worker:
    """
    Runs code as rank 1 of 2 under a launcher.
    """

    def __init__(self, folder: Path) -> None:
        self.events: Queue[Event] = Queue()
        self.error_file = folder / "error.json"

    def run(self, code: str, **settings: str) -> subprocess.CompletedProcess[str]:
        launcher = LauncherSocket(self._take, lambda _: None)
        launcher.start()
        environ = environment(
            **{"CKPT_SENTRY_SOCKET": launcher.path} | settings,
            TORCHELASTIC_ERROR_FILE=str(self.error_file),
            RANK="1",
            WORLD_SIZE="2",
        )
        line = [sys.executable, "-c", LISTEN + code]
        try:
            return subprocess.run(line, env=environ, capture_output=True, text=True, check=False, timeout=60)
        finally:
            launcher.close()

    def _take(self, request: dict[str, Any]) -> None:
        for event in otlp_json.decode(request)[0]:
            self.events.put(event)

    def word(self) -> RankEnded:
        event = self.events.get_nowait()
        assert isinstance(event, RankEnded)
        return event

    def table(self) -> dict[str, object]:
        return json.loads(self.error_file.read_text())["message"]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_an_exception_that_nobody_catches_is_told_with_its_rank(worker: Worker) -> None:
    done = worker.run("raise ValueError('wrong learning rate')")
    word = worker.word()
    assert done.returncode == 1
    assert (word.how, word.identity.rank, word.identity.world_size) == ("raised", 1, 2)
    assert word.error is not None
    assert (word.error.type, word.error.message) == ("ValueError", "wrong learning rate")
    assert worker.table()["message"] == "ValueError: wrong learning rate"


def test_the_hosts_own_hook_runs_as_ever(worker: Worker) -> None:
    code = "import sys\nsys.excepthook = lambda *what: print('MINE', what[0].__name__)\nraise KeyError('k')"
    done = worker.run(code)
    assert (done.stdout, done.stderr) == ("MINE KeyError\n", "")
    assert worker.word().how == "raised"


@pytest.mark.parametrize("code", ["", "raise SystemExit(3)", "raise KeyboardInterrupt", "import os; os._exit(1)"])
def test_nothing_is_said_of_other_ends(worker: Worker, code: str) -> None:
    worker.run(code)
    with pytest.raises(Empty):
        worker.word()
    assert not worker.error_file.exists()


def test_a_file_that_the_program_has_written_stays(worker: Worker) -> None:
    worker.error_file.write_text('{"message": "mine"}')
    worker.run("raise ValueError('x')")
    assert worker.table() == "mine"


def test_the_loss_of_another_is_told_but_not_put_in_the_table(worker: Worker) -> None:
    worker.run("raise RuntimeError('[gloo] Connection closed by peer [127.0.0.1]:4242')")
    assert worker.word().how == "raised"
    assert not worker.error_file.exists()


def test_a_text_that_cannot_be_had_is_left_out(worker: Worker) -> None:
    worker.run("class Odd(Exception):\n    def __str__(self):\n        raise TypeError\nraise Odd")
    word = worker.word()
    assert word.error is not None
    assert (word.error.type, word.error.message) == ("__main__.Odd", "")


def test_a_forked_child_does_not_speak_for_its_parent(worker: Worker) -> None:
    worker.run("import os\nif os.fork() == 0:\n    raise ValueError('child')\nos.wait()")
    with pytest.raises(Empty):
        worker.word()


def test_a_launcher_that_is_gone_delays_nothing(worker: Worker) -> None:
    done = worker.run("import os\nraise ValueError('x')", CKPT_SENTRY_SOCKET="/nowhere/socket")
    assert done.stderr.splitlines()[-1] == "ValueError: x"


def test_what_torchrun_prints_holds_no_secret_and_steers_no_terminal(worker: Worker) -> None:
    worker.run(r"raise RuntimeError('cannot open s3://AKIA:hunter2@bucket/x \x1b[31m')")
    table = worker.table()
    extra = table["extraInfo"]
    assert isinstance(extra, dict)
    for text in (table["message"], extra["py_callstack"]):
        assert r"cannot open s3://***@bucket/x \x1b[31m" in str(text)
        assert "\x1b" not in str(text)
        assert "hunter2" not in str(text)
