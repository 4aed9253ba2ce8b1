from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.collector.aggregate import Aggregate, Aggregator, JobError, Spread, Unfinished
from ckpt_sentry.collector.summary import DOING, doing
from ckpt_sentry.core import codes as catalogue
from ckpt_sentry.core.peers import lost_finding
from ckpt_sentry.core.report import Coverage, Finding, KeyList, LoadError, ModelSummary, Phase, PhaseName, ShapeMismatch
from ckpt_sentry.transport.events import RankEnded
from tests.collector.jobs import (
    LOAD,
    LOST,
    PEER,
    entered,
    exited,
    failing,
    finished,
    killed,
    over,
    raised,
    seen,
    stalled,
    started,
    stopped,
    told,
    who,
)

SIZE = LoadError("ValueError", "Size mismatch for model.head.weight", "plan")
WRONG_SHAPE = Finding("shape_mismatch", "error", "1 key with another shape in the checkpoint")
HEAD = ShapeMismatch("model.head.weight", 1, "model.head", (32, 8), (16, 8))


def codes(one: Aggregate) -> dict[str, str]:
    return {found.code: found.ranks for found in one.findings}


def text_of(one: Aggregate, code: str) -> str:
    (found,) = (found for found in one.findings if found.code == code)
    return found.text


def test_good_load_of_four_ranks_is_one_group() -> None:
    phases = (Phase("plan", 0.5), Phase("read", 1.5))
    one = seen(*(finished(rank, bytes_read=10, phases=phases) for rank in range(4)))
    assert (one.verdict, one.error, one.findings, one.unfinished) == ("ok", None, (), ())
    assert [(group.ranks, group.count) for group in one.groups] == [("0-3", 4)]
    assert one.ranks_reported == "0-3"
    assert one.bytes_read == 40
    assert one.seconds is not None
    assert one.seconds.total == Spread(1.0, 2.5, 4.0, 3)
    assert one.seconds.phases == (("plan", Spread(0.5, 0.5, 0.5, 0)), ("read", Spread(1.5, 1.5, 1.5, 0)))


def test_one_rank_with_other_shapes_is_named_first_and_leads_the_counts() -> None:
    own = finished(
        1, verdict="failed", error=SIZE, findings=(WRONG_SHAPE,), mismatched=(HEAD,), coverage=Coverage(0.9, 0.8)
    )
    one = seen(failing(1, SIZE), told(0), own, told(2), told(3))
    assert one.error == JobError("ValueError", SIZE.message, "plan", 1, "arrival")
    assert one.mismatched.count == 1
    assert one.coverage == Coverage(0.9, 0.8)
    assert codes(one) == {"shape_mismatch": "1", "peer_failed": "0,2-3"}
    assert one.findings[0].next == "Rank 1 builds another model than ranks 0,2-3: compare its configuration."
    assert [group.ranks for group in one.groups] == ["0,2-3", "1"]
    assert one.failed_ranks == "0-3"


def test_addresses_and_own_rank_do_not_split_a_group() -> None:
    texts = [f"rank {rank}: peer [10.0.0.{rank}]:{4000 + rank} closed, object at 0x7f{rank:04x}" for rank in range(4)]
    one = seen(*(finished(r, verdict="failed", error=LoadError("RuntimeError", texts[r])) for r in range(4)))
    assert [group.ranks for group in one.groups] == ["0-3"]


def test_another_ranks_number_does_split_a_group() -> None:
    errors = [LoadError("OSError", f"shard of rank {rank} is gone") for rank in (8, 9)]
    one = seen(*(finished(r, verdict="failed", error=error) for r, error in enumerate(errors)))
    assert [group.ranks for group in one.groups] == ["0", "1"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0)])
def test_a_fact_about_one_of_the_ranks_is_one_finding(order: tuple[int, ...]) -> None:
    gone = Finding("shard_missing", "error", "__1_0.distcp is missing, written by rank 1", "copy it again")
    error = LoadError("FileNotFoundError", "no shard of rank 1")
    one = seen(*(finished(rank, verdict="failed", error=error, findings=(gone,)) for rank in order))
    assert [(found.code, found.ranks, found.text) for found in one.findings] == [("shard_missing", "0-3", gone.text)]
    assert [(group.ranks, group.count, group.report.identity.rank) for group in one.groups] == [("0-3", 4, 0)]


