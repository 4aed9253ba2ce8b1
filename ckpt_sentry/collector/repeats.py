"""
Good loads that repeat take one another's place in the records: a job may make many thousands.

The first `KEPT` of a kind stay whole, and so does the newest; those between are counted in a line of their own
(`LoadsLeftOut`). Of those that a process itself makes within one second only one stays whole (`Said`).

The lines of a load are written as they come, so that a process that is killed is known by what it began, and are taken
back once the load has ended well and a later one has too. Lines of anything that is not well stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.core import ranks
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import LoadFailing, LoadFinished, LoadsLeftOut, LoadStalled, LoadStarted, PhaseEntered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_sentry.collector.records import Records
    from ckpt_sentry.core.report import LoadReport
    from ckpt_sentry.transport.events import Event

KEPT: Final = 16
"""Good loads of a kind that stay whole."""
SECONDS: Final = 1.0
"""Of good loads that follow one another, one in so many seconds is said and recorded whole."""
MOST_TAIL: Final = 2**19
"""Bytes at the end of the file that may still be taken back."""
MOST_KINDS: Final = 64

_Kind = tuple[str, str, str, str]
"""Run, framework, entry point and model: loads into another model are no repetition."""


@dataclass(slots=True)
class _Open:
    """
    A load that has not ended on all ranks: how many are awaited, and which have ended.
    """

    awaited: int
    good: bool = True
    finished: set[int] = field(default_factory=set)


class Said:
    """
    Which good loads have been said so often that the next one need not be, unless some time has passed.

    Loads are alike where all that is known of them is, but for path, step, bytes and times.
    """

    def __init__(self) -> None:
        self._known: dict[object, Told] = {}

    def so_far(self, event: LoadFinished) -> Told:
        """
        Take in a load that has ended: what has been said of those like it.
        """
        if not _is_good(event):
            return Told(event.at)
        told = self._known.setdefault(_alike(event.report), Told(event.at))
        while len(self._known) > MOST_KINDS:
            del self._known[next(iter(self._known))]
        told.loads += 1
        told.is_enough = told.loads > KEPT and 0 <= event.at - told.at < SECONDS
        if not told.is_enough:
            told.at = event.at
        return told


@dataclass(slots=True)
class Told:
    """
    What has been said of good loads that are alike.
    """

    at: float
    """When the newest of those that were said ended."""
    loads: int = 0
    unsaid: int = 0
    """Those since then."""
    is_enough: bool = False
    """Whether the newest need not be said."""


class Repeats:
    """
    Writes events to `records`. Not thread-safe: whoever calls it holds a lock.

    Args:
        records: the file of this process.
        is_alone: whether the events are of this process only, else of all ranks of this machine.
    """

    def __init__(self, records: Records, *, is_alone: bool) -> None:
        self._records = records
        self._is_alone = is_alone
        self._open: dict[str, _Open] = {}
        self._good: dict[_Kind, int] = {}
        self._newest: dict[_Kind, str] = {}
        self._left_out: dict[_Kind, LoadsLeftOut] = {}
        self._tail: list[tuple[object, bytes]] = []
        """Lines at the end of the file that may be taken back, each with its load, or its kind for a count."""

    def add(self, events: Sequence[Event], request: Mapping[str, Any]) -> bool:
        """
        Keep some events, of which `request` is the OTLP form; False if the disk would not take them.
        """
        return self.add_line(events, otlp_json.dumped(request))

    def add_line(self, events: Sequence[Event], line: bytes) -> bool:
        """
        As `add`, with the request as a line already.
        """
        written = self._records.append_line(line)
        loads = {otlp_json.load_id(event) for event in events}
        (load_id,) = loads if len(loads) == 1 else (None,)
        if not written or load_id is None:
            self._settle()
            for event in events:
                self._open.pop(otlp_json.load_id(event) or "", None)
            return written
        self._tail.append((load_id, line))
        for event in events:
            self._follow(load_id, event)
        if sum(len(line) for _, line in self._tail) > MOST_TAIL:
            self._settle()
        return True

    def _settle(self) -> None:
        """
        Let all that has been written stand.
        """
        self._tail.clear()
        self._newest.clear()

    def _follow(self, load_id: str, event: Event) -> None:
        if isinstance(event, LoadStarted):
            self._open.setdefault(load_id, _Open(self._awaited(event)))
            while len(self._open) > MOST_KINDS:
                del self._open[next(iter(self._open))]
        one = self._open.get(load_id)
        if one is None or isinstance(event, LoadFailing | LoadStalled) or not _is_of_a_load(event):
            self._open.pop(load_id, None)
            self._settle()
            return
        if isinstance(event, LoadFinished):
            one.finished.add(event.identity.rank)
            one.good &= _is_good(event)
            if len(one.finished) >= one.awaited:
                del self._open[load_id]
                self._ended(load_id, event, is_good=one.good)

    def _awaited(self, event: LoadStarted) -> int:
        if self._is_alone:
            return 1
        beside = max(1, event.identity.local_world_size)
        try:
            return min(beside, len(ranks.parse(event.members))) if event.members else beside
        except ValueError:
            return beside

    def _ended(self, load_id: str, event: LoadFinished, *, is_good: bool) -> None:
        kind = _kind(event.report)
        if not is_good or (kind not in self._good and len(self._good) >= MOST_KINDS):
            self._settle()
            return
        self._good[kind] = self._good.get(kind, 0) + 1
        if self._good[kind] <= KEPT:
            self._settle()
            return
        before, self._newest[kind] = self._newest.get(kind), load_id
        if before is not None:
            self._take_back(kind, before, event)

    def count(self, event: LoadFinished) -> bool:
        """
        Count a good load in place of its lines, its end being known only here; False where its lines stay, and this
        event is to be added to them: it is among the first of its kind, or something that is not well lies beside it.
        """
        load_id, kind = event.report.load_id, _kind(event.report)
        one = self._open.get(load_id)
        if one is None or not _is_good(event) or self._good.get(kind, 0) < KEPT:
            return False
        if not any(whose == load_id for whose, _ in self._tail) or not self._take_back(kind, load_id, event):
            return False
        del self._open[load_id]
        self._good[kind] += 1
        return True

    def _take_back(self, kind: _Kind, load_id: str, event: LoadFinished) -> bool:
        known = self._left_out.get(kind)
        count = LoadsLeftOut(
            identity=event.identity,
            at=event.at,
            since=event.report.started_at if known is None else known.since,
            framework=event.report.framework,
            entry_point=event.report.entry_point,
            model=_model(event.report),
            count=1 if known is None else known.count + 1,
        )
        line = otlp_json.line(count)
        size = sum(len(line) for _, line in self._tail)
        tail = [(kind, line), *((whose, line) for whose, line in self._tail if whose not in (load_id, kind))]
        if self._records.replace_end(size, b"".join(line for _, line in tail)):
            self._tail, self._left_out[kind] = tail, count
            return True
        self._settle()
        return False


def _is_good(event: LoadFinished) -> bool:
    return event.report.verdict == "ok" and all(found.level == "info" for found in event.report.findings)


def _kind(report: LoadReport) -> _Kind:
    return report.identity.run_id, report.framework, report.entry_point, _model(report)


def _alike(report: LoadReport) -> object:
    return (
        report.framework,
        report.entry_point,
        report.format,
        report.model,
        report.missing,
        report.unexpected,
        report.coverage,
        report.utilisation,
        report.findings,
        report.key_digest,
    )


def _model(report: LoadReport) -> str:
    model = report.model
    return "" if model is None else f"{model.name or 'model'} · {model.keys:,} keys · {model.elements:,} elements"


def _is_of_a_load(event: Event) -> bool:
    return isinstance(event, LoadStarted | PhaseEntered | LoadFinished)
