"""
What a process says and records of its own loads: of good ones that repeat not each, of anything else all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_sentry import config
from ckpt_sentry.collector import records
from ckpt_sentry.collector.repeats import KEPT, SECONDS
from ckpt_sentry.core.report import LoadError
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.session.process_reporter import ProcessReporter
from ckpt_sentry.transport.events import LoadFinished, LoadsLeftOut
from tests.collector.jobs import entered, failing, finished, started

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_sentry.transport.events import Event

MANY = 100
STEP = 0.001


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessReporter:
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(tmp_path))
    config.reset()
    return ProcessReporter()


def load(number: int, at: float, seconds: float = STEP / 2, **fields: object) -> list[Event]:
    """
    A load that enters a phase half-way.
    """
    name, end = f"{number:032x}", finished(0, 1, **fields)
    return [
        started(0, 1, load=name, at=at),
        replace(entered(0, "plan", 1), load_id=name, at=at + seconds / 2),
        replace(end, at=at + seconds, report=replace(end.report, load_id=name)),
    ]


def quick(count: int, step: float = STEP) -> list[Event]:
    return [event for number in range(count) for event in load(number, number * step)]


def tell(reporter: ProcessReporter, events: list[Event]) -> None:
    for event in events:
        reporter.on_event(event)


def recorded(folder: Path) -> list[Event]:
    reading = records.Reading(records.record_files(folder), None)
    found = [event for sourced in reading for event in sourced.events]
    assert (reading.damaged, reading.refused) == (0, 0)
    return found


def counted(folder: Path) -> tuple[int, int]:
    """
    Loads that are recorded whole, and those that are left out.
    """
    found = recorded(folder)
    left_out = max((event.count for event in found if isinstance(event, LoadsLeftOut)), default=0)
    return sum(isinstance(event, LoadFinished) for event in found), left_out


def test_good_loads_that_repeat_are_said_and_recorded_now_and_then(
    reporter: ProcessReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(reporter, quick(MANY))
    assert len(capsys.readouterr().err.splitlines()) == KEPT
    assert counted(tmp_path) == (KEPT, MANY - KEPT)
    later = load(MANY, MANY * STEP + SECONDS)
    tell(reporter, later)
    before, newest = capsys.readouterr().err.splitlines()
    assert before == f"ckpt_sentry dcp.load: {MANY - KEPT} more good loads like the last one"
    assert newest.startswith("ckpt_sentry ✓ dcp.load")
    assert recorded(tmp_path)[-3:] == later


def test_loads_that_take_their_time_are_all_said(
    reporter: ProcessReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(reporter, quick(30, step=SECONDS))
    assert len(capsys.readouterr().err.splitlines()) == 30
    assert sum(counted(tmp_path)) == 30


def test_a_good_load_that_differs_is_said(reporter: ProcessReporter, capsys: pytest.CaptureFixture[str]) -> None:
    tell(reporter, quick(MANY))
    capsys.readouterr()
    tell(reporter, load(MANY, MANY * STEP, key_digest="others"))
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_failing_load_among_many_good_ones_is_recorded_whole(reporter: ProcessReporter, tmp_path: Path) -> None:
    error = LoadError("E", "no", "plan")
    begun, phase, end = load(MANY, MANY * STEP, verdict="failed", error=error)
    tell(reporter, [*quick(MANY), begun])
    assert recorded(tmp_path)[-1] == begun
    bad = replace(failing(0, error, 1), load_id=f"{MANY:032x}")
    tell(reporter, [phase, bad, end])
    assert recorded(tmp_path)[-4:] == [begun, phase, bad, end]


def test_a_phase_is_recorded_once_a_load_takes_longer(reporter: ProcessReporter, tmp_path: Path) -> None:
    begun, phase, _ = load(MANY, MANY * STEP, seconds=1.0)
    tell(reporter, [*quick(MANY), begun, phase])
    assert recorded(tmp_path)[-2:] == [begun, phase]


def test_what_is_heard_of_a_load_that_began_elsewhere_is_said(
    reporter: ProcessReporter, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(reporter, load(1, 0.0)[2:])
    assert len(capsys.readouterr().err.splitlines()) == 1
