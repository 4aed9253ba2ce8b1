"""
Good loads that repeat cost a line only now and then; nothing else is ever taken back.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_sentry.collector import records, repeats
from ckpt_sentry.collector.records import Place, Records
from ckpt_sentry.collector.repeats import KEPT, Repeats
from ckpt_sentry.core.report import Finding, LoadError
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import LoadFinished, LoadsLeftOut, LoadStarted
from tests.collector.jobs import entered, failing, finished, started

if TYPE_CHECKING:
    import pytest

    from ckpt_sentry.transport.events import Event

MANY = 500


def keeper(folder: Path, *, is_alone: bool = True) -> Repeats:
    return Repeats(Records(Place(folder, private=False), run_id="run7", node="n", pid=1), is_alone=is_alone)


def load(number: int, rank: int = 0, world: int = 1, **fields: object) -> list[Event]:
    name = f"{number:032x}"
    end = finished(rank, world, **fields)
    return [
        started(rank, world, load=name),
        replace(entered(rank, "plan", world), load_id=name),
        replace(end, report=replace(end.report, load_id=name)),
    ]


def keep(kept: Repeats, events: list[Event]) -> None:
    for event in events:
        assert kept.add((event,), otlp_json.encode((event,)))


def events_in(folder: Path) -> list[Event]:
    reading = records.Reading(records.record_files(folder), None)
    found = [event for sourced in reading for event in sourced.events]
    assert (reading.damaged, reading.refused) == (0, 0)
    return found


def counted(folder: Path) -> tuple[int, int]:
    found = events_in(folder)
    whole = sum(isinstance(event, LoadFinished) for event in found)
    return whole, max((event.count for event in found if isinstance(event, LoadsLeftOut)), default=0)


def test_the_first_and_the_newest_stay_and_the_others_are_counted(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    for number in range(MANY):
        keep(kept, load(number))
        whole, left_out = counted(tmp_path) if number % 50 == 0 else (0, 0)
        assert whole + left_out in (0, number + 1)
    assert counted(tmp_path) == (KEPT + 1, MANY - KEPT - 1)
    assert events_in(tmp_path)[-3:] == load(MANY - 1)
    (run,) = records.runs(tmp_path)
    assert run.loads == MANY


def test_what_is_not_well_stays_and_so_does_what_lies_before_it(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    bad = [
        load(1_000, verdict="partial"),
        load(1_001, findings=(Finding("stale", "warning", "old"),)),
        [*load(1_002)[:2], replace(failing(0, LoadError("E", "no", "read"), 1), load_id=f"{1_002:032x}")],
    ]
    for number in range(100):
        keep(kept, load(number))
        if number in (40, 60, 80):
            keep(kept, bad.pop(0))
    whole, left_out = counted(tmp_path)
    assert whole + left_out == 102
    assert left_out >= 100 - KEPT - 4
    assert {event.load_id for event in events_in(tmp_path) if isinstance(event, LoadStarted)} >= {
        f"{number:032x}" for number in (1_000, 1_001, 1_002)
    }


def test_a_load_that_has_only_begun_is_there(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    for number in range(MANY):
        keep(kept, load(number))
    keep(kept, load(MANY)[:2])
    assert events_in(tmp_path)[-2:] == load(MANY)[:2]
    keep(kept, load(MANY + 1))
    keep(kept, load(MANY)[2:])
    whole, left_out = counted(tmp_path)
    assert whole + left_out == MANY + 2


def test_a_launcher_waits_for_all_of_its_ranks(tmp_path: Path) -> None:
    kept = keeper(tmp_path, is_alone=False)
    for number in range(100):
        ranks = [load(number, rank, 4) for rank in range(4)]
        keep(kept, [event for step in zip(*ranks, strict=True) for event in step])
    found = [event for event in events_in(tmp_path) if isinstance(event, LoadFinished)]
    assert len({event.report.load_id for event in found}) == KEPT + 1
    assert len(found) == 4 * (KEPT + 1)
    assert counted(tmp_path)[1] == 100 - KEPT - 1


def test_what_another_has_written_since_is_left_alone(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    for number in range(50):
        keep(kept, load(number))
    (path,) = records.record_files(tmp_path)
    with path.open("ab") as file:
        file.write(b"{}\n")
    for number in range(50, 100):
        keep(kept, load(number))
    whole, left_out = counted(tmp_path)
    assert b"\n{}\n" in path.read_bytes()
    assert whole + left_out == 100


def test_what_may_be_taken_back_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_TAIL", 10_000)
    kept = keeper(tmp_path)
    for number in range(30):
        keep(kept, load(number))
    keep(kept, [started(0, 1, load="f" * 32)] * 40)
    assert sum(len(line) for _, line in kept._tail) <= 10_000
    assert sum(counted(tmp_path)) == 30