def test_a_fact_about_a_rank_is_one_finding_where_the_reports_differ_otherwise() -> None:
    gone = Finding("shard_missing", "error", "__1_0.distcp is missing, written by rank 1")
    coverage = {rank: Coverage(0.5 + rank / 10, 0.5) for rank in range(3)}
    one = seen(*(finished(r, 3, verdict="failed", findings=(gone,), coverage=coverage[r]) for r in range(3)))
    assert codes(one) == {"shard_missing": "0-2"}
    assert [group.ranks for group in one.groups] == ["0", "1", "2"]


def test_an_unexplained_error_about_a_rank_is_one_finding() -> None:
    error = LoadError("OSError", "cannot read the shard of rank 1", "read")
    one = seen(*(failing(rank, error, 3) for rank in range(3)))
    assert [(found.code, found.ranks) for found in one.findings if found.code == "rank_raised"] == [
        ("rank_raised", "0-2")
    ]


def test_ranks_that_name_themselves_and_what_others_say_of_one_of_them_stay_apart() -> None:
    lost = [Finding("storage_error", "error", f"rank {named} lost its disk") for named in (1, 1, 2)]
    one = seen(*(finished(rank, 3, verdict="failed", findings=(lost[rank],)) for rank in range(3)))
    assert all("rank 1" in found.text for found in one.findings if found.ranks == "0")
    assert not [found for found in one.findings if found.code == "storage_error" and found.ranks == "0-2"]


def test_what_is_said_of_the_checkpoint_is_of_the_path_that_is_named() -> None:
    missing = Finding("path_missing", "error", "/data/other does not exist")
    wrong = {"path": "/data/other", "format": None, "step": None, "step_source": None}
    error = LoadError("FileNotFoundError", "gone", "plan")
    own = finished(1, 2, verdict="failed", error=error, findings=(missing,), **wrong)
    one = seen(failing(1, error, 2), told(0, 2), own)
    assert (one.path, one.format, one.step, one.step_source) == ("/data/other", None, None, None)


def test_ranks_that_load_the_same_path_complete_each_other() -> None:
    error = LoadError("OSError", "gone", "setup")
    one = seen(finished(0, 2, verdict="failed", error=error, format=None, step=None, step_source=None), told(1, 2))
    assert (one.path, one.format, one.step) == ("/data/run7/step-1200", "DCP", 1200)


def test_first_is_by_arrival_through_one_receiver_whatever_the_clocks_say() -> None:
    one = seen(failing(2, SIZE, at=200.0), failing(0, SIZE, at=100.0))
    assert one.error is not None
    assert (one.error.first_rank, one.error.order_by) == (2, "arrival")


def test_first_is_by_clock_across_sources() -> None:
    aggregator = Aggregator()
    aggregator.add(failing(2, SIZE, at=200.0), source="a")
    aggregator.add(failing(0, SIZE, at=100.0), source="b")
    (one,) = aggregator.loads()
    assert one.error is not None
    assert (one.error.first_rank, one.error.order_by) == (0, "clock")


def test_first_is_by_clock_across_machines_though_they_came_through_one_collector() -> None:
    late, early = failing(2, SIZE, at=200.0), failing(0, SIZE, at=100.0)
    one = seen(late, replace(early, identity=replace(early.identity, node="elsewhere")))
    assert one.error is not None
    assert (one.error.first_rank, one.error.order_by) == (0, "clock")


def test_an_order_that_is_given_is_kept() -> None:
    aggregator = Aggregator("clock")
    aggregator.add(failing(2, SIZE, at=200.0), source="a")
    aggregator.add(failing(0, SIZE, at=100.0), source="a")
    (one,) = aggregator.loads()
    assert one.error is not None
    assert (one.error.first_rank, one.error.order_by) == (0, "clock")


