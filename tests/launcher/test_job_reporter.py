from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_sentry.collector import records
from ckpt_sentry.collector.aggregate import Aggregate, Aggregator
from ckpt_sentry.core.report import Identity, LoadError
from ckpt_sentry.launcher import job_reporter
from ckpt_sentry.launcher.job_reporter import ANSWER_SECONDS, NO_STACK, PARTIAL_SECONDS, QUIET_SECONDS, JobReporter
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import Event, RankEnded
from tests.collector.jobs import (
    LOAD,
    entered,
    exited,
    failing,
    finished,
    killed,
    over,
    stalled,
    started,
    stopped,
    told,
    who,
)

ERROR = LoadError("OSError", "[Errno 5] Input/output error", "read")


class Clock:
    """
    Stands for the module `time`: it goes on when it is told.
    """

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Stage:
    """
    A speaker, its clock, and what it has said.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.clock = Clock()
        self.reports: list[Aggregate] = []
        self.lines: list[str] = []
        self.folder = folder
        monkeypatch.setattr(job_reporter, "time", self.clock)
        monkeypatch.setattr(job_reporter, "print_report", lambda report, _records: self.reports.append(report))
        monkeypatch.setattr(job_reporter, "print_line", self.lines.append)
        self.reporter = self.made(2)

    def made(self, local_ranks: int | None, source: str | None = "here") -> JobReporter:
        place = records.Place(self.folder, private=False)
        kept = records.Records(place, run_id="run7", node="node0", pid=1)
        self.reporter = JobReporter(kept, local_ranks, source)
        return self.reporter

    def on_event(self, *events: Event) -> None:
        for event in events:
            assert self.reporter.receive(otlp_json.encode((event,))) == 0

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.reporter.tick()

    @property
    def verdicts(self) -> list[str]:
        return [one.verdict for one in self.reports]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


def test_a_good_load_is_said_at_once_and_forgotten(stage: Stage) -> None:
    stage.on_event(started(0, 2), started(1, 2), finished(0, 2))
    assert stage.reports == []
    stage.on_event(finished(1, 2))
    assert stage.verdicts == ["ok"]
    assert (stage.reporter._watches, stage.reporter._aggregator.loads()) == ({}, ())
    stage.on_event(entered(1, "restore", 2), finished(1, 2))
    assert stage.reporter._aggregator.loads() == ()
    stage.reporter.settle()
    assert stage.verdicts == ["ok"]


def test_what_comes_late_or_twice_says_a_load_no_second_time(stage: Stage) -> None:
    part = [finished(rank, 2, verdict="partial") for rank in (0, 1)]
    stage.on_event(started(0, 2), started(1, 2), *part)
    assert stage.verdicts == ["partial"]
    stage.on_event(entered(1, "restore", 2), part[1], started(0, 2))
    stage.after(QUIET_SECONDS + 1)
    stage.reporter.settle()
    assert stage.verdicts == ["partial"]


def test_a_load_that_cannot_be_said_keeps_no_other_from_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SENTRY_GUARD", "swallow")
    stage.on_event(started(0, 2), started(0, 2, load="b" * 32), killed(0, "SIGKILL", 2))
    whole = stage.reporter._aggregator.aggregate

    def aggregate(load_id: str, **words: Any) -> Aggregate | None:
        if load_id == LOAD:
            raise ValueError("ours")
        return whole(load_id, **words)

    monkeypatch.setattr(stage.reporter._aggregator, "aggregate", aggregate)
    stage.reporter.settle()
    assert [one.load_id for one in stage.reports] == ["b" * 32]


def test_a_run_that_begins_anew_is_heard_and_what_was_left_of_the_last_one_is_said(stage: Stage) -> None:
    stage.on_event(started(0, 2), finished(1, 2, verdict="failed", error=ERROR), over(ok=False))
    assert stage.reports == []
    stage.on_event(started(0, 2, at=200.0), started(1, 2, at=200.0))
    assert stage.verdicts == ["failed"]
    stage.on_event(finished(0, 2, started_at=200.0, ended_at=201.0), finished(1, 2, started_at=200.0, ended_at=201.0))
    assert stage.verdicts == ["failed", "ok"]


def test_loads_that_had_to_be_forgotten_keep_no_other_from_being_said(stage: Stage) -> None:
    stage.reporter._aggregator = Aggregator(max_loads=1)
    stage.on_event(failing(1, ERROR, 2), started(0, 2, load="b" * 32))
    stage.after(QUIET_SECONDS + 1)
    stage.reporter.assign_cause("SIGKILL")
    stage.reporter.settle()
    assert [one.load_id for one in stage.reports] == ["b" * 32]


def test_ranks_are_expected_from_0_on_whatever_a_worker_says_of_itself(stage: Stage) -> None:
    stage.on_event(replace(finished(0, 2), identity=replace(who(0, 2), local_rank=5)))
    stage.reporter.settle()
    assert [one.ranks_reported for one in stage.reports] == ["0"]


def test_a_failed_load_waits_for_the_end_of_the_job(stage: Stage) -> None:
    stage.on_event(started(0, 2), started(1, 2), failing(1, ERROR, 2), told(0, 2))
    stage.on_event(finished(1, 2, verdict="failed", error=ERROR))
    stage.after(QUIET_SECONDS - 1)
    assert stage.reports == []
    stage.on_event(over(ok=False))
    stage.after(0.5)
    assert stage.verdicts == ["failed"]


def test_a_failed_load_of_a_job_that_goes_on_is_said_after_some_silence(stage: Stage) -> None:
    stage.on_event(started(0, 2), told(0, 2), finished(1, 2, verdict="failed", error=ERROR))
    stage.after(QUIET_SECONDS + 1)
    assert stage.verdicts == ["failed"]


def test_a_failed_attempt_is_said_when_the_next_begins(stage: Stage) -> None:
    stage.on_event(started(0, 2), killed(0, "SIGKILL", 2), stopped(1, 2))
    stage.on_event(started(0, 2, load="b" * 32, attempt=1))
    stage.after(0.5)
    assert [(one.verdict, one.attempt) for one in stage.reports] == [("failed", 0)]


def test_an_attempt_that_ends_before_any_load_is_said_after_the_report_of_the_one_before(stage: Stage) -> None:
    stage.on_event(started(0, 2), killed(0, "SIGKILL", 2), stopped(1, 2))
    stage.reporter.on_event(RankEnded(identity=who(1, 2, attempt=1), at=120.0, how="exited", exit_code=1))
    stage.on_event(over(ok=False))
    stage.reporter.settle()
    assert stage.verdicts == ["failed"]
    assert stage.lines == ["rank 1 exited with code 1; no load was seen in attempt 2"]


def test_a_load_of_some_ranks_is_said_after_some_silence(stage: Stage) -> None:
    stage.on_event(started(0, 2), finished(0, 2))
    stage.after(PARTIAL_SECONDS - 1)
    assert stage.reports == []
    stage.after(2)
    assert [one.ranks_reported for one in stage.reports] == ["0"]


def test_a_collector_says_that_all_is_well_whichever_node_is_the_last(stage: Stage) -> None:
    stage.made(None, source=None)
    stage.on_event(*(replace(started(rank, 2), identity=who(rank, 2, node=f"node{rank}", local=0)) for rank in (0, 1)))
    for rank in (0, 1):
        me = who(rank, 2, node=f"node{rank}", local=0)
        stage.on_event(finished(rank, 2, identity=me))
    assert [(one.verdict, one.ranks_reported) for one in stage.reports] == [("ok", "0-1")]


def test_of_several_nodes_the_first_says_that_all_is_well(stage: Stage) -> None:
    second = replace(finished(1, 2), identity=who(1, 2, local=0))
    stage.made(1)
    stage.on_event(second)
    assert stage.reports == []


def test_a_load_that_lasts_too_long_is_asked_about_once_and_reported_while_it_hangs(stage: Stage) -> None:
    stage.on_event(started(0, 2, at=900.0), entered(0, "plan", 2, at=901.0))
    assert stage.reporter.overdue(5.0) == {}
    stage.clock.now += 6
    assert stage.reporter.overdue(5.0) == {LOAD: 900.0}
    assert stage.reporter.overdue(5.0) == {}
    stage.on_event(stalled(0, "plan", "in gather"), stalled(1, None, "in sleep_late"))
    stage.after(ANSWER_SECONDS - 1)
    assert stage.reports == []
    stage.after(2)
    assert stage.verdicts == ["stalled"]
    stage.after(100)
    assert stage.verdicts == ["stalled"]
    stage.on_event(finished(0, 2), finished(1, 2))
    assert stage.verdicts == ["stalled", "ok"]


def test_a_rank_that_does_not_answer_is_reported_by_its_last_phase(stage: Stage) -> None:
    other = replace(finished(1, 2), identity=replace(who(1, 2), pid=10))
    stage.on_event(started(0, 2), entered(0, "read", 2), other)
    stage.clock.now += 6
    stage.reporter.overdue(5.0)
    stage.after(ANSWER_SECONDS + 1)
    (one,) = stage.reports
    (found,) = (found for found in one.findings if found.code == "rank_stalled")
    assert found.text.splitlines()[0].startswith("rank 0 waits while reading")
    assert found.text.splitlines()[1] == NO_STACK


def test_a_stall_that_a_launcher_passes_on_is_reported_by_the_collector(stage: Stage) -> None:
    stage.made(None, source=None)
    stage.on_event(started(0, 2), stalled(0, "plan", "in gather"))
    stage.after(ANSWER_SECONDS + 1)
    assert stage.verdicts == ["stalled"]


def test_an_end_that_no_load_explains_is_one_line(stage: Stage) -> None:
    stage.on_event(finished(0, 2), finished(1, 2))
    stage.reporter.on_event(killed(1, "SIGKILL", 2))
    stage.reporter.on_event(stopped(0, 2))
    stage.reporter.on_event(over(ok=False))
    stage.reporter.settle()
    assert stage.verdicts == ["ok"]
    assert stage.lines == ["rank 1 was killed by SIGKILL after its last load (dcp.load) had ended"]


def test_an_end_before_any_load_is_one_line(stage: Stage) -> None:
    stage.reporter.on_event(exited(1, 3))
    stage.reporter.settle()
    assert stage.lines == ["rank 1 exited with code 3; no load was seen before that"]


def test_an_end_that_a_load_explains_is_not_repeated(stage: Stage) -> None:
    stage.on_event(started(0, 2), started(1, 2))
    stage.reporter.on_event(killed(1, "SIGKILL", 2))
    stage.reporter.on_event(over(ok=False))
    stage.reporter.settle()
    assert (stage.verdicts, stage.lines) == (["failed"], [])


def test_a_job_that_ends_well_says_nothing_more(stage: Stage) -> None:
    stage.on_event(finished(0, 2), finished(1, 2))
    for rank in (0, 1):
        stage.reporter.on_event(exited(rank, 0))
    stage.reporter.settle()
    assert stage.lines == []


def test_a_rank_that_is_only_known_by_its_pid_is_found_and_recorded(stage: Stage) -> None:
    stage.on_event(replace(started(1, 2), identity=replace(who(1, 2), pid=4242)))
    unknown = Identity(run_id="", rank=0, node="node0", pid=4242)
    stage.reporter.on_event(RankEnded(identity=unknown, at=103.0, how="killed", signal="SIGSEGV"))
    stage.reporter.on_event(RankEnded(identity=replace(unknown, pid=1), at=103.0, how="killed", signal="SIGABRT"))
    stage.reporter.settle()
    assert [(one.error.type, one.error.first_rank) for one in stage.reports if one.error] == [("SIGSEGV", 1)]
    kept = [event for sourced in records.read(stage.folder) for event in sourced.events]
    assert [event.identity.rank for event in kept if isinstance(event, RankEnded)] == [1]


def test_the_first_that_is_gone_from_a_load_is_the_one_that_was_killed(stage: Stage) -> None:
    stage.made(None)
    ranks = [replace(who(rank, 3), pid=rank) for rank in range(3)]
    stage.on_event(*(replace(started(rank, 3), identity=ranks[rank]) for rank in range(3)))
    stage.on_event(replace(finished(0, 3), identity=ranks[0]))
    for rank in (0, 2, 1):
        stage.reporter.on_disconnect(ranks[rank])
    stage.reporter.assign_cause("SIGKILL")
    stage.reporter.on_event(over(ok=False))
    stage.reporter.settle()
    (one,) = stage.reports
    assert one.error is not None
    assert (one.error.type, one.error.first_rank) == ("SIGKILL", 2)
    assert [row.why for row in one.unfinished] == ["stopped by the launcher", "killed by SIGKILL"]


def test_a_run_that_has_the_name_of_one_that_has_ended_is_said_as_well(stage: Stage) -> None:
    for at in (100.0, 500.0):
        first = started(0, 1, at=at)
        stage.made(1) if at == 100.0 else None
        stage.on_event(first, finished(0, 1, started_at=at, ended_at=at + 1))
        stage.reporter.on_event(over(ok=True))
    assert stage.verdicts == ["ok", "ok"]
