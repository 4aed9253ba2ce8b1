"""
The state of one load while events arrive: who started, who stands where, and the distinct reports.

Memory grows with distinct reports; a rank costs a few numbers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Final

from ckpt_sentry.collector.summary import SEVERITY
from ckpt_sentry.core import codes, ranks
from ckpt_sentry.core.peers import is_loss
from ckpt_sentry.core.report import Finding, FindingFacts, Framework, Identity, LoadError, LoadReport
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.transport.events import LoadFailing, LoadFinished, LoadStalled, LoadStarted, PhaseEntered

LoadEvent = LoadStarted | PhaseEntered | LoadFailing | LoadFinished | LoadStalled

FIRST_PHASE: Final = "setup"
MAX_RANKS: Final = 1 << 18
MAX_NODE_RANKS: Final = 1024
MAX_GROUPS: Final = 512
MAX_STACKS: Final = 64
MAX_STACK_CHARS: Final = 8_000
MAX_PHASES: Final = 64

NO_RANK: Final = -1
"""The rank whose number no text holds: what is said with its number names nobody."""

_NOBODY: Final = Identity(run_id="")
_RANK: Final = re.compile(r"\brank[ :=]?(\d+)\b", re.IGNORECASE)
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+|\[[0-9a-fA-F:]{2,45}\]|\b\d{1,3}(?:\.\d{1,3}){3}|:\d{2,5}\b")


def anonymous(text: str, rank: int) -> str:
    """
    A text without what differs from rank to rank and is no fact: addresses, and its own rank.
    """
    own = str(rank)
    text = _ADDRESS.sub("@", text)
    return _RANK.sub(lambda match: "rank @" if match[1] == own else match[0], text)


def finding_key(found: Finding, rank: int) -> FindingFacts:
    """
    What a finding on several ranks must agree in to be one finding: its facts; its text where it has none.

    In what quotes others, an exception's message or a text without facts, a rank that names itself agrees with the
    others that do; see `merged_reports` for those that name it as well.
    """
    if not found.facts:
        return (("text", anonymous(found.text, rank)),)
    return tuple((name, anonymous(value, rank) if name == codes.QUOTED else value) for name, value in found.facts)


def in_common(report: LoadReport, rank: int) -> LoadReport:
    """
    The report of a rank without who, when and how long: equal for two ranks exactly when they report the same.
    """
    error = report.error
    if error is not None:
        error = replace(error, message="" if is_loss(error) else anonymous(error.message, rank))
    return replace(
        report,
        identity=_NOBODY,
        started_at=0.0,
        ended_at=0.0,
        bytes_read=0,
        phases=(),
        error=error,
        findings=tuple(replace(found, text="", facts=finding_key(found, rank)) for found in report.findings),
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """
    The first error of a rank: when it arrived (`order`), and when its clock said it was.

    `own` is False where the rank only passes on what befell another.
    """

    order: int
    at: float
    source: str
    error: LoadError
    own: bool


@dataclass(frozen=True, slots=True)
class Stall:
    """
    Where a rank stood when the load had lasted too long. `since` is seconds since the epoch.
    """

    phase: str | None
    since: float
    at: float
    stack: str


@dataclass(slots=True)
class SharedReport:
    """
    A distinct report and the ranks that gave it.
    """

    report: LoadReport
    ranks: set[int] = field(default_factory=set)


def merged_reports(shared: Mapping[LoadReport, SharedReport]) -> list[SharedReport]:
    """
    The reports that ranks stand behind, by what `in_common` makes of them, sorted by their lowest ranks.

    "Written by rank 1" is a fact where others say it of rank 1, so rank 1 is one of them, though it names itself.
    """
    found: dict[LoadReport, SharedReport] = {}
    for key, one in shared.items():
        if not one.ranks:
            continue
        fact = in_common(one.report, NO_RANK) if len(one.ranks) == 1 else key
        if fact not in shared or not shared[fact].ranks:
            fact = key
        known = found.get(fact)
        lowest = one if known is None or min(one.ranks) < min(known.ranks) else known
        found[fact] = SharedReport(lowest.report, one.ranks | (known.ranks if known else set()))
    return sorted(found.values(), key=lambda one: min(one.ranks))


@dataclass(slots=True)
class LoadState:
    """
    What is known of one load. `add` takes its events in any order; a repeated event changes nothing.
    """

    first: LoadEvent
    phases: dict[int, str] = field(default_factory=dict)
    """Ranks that have come to the load, with the last phase they entered."""
    failures: dict[int, Failure] = field(default_factory=dict)
    stalls: dict[int, Stall] = field(default_factory=dict)
    early: dict[int, tuple[Finding, ...]] = field(default_factory=dict)
    """What ranks have found before the end, for those that will not come to it."""
    finished: dict[int, SharedReport] = field(default_factory=dict)
    times: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    phase_seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    reports: dict[LoadReport, SharedReport] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    _reach: set[int] = field(default_factory=set)
    _heard: dict[str, list[int]] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    world_size: int = 1
    last_at: float = 0.0
    first_at: float = float("inf")
    head: LoadStarted | LoadReport | None = None
    left_out: int = 0
    aside: str = ""
    """What its run's name has been given since, where another run has that name now."""
    _texts: dict[str, str] = field(default_factory=dict)
    _phase_at: dict[int, float] = field(default_factory=dict)
    _members: set[int] = field(default_factory=set)

    @property
    def identity(self) -> Identity:
        return self.first.identity

    @property
    def load_id(self) -> str:
        return self.first.report.load_id if isinstance(self.first, LoadFinished) else self.first.load_id

    @property
    def framework(self) -> Framework:
        return self.head.framework if self.head else "dcp"

    @property
    def node_count(self) -> int:
        """
        How many machines have been heard of.
        """
        return len(self._heard)

    def add(self, event: LoadEvent, order: int, source: str) -> None:
        """
        Take in one event of this load.
        """
        rank = event.identity.rank
        if not 0 <= rank < MAX_RANKS:
            self.left_out += 1
            return
        if rank not in self.nodes:
            self._meet(event.identity)
        self.world_size = max(self.world_size, min(event.identity.world_size, MAX_RANKS), rank + 1)
        self.last_at = max(self.last_at, event.at)
        if isinstance(event, LoadStalled):
            self._stalled(rank, event)
            return
        self.first_at = min(self.first_at, event.at)
        self.phases.setdefault(rank, FIRST_PHASE)
        if isinstance(event, LoadStarted):
            self._started(rank, event)
        elif isinstance(event, PhaseEntered):
            if event.findings and len(self.early) < MAX_GROUPS:
                self.early[rank] = event.findings
            if event.at >= self._phase_at.get(rank, 0.0):
                self._phase_at[rank] = event.at
                self.phases[rank] = self._share(event.phase)
        elif isinstance(event, LoadFailing):
            self._failing(rank, Failure(order, event.at, source, event.error, not is_loss(event.error)))
        else:
            self._finished(rank, event, order, source)

    def standing(self, rank: int) -> tuple[str | None, float]:
        """
        The phase that a rank has come to last, and when: seconds since the epoch.
        """
        return self.phases.get(rank), self._phase_at.get(rank, self.first_at)

    @property
    def reach(self) -> Collection[int]:
        """
        The ranks that are to be expected: all of each node of which one has been heard.

        The whole world where a node turns out to have more ranks than they say.
        """
        if any(heard > told for heard, told in self._heard.values()):
            return range(self.world_size)
        return sorted(rank for rank in self._reach if rank < self.world_size)

    def of_its_ranks(self, some: Collection[int]) -> Collection[int]:
        """
        Those of some ranks that make this load; all of them, unless it is said to be one of a few ranks.
        """
        return some if not self._members else [rank for rank in some if rank in self._members]

    def _meet(self, who: Identity) -> None:
        self.nodes[who.rank] = self._share(who.node)
        counts = self._heard.setdefault(self.nodes[who.rank], [0, 0])
        beside = min(who.local_world_size, MAX_NODE_RANKS)
        counts[0] += 1
        counts[1] = max(counts[1], beside)
        first = who.rank - who.local_rank
        if first not in self._reach or who.rank not in self._reach:
            self._reach.update(range(max(0, first), first + beside), (who.rank,))

    def _started(self, rank: int, event: LoadStarted) -> None:
        self.head = self.head or event
        if event.members is not None:
            with contextlib.suppress(ValueError):
                self._members.update(ranks.parse(event.members, MAX_RANKS))
        if event.path is not None:
            self.paths[rank] = self._share(event.path)

    def _stalled(self, rank: int, event: LoadStalled) -> None:
        if event.phase is not None:
            self.phases.setdefault(rank, self._share(event.phase))
        known = self.stalls.get(rank)
        if known is None or event.at >= known.at:
            stack = self._share(event.stack[-MAX_STACK_CHARS:], MAX_STACKS)
            self.stalls[rank] = Stall(event.phase, event.since, event.at, stack)

    def _failing(self, rank: int, failure: Failure) -> None:
        known = self.failures.get(rank)
        if known is None or (failure.own and not known.own):
            error = replace(failure.error, message=self._share(failure.error.message, MAX_GROUPS))
            self.failures[rank] = replace(failure, error=error)

    def _finished(self, rank: int, event: LoadFinished, order: int, source: str) -> None:
        report = event.report
        known = self.finished.get(rank)
        if known is not None and self._rank_of(known.report, rank) >= (SEVERITY[report.verdict], report.ended_at):
            return
        if known is not None:
            known.ranks.discard(rank)
        self.finished[rank] = self._shared_report(report, rank)
        self.head = report if not isinstance(self.head, LoadReport) else self.head
        self.first_at = min(self.first_at, report.started_at)
        self.times[rank] = (report.started_at, report.ended_at, report.bytes_read)
        if report.path is not None:
            self.paths[rank] = self._share(report.path)
        for phase in report.phases[:MAX_PHASES]:
            if phase.name in self.phase_seconds or len(self.phase_seconds) < MAX_PHASES:
                spent = self.phase_seconds.setdefault(phase.name, {})
                spent[rank] = phase.seconds
        if report.error is not None:
            own = not is_loss(report.error) and not any(found.code == "peer_failed" for found in report.findings)
            self._failing(rank, Failure(order, event.at, source, report.error, own))

    def _rank_of(self, report: LoadReport, rank: int) -> tuple[int, float]:
        return SEVERITY[report.verdict], self.times[rank][1]

    def _shared_report(self, report: LoadReport, rank: int) -> SharedReport:
        key = in_common(report, rank)
        one = self.reports.get(key)
        if one is None and len(self.reports) >= MAX_GROUPS:
            self.left_out += 1
            report = _short(report)
            key = in_common(report, rank)
            one = self.reports.get(key)
        if one is None:
            one = self.reports[key] = SharedReport(report)
        one.ranks.add(rank)
        if rank <= one.report.identity.rank:
            one.report = report
        return one

    def _share(self, text: str, limit: int = 4096) -> str:
        """
        One object for equal texts; beyond `limit` distinct ones the text is kept short instead.
        """
        shared = self._texts.get(text)
        if shared is None:
            if len(self._texts) >= limit:
                text = text[:200]
            shared = self._texts.setdefault(text, text)
        return shared


def _short(report: LoadReport) -> LoadReport:
    """
    The least that a report says, for a load in which too many different things are said.
    """
    text = "too many different reports in this load: this one was cut to its verdict"
    return LoadReport(
        load_id=report.load_id,
        ordinal=report.ordinal,
        identity=report.identity,
        framework=report.framework,
        entry_point=report.entry_point,
        verdict=report.verdict,
        started_at=report.started_at,
        ended_at=report.ended_at,
        findings=(Finding("left_out", "info", text),),
    )