def test_an_unexplained_error_becomes_a_finding() -> None:
    error = LoadError("OSError", "[Errno 5] Input/output error", "read")
    one = seen(failing(1, error), told(0), told(2), told(3))
    assert codes(one) == {"rank_raised": "1", "peer_failed": "0,2-3"}
    assert text_of(one, "rank_raised") == "OSError: [Errno 5] Input/output error"
    assert one.unfinished == (Unfinished("1", "setup", "raised, and no report followed"),)


def test_killed_rank_comes_before_the_errors_that_its_death_caused() -> None:
    begin = [event for rank in range(4) for event in (started(rank), entered(rank, "plan"))]
    one = seen(*begin, failing(0, LOST), told(0), told(2), killed(1, "SIGKILL"), stopped(3), over(ok=False))
    assert one.verdict == "failed"
    assert one.error == JobError("SIGKILL", "killed by SIGKILL", "plan", 1, "arrival")
    assert text_of(one, "rank_killed") == "rank 1 was killed by SIGKILL while planning"
    assert one.unfinished == (
        Unfinished("1", "plan", "killed by SIGKILL"),
        Unfinished("3", "plan", "stopped by the launcher"),
    )
    others = [found for found in one.findings if found.text.startswith("rank 3")]
    assert [(found.code, found.level) for found in others] == [("peer_failed", "info")]


def test_a_sigterm_of_somebody_else_is_a_cause_and_that_of_the_launcher_is_none() -> None:
    begin = [started(rank) for rank in range(4)]
    one = seen(*begin, stopped(0), stopped(1), killed(2, "SIGTERM"), stopped(3))
    assert one.error is not None
    assert one.error.first_rank == 2
    assert codes(one) == {"rank_killed": "2", "peer_failed": "0-1,3"}


def test_a_rank_that_only_lost_another_is_not_first_though_it_ended_first() -> None:
    one = seen(started(0), started(3), raised(2, LOST), killed(1, "SIGKILL"), stopped(0), stopped(3))
    assert one.error is not None
    assert (one.error.type, one.error.first_rank) == ("SIGKILL", 1)


def test_a_way_that_becomes_known_later_takes_the_place_of_the_order() -> None:
    vanished = RankEnded(identity=who(2), at=102.0, how="exited")
    one = seen(started(0), started(2), vanished, killed(0, "SIGKILL"), killed(2, "SIGSEGV"))
    assert one.error is not None
    assert (one.error.type, one.error.first_rank) == ("SIGSEGV", 2)


def test_rank_that_raised_before_the_load_is_absent_and_first() -> None:
    error = LoadError("ValueError", "user bug on rank 1 before load")
    begin = [started(rank) for rank in (0, 2, 3)]
    one = seen(*begin, told(0), told(2), told(3), raised(1, error), exited(0, 1), over(ok=False))
    assert one.error == JobError("ValueError", error.message, None, 1, "arrival")
    assert codes(one)["rank_absent"] == "1"
    assert text_of(one, "rank_absent") == (
        "rank 1 never came to this load: raised ValueError: user bug on rank 1 before load"
    )
    assert one.unfinished == (Unfinished("1", None, "raised ValueError: user bug on rank 1 before load"),)


def test_ranks_that_are_no_members_of_a_load_are_not_missed() -> None:
    begin = replace(started(0), members="0-1")
    waits = stalled(0, "plan", 'File "c10d.py", in gather')
    one = seen(
        begin, waits, stalled(1, None, 'File "train.py", in late'), stalled(2, None, 'File "train.py", in other')
    )
    assert (one.verdict, codes(one)["rank_absent"]) == ("stalled", "1")
    alone = seen(replace(started(2), members="2"), finished(2), exited(0, 0), exited(1, 0), exited(3, 0), over(ok=True))
    assert (alone.verdict, alone.findings, alone.ranks_reported, alone.heard_ranks) == ("ok", (), "2", 1)


def test_members_that_are_no_ranks_are_all() -> None:
    one = seen(replace(started(0), members="everyone"), finished(0), exited(1, 1), over(ok=False))
    assert one.world_size == 4


