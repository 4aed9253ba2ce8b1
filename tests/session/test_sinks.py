from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_sentry import config
from ckpt_sentry.core.report import LoadError
from ckpt_sentry.launcher.socket_server import LauncherSocket
from ckpt_sentry.session import process_reporter, sinks
from ckpt_sentry.session.sinks import FAILING_SECONDS, GOOD_SECONDS, Sinks
from ckpt_sentry.transport import connection
from tests.collector.jobs import failing, finished, started

ERROR = LoadError("OSError", "[Errno 5] Input/output error", "read")


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """
    A process that has spoken to nobody yet.
    """
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(tmp_path))
    monkeypatch.setattr(process_reporter, "_own", None)
    yield
    connection.forget()
    config.reset()


def records(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.glob("*.jsonl"))


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[LauncherSocket]:
    """
    A launcher that takes connections and bytes (the kernel does) and never answers.
    """
    made = LauncherSocket(print, print)
    monkeypatch.setenv("CKPT_SENTRY_SOCKET", made.path)
    config.reset()
    yield made
    made._listener.close()


@pytest.mark.usefixtures("deaf")
def test_a_good_load_does_not_wait_for_a_launcher_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    made = Sinks()
    made.event(started(0))
    made.finished(finished(0))
    assert made._left > GOOD_SECONDS / 2
    assert capsys.readouterr().err == ""
    # Whether it has been heard is seen to when the process ends.
    sinks._settle()
    assert capsys.readouterr().err.startswith("ckpt_sentry ✓ dcp.load")


@pytest.mark.usefixtures("deaf")
def test_a_failing_load_has_one_budget_and_speaks_for_itself_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sinks, "FAILING_SECONDS", 0.2)
    made = Sinks()
    made.event(started(0))
    made.urgent(failing(0, ERROR))
    assert made._left <= 0
    made.finished(finished(0, verdict="failed", error=ERROR))
    assert capsys.readouterr().err.startswith("ckpt_sentry ✗ dcp.load failed")
    assert records(tmp_path) == 3


def test_an_absent_launcher_is_found_out_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_SENTRY_SOCKET", str(tmp_path / "socket"))
    config.reset()
    made = Sinks()
    made.event(started(0))
    made.urgent(failing(0, ERROR))
    made.finished(finished(0, verdict="failed", error=ERROR))
    assert made._left > FAILING_SECONDS / 2
    assert records(tmp_path) == 3
    assert capsys.readouterr().err.startswith("ckpt_sentry ✗ dcp.load failed")


def test_a_job_that_outlives_its_launcher_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = LauncherSocket(lambda _: None, lambda _: None)
    launcher.start()
    monkeypatch.setenv("CKPT_SENTRY_SOCKET", launcher.path)
    config.reset()
    first = Sinks()
    first.event(started(0))
    assert first._launcher is not None
    assert first._launcher.taken(10.0)
    launcher.close()
    first.urgent(failing(0, ERROR))
    first.finished(finished(0, verdict="failed", error=ERROR))
    assert records(tmp_path) == 2
    assert capsys.readouterr().err.startswith("ckpt_sentry ✗ dcp.load failed")
