"""
How ranks ended, and what that means for a load: which failed first, never came, or were stopped with the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final, NamedTuple

from ckpt_sentry.collector.groups import MAX_RANKS, Failure, LoadState
from ckpt_sentry.collector.summary import STILL_WAITING, JobError, OrderBy, RankFinding, Unfinished, doing
from ckpt_sentry.collector.wording import (
    ABSENCE,
    HAS,
    MORE_TIME,
    WAS,
    RankStatement,
    by_ranks,
    ended,
    ended_error,
    how,
    look_at,
    stalled_before,
    step_after,
    waits,
)
from ckpt_sentry.core import ranks
from ckpt_sentry.core.peers import is_loss
from ckpt_sentry.core.report import LoadError
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.transport.events import RankEnded

TOGETHER: Final = ("setup", "plan", "read", "barrier", "restore")
"""The phases of a load of many ranks, in their order."""


class End(NamedTuple):
    """
    The end of a worker process, with the order and the source by which it was learnt.
    """

    event: RankEnded
    order: int
    source: str

    @property
    def at(self) -> float:
        return self.event.at

    @property
    def bad(self) -> bool:
        return self.event.how in ("killed", "raised") or bool(self.event.exit_code)

    @property
    def is_echo(self) -> bool:
        """
        Whether the process only ended by the loss of another.
        """
        return self.event.error is not None and is_loss(self.event.error)


@dataclass(slots=True)
class Attempt:
    """
    The ends of all ranks in one attempt of a run.
    """

    over: set[str]
    """Nodes whose launcher has seen all of its workers end; shared by the attempts of a run."""
    ends: dict[int, End] = field(default_factory=dict)
    superseded: bool = False
    """A later attempt of the run has begun."""
    last_load: str | None = None
    """The load that began last."""

    def add(self, event: RankEnded, order: int, source: str) -> None:
        """
        Take in an end; the first of a rank stays, unless another knows more: how it ended, or the exception.
        """
        if not 0 <= event.identity.rank < MAX_RANKS:
            return
        known = self.ends.get(event.identity.rank)
        if known is None or _knowledge(event) > _knowledge(known.event):
            self.ends[event.identity.rank] = End(event, order if known is None else known.order, source)

    def first(self) -> End | None:
        """
        The bad end that came first and was not brought about by another.
        """
        bad = (end for end in self.ends.values() if end.bad and not end.is_echo)
        return min(bad, key=lambda end: end.order, default=None)


def _knowledge(event: RankEnded) -> int:
    if event.error is not None:
        return 2
    return 0 if event.how == "exited" and event.exit_code is None else 1


class Cause(NamedTuple):
    """
    One rank's claim to be the first that failed.
    """

    rank: int
    order: int
    at: float
    error: LoadError


class LoadEnds:
    """
    One load seen together with the ends of its ranks.

    Args:
        state: the load.
        attempt: the ends of the ranks in the same attempt of the run.
        expected: the ranks whose events come here; nothing is concluded from the silence of others.
        order_by: see `Aggregator`.
        settled: nothing more will come, whatever the events say.
    """

    def __init__(
        self,
        state: LoadState,
        attempt: Attempt,
        expected: Collection[int],
        order_by: OrderBy | None,
        *,
        settled: bool,
    ) -> None:
        self.state = state
        self.ends = attempt.ends
        self._ended_first = attempt.first() if attempt.last_load == state.load_id else None
        self._over = settled or attempt.superseded
        self._settled = settled
        self._over_nodes = attempt.over
        self._all_over = bool(attempt.over) and attempt.over.issuperset(state.nodes.values())
        self.sources = {one.source for one in state.failures.values()} | {one.source for one in attempt.ends.values()}
        in_one_place = len(self.sources) <= 1 and state.node_count <= 1
        self.order_by: OrderBy = order_by or ("arrival" if in_one_place else "clock")
        self.open = [rank for rank in state.phases if rank not in state.finished]
        self.absent = [rank for rank in state.of_its_ranks(expected) if rank not in state.phases]
        self.heard = {*state.phases, *state.of_its_ranks({*expected, *state.stalls, *attempt.ends})}
        self._own = sorted((self._when(one), rank) for rank, one in state.failures.items() if one.own)

    def _is_mute(self, rank: int) -> bool:
        """
        Whether a rank fell silent without anybody having seen it end: it may live.
        """
        if not self._settled or rank in self.ends:
            return False
        return self.state.nodes[rank] not in self._over_nodes if rank in self.state.nodes else not self._over_nodes

    @property
    def cut_short(self) -> bool:
        """
        Whether ranks ended, or were stopped, amid the load.
        """
        return any(self.is_over(rank) and not self._is_mute(rank) for rank in self.open)

    @property
    def mute(self) -> bool:
        """
        Whether any rank that matters fell silent.
        """
        return any(map(self._is_mute, (*self.open, *self.absent)))

    def _when(self, one: Failure | End | Cause) -> float:
        return one.order if self.order_by == "arrival" else one.at

    def is_over(self, rank: int) -> bool:
        """
        Whether no more events of this rank will come.
        """
        if self._over or rank in self.ends or self._all_over:
            return True
        return rank in self.state.nodes and self.state.nodes[rank] in self._over_nodes

    def stopped(self, rank: int) -> bool:
        """
        Whether the launcher ended this rank because another had failed.
        """
        return rank in self.ends and self.ends[rank].event.how == "stopped"

    @property
    def troubled(self) -> bool:
        """
        Whether something went wrong that ranks which never came could explain.
        """
        return bool(self.state.failures) or any(self.is_over(rank) or rank in self.state.stalls for rank in self.open)

    @property
    def waits(self) -> bool:
        """
        Whether ranks that live are held to hang: they have been in the load, or away from it, for too long.
        """
        hung = (rank for rank in (*self.open, *self.absent) if rank in self.state.stalls)
        return self.troubled and not all(map(self.is_over, hung))

    def first(self) -> Cause | None:
        """
        The first failing rank: by its own error or end; by the loss of another only where there is nothing else.
        """
        ends = self._own_ends()
        causes = [one for one in ends if not self.ends[one.rank].is_echo]
        claims = [*self._own_errors(), *causes] or ends or self._echoes()
        return min(claims, key=lambda one: (self._when(one), one.rank), default=None)

    def _own_errors(self) -> list[Cause]:
        return [_claim(rank, one) for rank, one in self.state.failures.items() if one.own]

    def _echoes(self) -> list[Cause]:
        return [_claim(rank, one) for rank, one in self.state.failures.items()]

    def _own_ends(self) -> list[Cause]:
        claims = []
        for rank in (*filter(self._left, self.open), *filter(self._is_cause, self.absent)):
            end = self.ends[rank]
            claims.append(Cause(rank, end.order, end.at, ended_error(end.event, self.state.phases.get(rank))))
        return claims

    def _left(self, rank: int) -> bool:
        """
        Whether a rank left amid the load, neither reported nor stopped.
        """
        return rank in self.ends and rank not in self.state.failures and not self.stopped(rank)

    def _is_cause(self, rank: int) -> bool:
        """
        Whether a rank that never came has ended in a way that explains the trouble of those that did.
        """
        end = self.ends.get(rank)
        if end is None or not self.troubled or not self._collective or self.stopped(rank):
            return False
        if not self._own:
            return True
        return end.bad and not end.is_echo

    def error(self, first: Cause | None) -> JobError | None:
        """
        The top-level error of the job.
        """
        if first is None:
            return None
        return JobError(first.error.type, first.error.message, first.error.phase, first.rank, self.order_by)

    def unfinished(self) -> tuple[Unfinished, ...]:
        """
        Ranks without an end of the load, by where they stood and why.
        """
        rows: dict[tuple[str | None, str], list[int]] = defaultdict(list)
        for rank in self.open:
            rows[self.state.phases[rank], self._why(rank)].append(rank)
        if self.troubled and self._collective:
            for rank in self.absent:
                rows[None, self._why(rank)].append(rank)
        found = [Unfinished(ranks.compact(members), phase, why) for (phase, why), members in rows.items()]
        return tuple(sorted(found, key=lambda row: (row.phase is None, ranks.spans(ranks.parse(row.ranks))[0])))

    @property
    def _collective(self) -> bool:
        return self.state.framework == "dcp" or bool(self.open or self.state.stalls)

    def _why(self, rank: int) -> str:
        end = self.ends.get(rank)
        if end is not None:
            return how(end.event)
        if rank in self.state.failures:
            return "raised, and no report followed"
        if self._is_mute(rank):
            return STILL_WAITING if rank in self.state.stalls else "nothing more was heard"
        if self.is_over(rank):
            return "its process ended without a word"
        return STILL_WAITING if rank in self.state.stalls else "under way"

    def findings(self) -> list[RankFinding]:
        """
        The findings on ends: ranks killed, exited, raised, absent, stalled, and those that were stopped with them.
        """
        found: list[RankFinding] = []
        self._late_findings(found)
        self._ended_findings(found)
        self._later_findings(found)
        self._absent_findings(found)
        self._stall_findings(found)
        return found

    @property
    def _late(self) -> list[int]:
        """
        Ranks that were stopped in a phase which all that gave up had behind them, where nobody has failed but by that:
        they were waited for.
        """
        if self._own or any(map(self._is_cause, self.absent)) or any(map(self._left, self.open)):
            return []
        failures = self.state.failures
        reached = min((_place(one.error.phase) for one in failures.values()), default=0)
        stopped = (rank for rank in self.open if self.stopped(rank) and rank not in failures)
        return [rank for rank in stopped if 0 <= _place(self.state.phases[rank]) < reached]

    def _late_findings(self, found: list[RankFinding]) -> None:
        who = ranks.compact(self.state.failures)
        others = f"rank{'s'[: len(self.state.failures) > 1]} {who}"

        def late(rank: int) -> RankStatement:
            busy = self._doing(rank).removeprefix("while ")
            return RankStatement("rank_stalled", f"still {busy} when {others} gave up waiting", MORE_TIME, WAS)

        found += by_ranks(self._late, late, "error")

    def _ended_findings(self, found: list[RankFinding]) -> None:
        untold = set(self.state.failures).union(self._late)
        stopped = [rank for rank in self.open if self.stopped(rank) and rank not in untold]
        found += by_ranks(stopped, self._stop, "info")
        silent = set(self.open).difference(untold, stopped)
        found += by_ranks(filter(self.is_over, sorted(silent)), self._ending, "error")

    def _later_findings(self, found: list[RankFinding]) -> None:
        """
        A rank that ended badly after this load, the last of the attempt, had ended there: no fault of the load.
        """
        end = self._ended_first
        if end is not None and end.event.identity.rank in self.state.finished and not self.state.failures:
            found.append(ended(end.event, "after this load had ended there").finding([end.event.identity.rank], "info"))

    def _stop(self, rank: int) -> RankStatement:
        return RankStatement("peer_failed", f"stopped by the launcher {self._doing(rank)}", verb=WAS)

    def _ending(self, rank: int) -> RankStatement:
        end = self.ends.get(rank)
        if end is None and self._is_mute(rank):
            if (stall := self.state.stalls.get(rank)) is not None:
                return waits(stall, self.state.phases.get(rank))
            return RankStatement("rank_stalled", f"last heard of {self._doing(rank)}", verb=WAS)
        if end is None:
            return RankStatement("rank_exited", f"ended {self._doing(rank)}, without a word", step_after(None))
        return ended(end.event, self._doing(rank))._replace(step=step_after(end.event))

    def _absent_findings(self, found: list[RankFinding]) -> None:
        if not self.troubled:
            return
        causes = {rank: self.ends[rank].event for rank in self.absent if self._is_cause(rank)}
        known = bool(self._own or causes) or any(map(self._left, self.open))
        alive = [rank for rank in self.absent if rank not in causes and self._missed(rank, known=known)]
        killed = [rank for rank, event in causes.items() if event.how == "killed"]

        def gone(rank: int) -> RankStatement:
            return RankStatement("rank_absent", f"never came to this load: {how(causes[rank])}", look_at(causes[rank]))

        def shot(rank: int) -> RankStatement:
            return ended(causes[rank], doing(None))._replace(step=step_after(causes[rank]))

        found += by_ranks(causes, gone, "error")
        found += by_ranks(killed, shot, "error")
        found += by_ranks(alive, self._absence, "error")

    def _missed(self, rank: int, *, known: bool) -> bool:
        """
        Whether a rank that is away is missed: it has sent its stack, or the trouble has no other cause that is known.
        """
        if rank in self.state.stalls:
            return True
        return self._collective and not known and (self.is_over(rank) or bool(self.state.stalls))

    def _absence(self, rank: int) -> RankStatement:
        stall = self.state.stalls.get(rank)
        maybe = self._is_mute(rank) or not self.is_over(rank)
        stack = "" if stall is None else stall.stack.rstrip()
        if maybe:
            return RankStatement("rank_absent", "not come to this load", ABSENCE, HAS, stack)
        return RankStatement("rank_absent", "never came to this load", ABSENCE, stack=stack)

    def _stall_findings(self, found: list[RankFinding]) -> None:
        waiting = (rank for rank in self.open if rank in self.state.stalls and not self.is_over(rank))
        found += by_ranks(waiting, lambda rank: waits(self.state.stalls[rank], self.state.phases.get(rank)), "error")
        over = {rank: stall for rank, stall in self.state.stalls.items() if rank in self.state.finished}
        if over and not self.open and not self.absent:
            found.append(stalled_before(over, self.state))

    def _doing(self, rank: int) -> str:
        return doing(self.state.phases.get(rank))


def _place(phase: str | None) -> int:
    """
    The place of a phase among those at whose ends ranks wait for each other, -1 for any other.
    """
    return TOGETHER.index(phase) if phase in TOGETHER else -1


def _claim(rank: int, failure: Failure) -> Cause:
    return Cause(rank, failure.order, failure.at, failure.error)