def test_rank_killed_before_the_load_is_killed_and_absent() -> None:
    one = seen(started(0), told(0), killed(1, "SIGKILL"), over(ok=False))
    assert one.error is not None
    assert (one.error.type, one.error.first_rank, one.error.phase) == ("SIGKILL", 1, None)
    assert codes(one) == {"rank_killed": "1", "rank_absent": "1", "peer_failed": "0"}
    assert text_of(one, "rank_killed") == "rank 1 was killed by SIGKILL before it came to this load"


def test_stall_names_who_waits_and_who_never_came_with_a_stack_for_each_group() -> None:
    begin = [event for rank in (0, 2, 3) for event in (started(rank), entered(rank, "plan"))]
    waits = [stalled(rank, "plan", 'File "c10d.py", in gather') for rank in (0, 2, 3)]
    one = seen(*begin, *waits, stalled(1, None, 'File "train.py", in sleep_late'))
    assert one.verdict == "stalled"
    assert text_of(one, "rank_absent") == (
        'rank 1 has not come to this load; its stack:\nFile "train.py", in sleep_late'
    )
    assert text_of(one, "rank_stalled") == (
        'ranks 0,2-3 wait while planning for 5 s; the stack of each:\nFile "c10d.py", in gather'
    )
    assert one.unfinished == (Unfinished("0,2-3", "plan", "still waiting"), Unfinished("1", None, "still waiting"))


def test_a_stall_that_ends_well_is_information() -> None:
    phases = (Phase("plan", 14.2),)
    ends = (finished(rank, phases=phases) for rank in range(4))
    one = seen(*(started(rank) for rank in range(4)), stalled(0, "plan", "x"), *ends)
    assert one.verdict == "ok"
    assert [(found.code, found.level, found.ranks, found.text) for found in one.findings] == [
        ("rank_stalled", "info", "0", "Stalled for 14 s: rank 0 waited while planning")
    ]


def test_the_ranks_that_were_heard_are_counted() -> None:
    aggregator = Aggregator()
    aggregator.add(finished(1, 4))
    alone = aggregator.aggregate(LOAD, expected=(1,))
    node = aggregator.aggregate(LOAD, expected=range(2))
    assert alone is not None
    assert node is not None
    assert (alone.heard_ranks, node.heard_ranks) == (1, 2)
    assert seen(finished(1, 4)).heard_ranks == 4


def test_absent_rank_keeps_its_stack_when_the_others_have_timed_out() -> None:
    begin = [started(rank) for rank in (0, 2, 3)]
    ends = [exited(0, 1), exited(2, 1), exited(3, 1), stopped(1), over(ok=False)]
    one = seen(*begin, stalled(1, None, "in early_exit_sleep"), told(0), told(2), told(3), *ends)
    assert one.verdict == "failed"
    assert text_of(one, "rank_absent") == "rank 1 never came to this load; its stack:\nin early_exit_sleep"
    assert codes(one)["rank_absent"] == "1"


def test_run_that_ends_makes_the_state_final() -> None:
    before = seen(started(0, 2), started(1, 2), finished(0, 2))
    assert (before.verdict, before.unfinished) == ("ok", (Unfinished("1", "setup", "under way"),))
    after = seen(started(0, 2), started(1, 2), finished(0, 2), over(ok=True))
    assert after.verdict == "failed"
    assert codes(after) == {"rank_exited": "1"}


def test_settled_without_a_word_is_stalled() -> None:
    one = seen(started(0, 3), started(1, 3), finished(0, 3), settled=True)
    assert (one.verdict, codes(one)) == ("stalled", {"rank_stalled": "1", "rank_absent": "2"})
    assert text_of(one, "rank_stalled") == "rank 1 was last heard of while setting up"
    assert [row.why for row in one.unfinished] == ["nothing more was heard"] * 2


def test_an_end_after_a_good_load_is_named_and_is_not_the_loads_affair() -> None:
    one = seen(*(finished(rank) for rank in range(4)), killed(2, "SIGKILL"), stopped(0), over(ok=False))
    assert (one.verdict, one.error) == ("ok", None)
    assert [(found.code, found.level, found.text) for found in one.findings] == [
        ("rank_killed", "info", "rank 2 was killed by SIGKILL after this load had ended there")
    ]


