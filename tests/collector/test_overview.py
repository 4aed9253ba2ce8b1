from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_sentry.collector import overview
from ckpt_sentry.collector.overview import Overview, overviews
from ckpt_sentry.collector.records import Place, Records, Run
from ckpt_sentry.core.report import LoadError
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import Event
from tests.collector.jobs import RUN, entered, finished, started, told

LATER = {"load_id": "b" * 32, "started_at": 200.0, "ended_at": 201.0, "step": 1300}


def write(folder: Path, *events: Event, pid: int = 1) -> Path:
    ours = Records(Place(folder, private=False), run_id=RUN, node="n", pid=pid)
    for event in events:
        assert ours.append(otlp_json.encode([event]))
    return ours.path


def test_the_worst_verdict_of_a_run_over_all_its_files_and_where_its_last_load_was(tmp_path: Path) -> None:
    error = LoadError("OSError", "gone")
    write(tmp_path, finished(0, 2, verdict="failed", error=error), finished(0, 2, **LATER), pid=1)
    write(tmp_path, told(1, 2), finished(1, 2, **LATER), pid=2)
    assert overviews(tmp_path) == (Overview(Run(RUN, 100.0, 201.0, 2), "failed", 1300, "/data/run7/step-1200"),)


def test_of_a_large_file_both_ends_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    middle = (entered(0, "plan") for _ in range(500))
    path = write(tmp_path, started(0, 1), *middle, finished(0, 1, verdict="failed"))
    monkeypatch.setattr(overview, "MAX_FILE", 10_000)
    monkeypatch.setattr(overview, "EDGE", 5_000)
    asked: list[bytes] = []
    true_events = overview._Edges._events
    monkeypatch.setattr(overview._Edges, "_events", lambda self, line: asked.append(line) or true_events(self, line))
    assert overviews(path) == (Overview(Run(RUN, 100.0, 101.0, 1), whole=False),)
    assert 2 < len(asked) < 20
    assert len(set(asked)) >= 3


@pytest.mark.parametrize("edge", [10, 1_000, 3_000, 100_000])
def test_no_line_is_read_twice_or_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: int) -> None:
    path = write(tmp_path, *(entered(0, f"phase-{number}") for number in range(5)))
    monkeypatch.setattr(overview, "EDGE", edge)
    reading = overview._Edges((path,), None)
    phases = [event.phase for sourced in reading for event in sourced.events]
    assert phases == sorted(set(phases))
    assert phases[0] == "phase-0"
    assert reading.damaged == 0
    assert edge != 100_000 or len(phases) == 5


def test_the_newest_files_are_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(tmp_path / name for name in "abc")
    for age, path in enumerate(files):
        path.write_bytes(b"x" * 10)
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(overview, "MAX_ALL", 25)
    assert overview._read_whole((*files, tmp_path / "gone")) == frozenset(files[:2])
