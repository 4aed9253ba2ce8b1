from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_sentry import config
from ckpt_sentry.collector import records
from ckpt_sentry.core.report import LoadError
from ckpt_sentry.launcher.coordinator import Coordinator, Relay, has_coordinator
from ckpt_sentry.transport import connection
from ckpt_sentry.transport.connection import Connection
from ckpt_sentry.transport.events import Event, RankEnded, RunEnded
from tests.collector.jobs import RUN, failing, finished, killed, started, stopped

SECONDS = 10.0
ERROR = LoadError("OSError", "[Errno 5] Input/output error", "read")


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CKPT_SENTRY_SOCKET", raising=False)
    config.reset()


def send(coordinator: Coordinator, *events: Event) -> None:
    """
    What a worker says that then ends.
    """
    way = Connection(coordinator.environment["CKPT_SENTRY_SOCKET"])
    assert all(way.send(event, SECONDS) for event in events)
    assert way.taken(SECONDS)
    way.close()


def test_workers_inherit_the_way_to_the_launcher_and_the_environment_is_given_back() -> None:
    coordinator = Coordinator("run7-a1b2", 2)
    environ = {"CKPT_SENTRY_SOCKET": "before", "HOME": "/root"}
    coordinator.enter(environ)
    assert {name: environ[name] for name in coordinator.environment} == coordinator.environment
    assert environ["CKPT_SENTRY_RUN_ID"] == "run7-a1b2"
    coordinator.leave(environ)
    assert environ == {"CKPT_SENTRY_SOCKET": "before", "HOME": "/root"}
    coordinator.close(ok=True)


def test_a_parent_of_unknown_runs_names_none() -> None:
    coordinator = Coordinator(None, None)
    assert "CKPT_SENTRY_RUN_ID" not in coordinator.environment
    coordinator.close(ok=True)


def test_a_failed_load_is_said_when_the_workers_are_gone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    coordinator = Coordinator(RUN, 2)
    send(coordinator, started(0, 2), started(1, 2), failing(1, ERROR, 2))
    assert capsys.readouterr().err == ""
    coordinator.on_event(killed(1, "SIGKILL", 2))
    coordinator.on_event(stopped(0, 2))
    coordinator.close(ok=False)
    coordinator.close(ok=False)
    said = capsys.readouterr().err
    assert said.count("ckpt_sentry ✗ dcp.load failed on 2 of 2 ranks") == 1
    kept = [event for sourced in records.read(tmp_path, run_id=RUN) for event in sourced.events]
    assert isinstance(kept[-1], RunEnded)
    assert not kept[-1].ok
    assert [event.how for event in kept if isinstance(event, RankEnded)] == ["killed", "stopped"]


def test_a_good_load_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = Coordinator(RUN, 2)
    send(coordinator, finished(0, 2), finished(1, 2))
    assert capsys.readouterr().err.startswith("ckpt_sentry ✓ dcp.load  step 1200 · 2 ranks")
    coordinator.close(ok=True)
    assert capsys.readouterr().err == ""


def test_a_launcher_below_tells_what_it_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(None, None, knows_ends=False)
    assert not has_coordinator()
    for name, value in coordinator.environment.items():
        monkeypatch.setenv(name, value)
    config.reset()
    assert has_coordinator()
    relay = Relay(RUN)
    relay.enter(os.environ)
    assert os.environ["CKPT_SENTRY_RUN_ID"] == RUN
    relay.leave(os.environ)
    send(coordinator, started(0, 2), started(1, 2))
    relay.on_event(killed(1, "SIGSEGV", 2))
    relay.close(ok=False)
    connection.forget()
    coordinator.close(ok=False)
    assert "rank 1 was killed by SIGSEGV while setting up" in capsys.readouterr().err