def test_only_the_last_load_of_an_attempt_tells_how_ranks_ended() -> None:
    aggregator = Aggregator()
    for event in (finished(0), finished(0, load_id="b" * 32, started_at=200.0, ended_at=201.0), killed(0, "SIGKILL")):
        aggregator.add(event)
    first, second = aggregator.loads()
    assert (codes(first), codes(second)) == ({}, {"rank_killed": "0"})
    end = aggregator.first_end("run7-a1b2")
    assert end is not None
    assert end.signal == "SIGKILL"


def test_load_of_one_rank_alone_misses_nobody() -> None:
    one = seen(started(0), finished(0), exited(3, 1), over(ok=False))
    assert (one.verdict, one.findings, one.unfinished) == ("ok", (), ())


def test_ranks_of_a_node_that_was_never_heard_are_not_called_absent() -> None:
    mine = replace(who(0, 4), local_world_size=2)
    one = seen(replace(told(0), identity=mine), over(ok=False))
    assert codes(one) == {"rank_absent": "1", "peer_failed": "0"}


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (("ok", "partial"), "partial"),
        (("partial", "no_op"), "no_op"),
        (("wrong_values", "no_op"), "wrong_values"),
        (("wrong_values", "failed", "ok"), "failed"),
    ],
)
def test_verdict_is_the_worst(verdicts: tuple[str, ...], worst: str) -> None:
    one = seen(*(finished(rank, verdict=verdict) for rank, verdict in enumerate(verdicts)))
    assert one.verdict == worst


def test_different_paths_and_steps_are_divergence() -> None:
    other = {"path": "/data/run7/step-100", "step": 100}
    one = seen(finished(0, **other), *(finished(rank) for rank in (1, 2, 3)))
    assert one.verdict == "diverged"
    assert text_of(one, "paths_differ") == (
        "ranks load different paths: /data/run7/step-100 (rank 0), /data/run7/step-1200 (ranks 1-3)"
    )
    assert text_of(one, "steps_differ") == "ranks load different steps: step 100 (rank 0), step 1200 (ranks 1-3)"


def test_files_of_their_own_are_no_divergence_for_plain_torch_loads() -> None:
    one = seen(*(finished(rank, framework="torch", path=f"/c/rank{rank}.pt") for rank in range(4)))
    assert (one.verdict, one.findings) == ("ok", ())


def test_different_keys_are_information() -> None:
    few = {"key_digest": "b/b", "model": ModelSummary(4, 4, 16)}
    many = {"key_digest": "a/a", "model": ModelSummary(8, 8, 32)}
    one = seen(*(finished(rank, **(few if rank == 1 else many)) for rank in range(4)))
    assert one.verdict == "ok"
    assert [(found.code, found.level, found.ranks) for found in one.findings] == [("key_sets_differ", "info", "1")]
    assert one.findings[0].text == (
        "ranks ask for different keys, as pipeline stages do: ranks 0,2-3 for 8, rank 1 for 4"
    )
    assert len(one.groups) == 2


def test_attempts_are_loads_of_their_own() -> None:
    aggregator = Aggregator()
    aggregator.add(started(0, 1))
    aggregator.add(started(0, 1, load="b" * 32, attempt=1, at=200.0))
    aggregator.add(finished(0, 1, attempt=1, load_id="b" * 32, started_at=200.0, ended_at=201.0))
    first, second = aggregator.loads()
    assert (first.attempt, first.verdict, [row.why for row in first.unfinished]) == (
        0,
        "failed",
        ["its process ended without a word"],
    )
    assert (second.attempt, second.verdict) == (1, "ok")


def test_a_name_that_is_used_again_is_another_run() -> None:
    aggregator = Aggregator()
    first = [started(0, 1), killed(0, "SIGKILL", 1), over(ok=False)]
    for event in (*first, started(0, 1, at=500.0), finished(0, 1, started_at=500.0, ended_at=501.0)):
        aggregator.add(event)
    old, new = aggregator.loads()
    assert (old.verdict, new.verdict, new.findings) == ("failed", "ok", ())


