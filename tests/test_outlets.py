from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_sentry import config, outlets, speaker
from ckpt_sentry.audit.report import LoadError
from ckpt_sentry.outlets import FAILING_SECONDS, GOOD_SECONDS, Outlets
from tests.collector.jobs import failing, finished, started

ERROR = LoadError("OSError", "[Errno 5] Input/output error", "read")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """
    A receiver that takes connections (the kernel does) and never answers.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        monkeypatch.setenv("CKPT_SENTRY_RECEIVER", f"127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("CKPT_SENTRY_LOG", "off")
        config.reset()
        yield listener
    config.reset()


def connections(listener: socket.socket) -> int:
    listener.settimeout(0)
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_a_good_load_waits_for_a_receiver_that_does_not_answer_once(silent: socket.socket) -> None:
    made = Outlets()
    assert made._left == GOOD_SECONDS
    made.event(started(0))
    assert made._left <= 0
    for _ in range(100):
        made.event(started(0))
    made.finished(finished(0))
    assert connections(silent) == 1


def test_a_failing_load_has_one_budget_for_everything(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "FAILING_SECONDS", 0.2)
    made = Outlets()
    made.event(started(0))
    made.urgent(failing(0, ERROR))
    assert made._left <= 0
    made.finished(finished(0, verdict="failed", error=ERROR))
    assert connections(silent) == 2


def test_an_absent_receiver_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("CKPT_SENTRY_RECEIVER", f"127.0.0.1:{port}")
    monkeypatch.setenv("CKPT_SENTRY_LOG", "off")
    config.reset()
    made = Outlets()
    made.urgent(failing(0, ERROR))
    made.finished(finished(0, verdict="failed", error=ERROR))
    config.reset()
    assert made._left > FAILING_SECONDS / 2


def test_a_job_that_outlives_its_launcher_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("CKPT_SENTRY_RECEIVER", address)
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(tmp_path))
    monkeypatch.setattr(speaker, "_own", None)
    config.reset()
    made = Outlets()
    made.event(started(0))
    made.urgent(failing(0, ERROR))
    made.finished(finished(0, verdict="failed", error=ERROR))
    config.reset()

    (file,) = tmp_path.glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 3
    assert capsys.readouterr().err.startswith("ckpt_sentry ✗ dcp.load failed")
