"""
Events of many ranks in, one `Aggregate` for each load out.

One pass in order of arrival. Time is O(events), memory O(distinct reports) and a few numbers for each rank.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, cast

from ckpt_sentry.collector import findings
from ckpt_sentry.collector.ends import Attempt, Cause, LoadEnds
from ckpt_sentry.collector.groups import LoadState, SharedReport, merged_reports
from ckpt_sentry.collector.left_out import LeftOut
from ckpt_sentry.collector.summary import (
    NO_MISMATCHES,
    SEVERITY,
    Aggregate,
    Group,
    JobError,
    Mismatches,
    OrderBy,
    RankFinding,
    Seconds,
    Spread,
    Unfinished,
)
from ckpt_sentry.core import codes, ranks
from ckpt_sentry.core.peers import is_refusal
from ckpt_sentry.core.report import NO_KEYS, Identity, LoadReport, Verdict
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.masking import clean
from ckpt_sentry.transport.events import Event, LoadsLeftOut, LoadStarted, RankEnded, RunEnded
from ckpt_sentry.transport.events import LoadFinished as _LoadFinished

__all__ = [
    "Aggregate",
    "Aggregator",
    "Group",
    "JobError",
    "Progress",
    "RankFinding",
    "Seconds",
    "Spread",
    "Unfinished",
]

MAX_LOADS: Final = 1_000
MAX_ATTEMPTS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Progress:
    """
    Where a load stands, for whoever must decide when to speak. Sets hold ranks.

    `ended` are the ranks that will say nothing more about it: finished, or their process has ended.
    """

    started: frozenset[int]
    finished: frozenset[int]
    failing: frozenset[int]
    stalled: frozenset[int]
    ended: frozenset[int]
    world_size: int


class Aggregator:
    """
    Collects events and tells what they mean. Not thread-safe: whoever feeds it from threads holds a lock.

    Args:
        order_by: how to find the first failing rank; None: by arrival where all failures came from one source and all
            ranks are on one machine, else by clock.
        max_loads: loads that are kept; beyond, the oldest is forgotten and counted in `forgotten`.
    """

    def __init__(self, order_by: OrderBy | None = None, *, max_loads: int = MAX_LOADS) -> None:
        self.forgotten = 0
        self.left_out = LeftOut()
        self._order_by = order_by
        self._max_loads = max_loads
        self._loads: dict[str, LoadState] = {}
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._ended_at: dict[tuple[str, str], float] = {}
        self._count = 0

    def add(self, event: Event, source: str = "") -> None:
        """
        Take in one event. `source` names the receiver or the file it came through: it tells whether arrival is order.
        """
        if self.begins_anew(event):
            self._set_aside(event.identity.run_id)
        self._count += 1
        attempt = self._attempt(event.identity.run_id, event.identity.attempt)
        if isinstance(event, RunEnded):
            attempt.over.add(event.identity.node)
            self._ended_at[event.identity.run_id, event.identity.node] = event.at
            return
        if isinstance(event, LoadsLeftOut):
            self.left_out.add(event)
            return
        if isinstance(event, RankEnded):
            attempt.add(event, self._count, source)
            return
        load_id = event.report.load_id if isinstance(event, _LoadFinished) else event.load_id
        state = self._loads.get(load_id)
        if state is None:
            while len(self._loads) >= self._max_loads:
                del self._loads[next(iter(self._loads))]
                self.forgotten += 1
            state = self._loads[load_id] = LoadState(event)
            attempt.last_load = load_id
        state.add(event, self._count, source)

    def begins_anew(self, event: Event) -> bool:
        """
        Whether a load begins on a node where its run had ended: another run has the same name.
        """
        ended_at = self._ended_at.get((event.identity.run_id, event.identity.node))
        return isinstance(event, LoadStarted) and ended_at is not None and event.at > ended_at

    def _set_aside(self, run_id: str) -> None:
        """
        Keep what is known of a run that has ended apart from another that has its name.
        """
        aside = f"~{self._count}"
        self._attempts = {
            (run + aside if run == run_id else run, number): one for (run, number), one in self._attempts.items()
        }
        self._ended_at = {key: at for key, at in self._ended_at.items() if key[0] != run_id}
        for load_id, state in list(self._loads.items()):
            if state.identity.run_id == run_id and load_id == state.load_id:
                del self._loads[load_id]
                self._loads[load_id + aside] = state
                state.aside = aside

    def _attempt(self, run_id: str, number: int) -> Attempt:
        key = run_id, number
        known = self._attempts.get(key)
        if known is None:
            while len(self._attempts) >= MAX_ATTEMPTS:
                del self._attempts[next(iter(self._attempts))]
            others = {at: one for (run, at), one in self._attempts.items() if run == run_id}
            over = next(iter(others.values())).over if others else set[str]()
            known = self._attempts[key] = Attempt(over, superseded=any(at > number for at in others))
            for at, one in others.items():
                one.superseded = one.superseded or at < number
        return known

    def forget(self, load_id: str) -> None:
        """
        Let a load go. What still comes of it begins anew.
        """
        self._loads.pop(load_id, None)

    def first_end(self, run_id: str) -> RankEnded | None:
        """
        The bad end that came first in the last attempt of a run, and was not brought about by another.
        """
        attempts = [one for (run, _), one in self._attempts.items() if run == run_id and not one.superseded]
        end = attempts[-1].first() if attempts else None
        return None if end is None else end.event

    def unexplained(self, who: Identity) -> bool:
        """
        Whether nothing is known of the end of a rank but that it is gone.
        """
        end = self._attempt(who.run_id, who.attempt).ends.get(who.rank)
        return end is None or (end.event.how == "exited" and end.event.exit_code is None)

    def run_of(self, load_id: str) -> str | None:
        """
        The run of a load; None where the load is not known (any more).
        """
        state = self._loads.get(load_id)
        return None if state is None else state.identity.run_id

    def has_finished(self, load_id: str | None, rank: int) -> bool:
        """
        Whether a rank has reported the end of a load. False for an unknown load.
        """
        state = None if load_id is None else self._loads.get(load_id)
        return state is not None and rank in state.finished

    def is_past(self, load_id: str) -> bool:
        """
        Whether the run has ended on all nodes of a load, or has begun anew. Raises KeyError for an unknown load.
        """
        state = self._loads[load_id]
        attempt = self._attempt(state.identity.run_id, state.identity.attempt)
        return attempt.superseded or attempt.over.issuperset(state.nodes.values())

    def standing(self, load_id: str, rank: int) -> tuple[str | None, float]:
        """
        The phase of a load that a rank has come to last, and since when. Raises KeyError for a load that is not known.
        """
        return self._loads[load_id].standing(rank)

    def loads(self, *, settled: bool = False) -> tuple[Aggregate, ...]:
        """
        All loads, oldest first. See `aggregate`.
        """
        known = (self.aggregate(load_id, settled=settled) for load_id in self._loads)
        return tuple(sorted(filter(None, known), key=lambda load: (load.started_at, load.load_id)))

    def progress(self, load_id: str) -> Progress:
        """
        Where a load stands. Raises KeyError for a load that is not known.
        """
        state = self._loads[load_id]
        ends = self._ends(state, None, settled=False)
        return Progress(
            started=frozenset(state.phases),
            finished=frozenset(state.finished),
            failing=frozenset(state.failures),
            stalled=frozenset(rank for rank in state.stalls if rank not in state.finished),
            ended=frozenset(
                rank
                for rank in {*range(state.world_size), *state.phases}
                if rank in state.finished or ends.is_over(rank)
            ),
            world_size=state.world_size,
        )

    def complete(self, load_id: str, expected: Collection[int] | None = None) -> bool:
        """
        Whether every expected rank (see `aggregate`) has finished the load or has ended. False for an unknown load.
        """
        state = self._loads.get(load_id)
        if state is None or not state.phases:
            return False
        attempt = self._attempt_of(state)
        fewest = len(state.phases if expected is None else expected)
        # Asked at each event of each rank: it must not look at all ranks each time.
        if not (attempt.superseded or attempt.over) and len(state.finished) + len(attempt.ends) < fewest:
            return False
        ends = self._ends(state, expected, settled=False)
        wanted = state.reach if expected is None else expected
        return all(rank in state.finished or ends.is_over(rank) for rank in wanted)

    def aggregate(
        self, load_id: str, *, settled: bool = False, expected: Collection[int] | None = None
    ) -> Aggregate | None:
        """
        What is known of a load now; None where no rank is known to have come to it.

        Args:
            settled: nothing more will come: ranks without an end are reported as such.
            expected: the ranks that speak to this aggregator (None: all of each node of which one was heard). Nothing
                is concluded from the silence of others.
        """
        state = self._loads.get(load_id)
        if state is None or not state.phases:
            return None
        # Records may be anybody's: what is shown of them holds no credentials, whoever wrote them.
        return clean(_summarise(state, self._ends(state, expected, settled=settled)))

    def _ends(self, state: LoadState, expected: Collection[int] | None, *, settled: bool) -> LoadEnds:
        wanted = state.reach if expected is None else expected
        return LoadEnds(state, self._attempt_of(state), wanted, self._order_by, settled=settled)

    def _attempt_of(self, state: LoadState) -> Attempt:
        who = state.identity
        return self._attempts.get((who.run_id + state.aside, who.attempt)) or Attempt(set())


def _summarise(state: LoadState, ends: LoadEnds) -> Aggregate:
    first = ends.first()
    groups = merged_reports(state.reports)
    found = findings.collect(state, ends, groups, first)
    lead = _lead(groups, first)
    worst = lead.report if lead else None
    path = next((one.path for one in _reports(lead, groups) if one.path), None)
    # Nothing is said of a checkpoint that was learned of another.
    reports = [one for one in _reports(lead, groups) if one.path == path]
    head = worst or state.head
    failed = {rank for one in groups if one.report.verdict == "failed" for rank in one.ranks}
    failed |= {rank for rank in ends.open if ends.is_over(rank)} | set(state.failures)
    return Aggregate(
        load_id=state.load_id,
        run_id=state.identity.run_id,
        attempt=state.identity.attempt,
        ordinal=head.ordinal if head else 0,
        framework=head.framework if head else "dcp",
        entry_point=head.entry_point if head else "a load",
        world_size=state.world_size,
        ranks_reported=ranks.compact(state.finished),
        started_at=state.first_at,
        ended_at=max((end for _, end, _ in state.times.values()), default=state.last_at),
        verdict=_verdict(ends, groups, found, first),
        path=path or state.paths.get(min(state.paths, default=0)),
        format=next((one.format for one in reports if one.format), None),
        step=next((one.step for one in reports if one.step is not None), None),
        step_source=next((one.step_source for one in reports if one.step is not None), None),
        error=ends.error(first),
        coverage=worst.coverage if worst else None,
        utilisation=worst.utilisation if worst else None,
        missing=worst.missing if worst else NO_KEYS,
        unexpected=worst.unexpected if worst else NO_KEYS,
        mismatched=_mismatches(worst),
        rename=worst.rename if worst else None,
        findings=found,
        groups=tuple(Group(ranks.compact(one.ranks), len(one.ranks), one.report) for one in groups),
        unfinished=ends.unfinished(),
        failed_ranks=ranks.compact(failed),
        heard_ranks=len(ends.heard),
        seconds=_seconds(state),
        bytes_read=sum(read for _, _, read in state.times.values()),
    )


def _reports(lead: SharedReport | None, groups: list[SharedReport]) -> list[LoadReport]:
    """
    What the groups report, that of the leading one first.
    """
    return [one.report for one in (*((lead,) if lead else ()), *groups)]


def _lead(groups: list[SharedReport], first: Cause | None) -> SharedReport | None:
    """
    The worst group: by verdict, by keys that did not fit, by coverage; the first failing rank's, then the largest.

    Ranks that were only told of another's failure lead where there are no others.
    """

    def badness(one: SharedReport) -> tuple[float, ...]:
        report = one.report
        wrong = report.missing.count + sum(item.count for item in report.mismatched)
        coverage = report.coverage.judged if report.coverage else 1.0
        errors = {found.code for found in report.findings if found.level == "error"}
        is_first = first is not None and first.rank in one.ranks
        return (
            errors != {"peer_failed"},
            SEVERITY[report.verdict],
            wrong,
            -coverage,
            is_first,
            report.unexpected.count,
            len(one.ranks),
        )

    return max(groups, key=badness, default=None)


def _mismatches(report: LoadReport | None) -> Mismatches:
    if report is None or not report.mismatched:
        return NO_MISMATCHES
    return Mismatches(sum(item.count for item in report.mismatched), report.mismatched)


def _verdict(
    ends: LoadEnds, groups: list[SharedReport], found: tuple[RankFinding, ...], first: Cause | None
) -> Verdict:
    verdicts = {one.report.verdict for one in groups}
    said = {one.code for one in found if one.level != "info"}
    # What the agent refuses has its own verdict: that it was partial, without overlap, or of wrong values.
    refused = first is not None and is_refusal(first.error)
    broken = ends.cut_short or bool(said & codes.of_verdict("failed"))
    if broken or (first is not None and not refused):
        verdicts.add("failed")
    if "rank_absent" in said and not (ends.waits or ends.mute):
        verdicts.add("failed")
    if ends.waits or (ends.mute and said & codes.of_verdict("stalled")):
        verdicts.add("stalled")
    if said & codes.of_verdict("diverged"):
        verdicts.add("diverged")
    return cast("Verdict", max(verdicts, key=SEVERITY.__getitem__, default="ok"))


def _spread(values: dict[int, float]) -> Spread:
    slowest = max(values, key=lambda rank: (values[rank], -rank))
    ordered = sorted(values.values())
    middle = len(ordered) // 2
    # Not `statistics.median`: importing it would cost every job a decimal library.
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Spread(ordered[0], median, ordered[-1], slowest)


def _seconds(state: LoadState) -> Seconds | None:
    if not state.times:
        return None
    total = {rank: max(0.0, ended - started) for rank, (started, ended, _) in state.times.items()}
    phases = tuple((name, _spread(spent)) for name, spent in state.phase_seconds.items() if spent)
    return Seconds(_spread(total), phases)