def test_an_event_of_a_run_that_has_ended_which_comes_late_begins_nothing() -> None:
    aggregator = Aggregator()
    for event in (started(0, 1), finished(0, 1), over(ok=True), started(0, 1)):
        aggregator.add(event)
    (one,) = aggregator.loads()
    assert one.verdict == "ok"


def test_rank_stopped_amid_a_load_makes_it_a_failed_one() -> None:
    one = seen(finished(0, 2), started(1, 2), stopped(1, 2), over(ok=False))
    assert (one.verdict, one.error) == ("failed", None)


def test_ranks_of_a_node_whose_launcher_fell_silent_are_not_said_to_have_ended() -> None:
    there = replace(started(1, 2), identity=who(1, 2, node="node1", local=0))
    one = seen(started(0, 2), there, stopped(0, 2), over(ok=False), settled=True)
    assert [row.why for row in one.unfinished] == ["stopped by the launcher", "nothing more was heard"]


def test_progress_and_complete() -> None:
    aggregator = Aggregator()
    assert not aggregator.complete(LOAD)
    for event in (started(0), started(1), finished(0), failing(1, SIZE)):
        aggregator.add(event)
    progress = aggregator.progress(LOAD)
    assert (progress.started, progress.finished, progress.failing) == ({0, 1}, {0}, {1})
    assert not aggregator.complete(LOAD)
    assert aggregator.complete(LOAD, expected=[0])
    for rank in (1, 2, 3):
        aggregator.add(exited(rank, 1))
    assert aggregator.complete(LOAD)
    assert aggregator.progress(LOAD).ended == {0, 1, 2, 3}


def test_unknown_load_has_no_aggregate() -> None:
    aggregator = Aggregator()
    aggregator.add(stalled(1, None, "x"))
    assert aggregator.aggregate(LOAD) is None
    assert aggregator.loads() == ()


def test_events_that_come_twice_change_nothing() -> None:
    events = [started(0), failing(1, SIZE), told(0), finished(1, verdict="failed", error=SIZE), killed(2, "SIGKILL")]
    assert seen(*events, *events) == seen(*events)


def test_loads_beyond_the_bound_are_counted() -> None:
    aggregator = Aggregator(max_loads=3)
    for number in range(5):
        aggregator.add(finished(0, load_id=f"{number:032x}"))
    assert (len(aggregator.loads()), aggregator.forgotten) == (3, 2)


def test_insane_ranks_are_left_out_and_counted() -> None:
    huge = replace(finished(0), identity=who(1 << 40, 1 << 50))
    one = seen(finished(0), huge, settled=True)
    assert one.ranks_reported == "0"
    assert text_of(one, "left_out") == "not kept, for their number: 1 events or reports, 0 findings"


def test_more_groups_than_are_kept_fall_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_sentry.collector.groups.MAX_GROUPS", 3)
    keys = [KeyList(1, (f"k{rank}",)) for rank in range(6)]
    one = seen(*(finished(rank, 6, verdict="partial", missing=keys[rank]) for rank in range(6)))
    assert [group.ranks for group in one.groups] == ["0", "1", "2", "3-5"]
    assert [(found.code, found.ranks) for found in one.findings] == [("left_out", "3-5"), ("left_out", "")]


RANKS = 5


@st.composite
def jobs(draw: st.DrawFn) -> list[list[object]]:
    """
    The events of each rank, in its own order.
    """
    rows: list[list[object]] = []
    for rank in range(RANKS):
        row: list[object] = [started(rank, RANKS), entered(rank, "plan", RANKS)]
        kind = draw(st.sampled_from(["ok", "own", "told", "silent", "killed", "stalled"]))
        if kind == "ok":
            row.append(finished(rank, RANKS))
        elif kind == "own":
            row += [
                failing(rank, SIZE, RANKS),
                finished(rank, RANKS, verdict="failed", error=SIZE, findings=(WRONG_SHAPE,)),
            ]
        elif kind == "told":
            row.append(told(rank, RANKS))
        elif kind == "killed":
            row.append(killed(rank, "SIGKILL"))
        elif kind == "stalled":
            row.append(stalled(rank, "plan", "stack"))
        rows.append(row)
    return rows


