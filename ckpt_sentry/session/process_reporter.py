"""
The reporter of a process without a launcher: keeps its records and prints one report for each of its loads.

Where there is a launcher, its `launcher.job_reporter` reports for all of its workers.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from typing import TYPE_CHECKING, Final

from ckpt_sentry import config, identity, names
from ckpt_sentry.collector.aggregate import Aggregator
from ckpt_sentry.collector.records import Records, place
from ckpt_sentry.collector.repeats import Repeats, Said
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.render import terminal
from ckpt_sentry.render.cells import visible
from ckpt_sentry.render.page import Segment
from ckpt_sentry.render.text import every_key
from ckpt_sentry.render.words import count
from ckpt_sentry.session import stall
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import LoadFinished, LoadStalled, LoadStarted, PhaseEntered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_sentry.collector.aggregate import Aggregate
    from ckpt_sentry.core.report import Identity
    from ckpt_sentry.transport.events import Event

ONE_REPORT: Final = "ckpt-sentry run -- COMMAND    one report for all ranks"
"""What to run where several ranks have no common launcher that reports for them."""

_SOON: Final = 0.02
"""Seconds."""


class ProcessReporter:
    """
    Reports for this process alone, at once.

    Of several ranks without a common launcher only one is heard: the first for what all of them see, and each for a
    failure of its own.
    """

    def __init__(self) -> None:
        config.warn_problems()
        me = identity.identity()
        self._records = records_for(me)
        self._kept = Repeats(self._records, is_alone=True)
        self._loads: dict[str, _UnderWay] = {}
        self._said = Said()
        self._calm: set[tuple[str, str]] = set()
        """Framework and entry point, where the newest load was a good one as there were many just before."""
        self._alarms: dict[str, stall.Alarm] = {}
        self._lock = threading.RLock()

    def on_event(self, event: Event) -> None:
        """
        Take one event of this process; a finished load is said.
        """
        load_id = otlp_json.load_id(event)
        with self._lock:
            if isinstance(event, LoadStarted):
                self._begin(event)
            if load_id is None:
                self._write((event,))
                return
            under_way = self._loads.setdefault(load_id, _UnderWay([], event.at))
            unsaid = 0
            if isinstance(event, LoadFinished):
                self._end(event)
                told = self._said.so_far(event)
                if told.is_enough and self._kept.count(event):
                    told.unsaid += 1
                    self._calm.add((event.report.framework, event.report.entry_point))
                    return
                unsaid, told.unsaid = told.unsaid, 0
            under_way.events.append(event)
            if under_way.holds_back(event):
                return
            self._write(under_way.unwritten())
            if not isinstance(event, (LoadFinished, LoadStalled)) or not prints():
                return
            if not (event.identity.rank == 0 or _is_own_trouble(event)):
                return
            aggregate = _aggregate(under_way.events, event.identity.rank)
        if aggregate is not None:
            if unsaid and terminal.is_worth_a_word(aggregate):
                print_line(f"{aggregate.entry_point}: {count(unsaid, 'more good load')} like the last one")
            print_report(aggregate, self._records, *([ONE_REPORT] if aggregate.world_size > 1 else []))

    def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._kept.add_line((event,), otlp_json.line(event))

    def _begin(self, event: LoadStarted) -> None:
        kind = event.framework, event.entry_point
        self._loads[event.load_id] = _UnderWay([], event.at, is_calm=kind in self._calm)
        self._calm.discard(kind)
        self._watch(event)

    def _end(self, event: LoadFinished) -> None:
        self._loads.pop(event.report.load_id, None)
        if (alarm := self._alarms.pop(event.report.load_id, None)) is not None:
            alarm.cancel()

    def _watch(self, event: LoadStarted) -> None:
        seconds = config.settings().stall_after
        if seconds != math.inf:
            self._alarms[event.load_id] = stall.Alarm(event.identity, event.load_id, seconds, self.on_event)


@dataclass(slots=True)
class _UnderWay:
    """
    A load that has begun and not ended: its events, and how many of them are in the records.
    """

    events: list[Event]
    began: float
    is_calm: bool = False
    written: int = 0

    def holds_back(self, event: Event) -> bool:
        """
        Whether its newest event need not be written yet: a phase at the very beginning of a load as there were many
        good ones just before.
        """
        return self.is_calm and type(event) is PhaseEntered and not event.findings and event.at - self.began < _SOON

    def unwritten(self) -> list[Event]:
        """
        The events that are to be written now.
        """
        found = self.events[self.written :]
        self.written = len(self.events)
        return found


def _aggregate(events: Sequence[Event], rank: int) -> Aggregate | None:
    """
    What the events of one load of this process come to.
    """
    aggregator = Aggregator()
    for event in events:
        aggregator.add(event, source=f"{event.identity.node}:{event.identity.pid}")
    return aggregator.aggregate(otlp_json.load_id(events[-1]) or "", expected=(rank,))


def records_for(me: Identity) -> Records:
    """
    The records of this process, where the settings want them.
    """
    where = place(config.settings().dir, me.run_id)
    return Records(where, run_id=me.run_id, node=me.node, pid=me.pid)


_own: ProcessReporter | None = None
_own_lock = threading.RLock()


def own() -> ProcessReporter:
    """
    The reporter of this process, made at first use.
    """
    global _own  # noqa: PLW0603 - one for the process, as are its settings
    with _own_lock:
        if _own is None:
            _own = ProcessReporter()
        return _own


def _after_fork_in_child() -> None:
    global _own, _own_lock
    _own, _own_lock = None, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def prints() -> bool:
    """
    Whether reports are printed for a person: unless `CKPT_SENTRY_LOG` leaves that to the log lines.
    """
    return config.settings().log in ("auto", "console")


def print_report(aggregate: Aggregate, records: Records, *more: str) -> None:
    """
    Print the report of a load for a person, where the settings want that.

    `more` are commands that would tell more than the records, which it says how to read.
    """
    if prints():
        terminal.show(aggregate, hints=(records.problem or every_key(aggregate), *more))


def print_line(text: str) -> None:
    """
    Print one line that is about a run rather than about a load.
    """
    if prints():
        terminal.write([(Segment(names.SCOPE, "name"), Segment(f" {visible(text)}"))], sys.stderr)


def _is_own_trouble(event: LoadFinished | LoadStalled) -> bool:
    if isinstance(event, LoadStalled):
        return False
    report = event.report
    return report.error is not None and all(finding.code != "peer_failed" for finding in report.findings)