@given(jobs(), st.randoms(use_true_random=False))
def test_interleaving_of_ranks_decides_nothing_but_who_was_first(
    rows: list[list[object]], chance: random.Random
) -> None:
    mixed: list[object] = []
    left = [list(row) for row in rows]
    while any(left):
        mixed.append(chance.choice([row for row in left if row]).pop(0))
    one = seen(*(event for row in rows for event in row))  # type: ignore[arg-type]
    other = seen(*mixed)  # type: ignore[arg-type]

    def settled(a: Aggregate) -> Aggregate:
        found = tuple(sorted(a.findings, key=lambda f: (f.code, f.text)))
        return replace(a, error=None, findings=found)

    assert settled(one) == settled(other)
    assert (one.error is None) == (other.error is None)


def test_peer_findings_come_last_among_errors() -> None:
    late = Finding("missing_keys", "error", "2 keys missing")
    one = seen(finished(0, verdict="failed", findings=(PEER, late), error=SIZE))
    assert [found.code for found in one.findings] == ["missing_keys", "peer_failed"]


def test_the_wording_of_a_lost_peer_does_not_split_a_group() -> None:
    texts = ["[gloo] Connection closed by peer [127.0.0.1]:80", "[gloo] Read error [::1]:4: Connection reset by peer"]
    lost = [LoadError("RuntimeError", text, "plan") for text in texts]
    finds = list(map(lost_finding, lost))
    assert finds[0].text != finds[1].text
    one = seen(*(finished(r, 2, verdict="failed", error=lost[r], findings=(finds[r],)) for r in range(2)))
    assert [group.ranks for group in one.groups] == ["0-1"]
    assert codes(one) == {"peer_failed": "0-1"}


def test_findings_with_the_same_facts_are_one_whatever_their_texts() -> None:
    said = [Finding("shard_missing", "error", f"gone, seen at 0x{rank}", facts=(("file", "a"),)) for rank in range(2)]
    one = seen(*(finished(r, 2, verdict="failed", findings=(said[r],)) for r in range(2)))
    assert codes(one) == {"shard_missing": "0-1"}
    assert [group.ranks for group in one.groups] == ["0-1"]


def test_findings_with_other_facts_are_others_though_each_names_its_rank() -> None:
    said = [Finding("shard_missing", "error", f"rank {rank}", facts=(("file", f"rank {rank}"),)) for rank in range(2)]
    one = seen(*(finished(r, 2, verdict="failed", findings=(said[r],)) for r in range(2)))
    assert [(found.ranks, found.text) for found in one.findings] == [("0", "rank 0"), ("1", "rank 1")]
    assert len(one.groups) == 2


def test_what_an_exception_says_of_its_own_rank_and_memory_is_no_fact() -> None:
    found = [
        catalogue.finding("rank_raised", "error", type="E", message=f"rank {rank} lost <object at 0x7f{rank}>")
        for rank in range(2)
    ]
    one = seen(*(finished(r, 2, verdict="failed", findings=(found[r],)) for r in range(2)))
    assert codes(one) == {"rank_raised": "0-1"}


def test_whether_a_load_is_complete_is_told_without_a_look_at_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator = Aggregator()
    for rank in range(4):
        aggregator.add(started(rank))
    monkeypatch.setattr(Aggregator, "_ends", None)
    for rank in range(3):
        aggregator.add(finished(rank))
        assert not aggregator.complete(LOAD)
        assert not aggregator.complete(LOAD, range(4))
    monkeypatch.undo()
    aggregator.add(finished(3))
    assert aggregator.complete(LOAD)


def test_each_phase_has_words() -> None:
    assert {str(phase) for phase in get_args(PhaseName)} == {str(phase) for phase in DOING}
    assert {phase: doing(phase) for phase in DOING if not doing(phase).startswith("while ")} == {}
