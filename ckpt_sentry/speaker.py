"""
Who speaks for a run: folds the events of its ranks, keeps the records and says one report for each load.

A launcher speaks for all of its workers (`Speaker`); a process without a launcher speaks for itself (`own`).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config, identity
from ckpt_sentry.collector.aggregate import Aggregator
from ckpt_sentry.collector.records import Records, place
from ckpt_sentry.render import terminal
from ckpt_sentry.telemetry import otlp_json
from ckpt_sentry.telemetry.events import LoadFailing, LoadFinished

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_sentry.audit.report import Identity
    from ckpt_sentry.collector.aggregate import Aggregate
    from ckpt_sentry.telemetry.events import Event

QUIET_SECONDS = 15.0
"""
A report that is not good waits for the end of the job, so that it stands below what the job itself prints; but not
longer than this much silence, for the job may go on.
"""

PARTIAL_SECONDS = 5.0
"""A load that only some of the ranks take part in counts as complete after this much silence."""


@dataclass(slots=True)
class _Watch:
    """
    A load that has not been said yet: whether it is good so far, and when something was last heard of it.
    """

    good: bool = True
    last: float = field(default_factory=time.monotonic)

    def quiet(self) -> float:
        return time.monotonic() - self.last


class Speaker:
    """
    Speaks for the `local_ranks` workers of one launcher. May be called from several threads.
    """

    def __init__(self, records: Records, local_ranks: int, source: str) -> None:
        self._records = records
        self._local_ranks = local_ranks
        self._first_rank: int | None = None
        self._source = source
        self._aggregator = Aggregator()
        self._watches: dict[str, _Watch] = {}
        self._lock = threading.RLock()

    def receive(self, signal: str, request: Mapping[str, Any]) -> int:
        """
        Take one OTLP request (in JSON form) of a worker. Returns how many of its records were refused.
        """
        with self._lock:
            self._records.append(request)
            if signal != "logs":
                return 0
            events, refused = otlp_json.decode(request)
            for event in events:
                self._note(event)
            return refused

    def hear(self, event: Event) -> None:
        """
        Take one event of this very process.
        """
        with self._lock:
            self._records.append(otlp_json.encode((event,)))
            self._note(event)

    def tick(self) -> None:
        """
        Say what is ready to be said. Called now and then while the workers run.
        """
        with self._lock:
            for load_id in [load_id for load_id in self._watches if self._is_ready(load_id)]:
                self._say(load_id, settled=False)

    def settle(self) -> None:
        """
        Say what is left: nothing more will come.
        """
        with self._lock:
            for load_id in list(self._watches):
                self._say(load_id, settled=True)

    def _note(self, event: Event) -> None:
        self._aggregator.add(event, source=self._source)
        load_id = otlp_json.load_id(event)
        if load_id is None:
            return
        self._first_rank = event.identity.rank - event.identity.local_rank
        watch = self._watches.setdefault(load_id, _Watch())
        watch.last = time.monotonic()
        if isinstance(event, LoadFailing):
            watch.good = False
        elif isinstance(event, LoadFinished):
            watch.good = watch.good and event.report.verdict == "ok"
            if self._is_ready(load_id):
                self._say(load_id, settled=False)

    def _expected(self) -> range | None:
        """
        The ranks of this launcher: nothing is concluded from the silence of other nodes.
        """
        return None if self._first_rank is None else range(self._first_rank, self._first_rank + self._local_ranks)

    def _is_ready(self, load_id: str) -> bool:
        watch = self._watches[load_id]
        if self._aggregator.complete(load_id, self._expected()):
            return watch.good or watch.quiet() > QUIET_SECONDS
        progress = self._aggregator.progress(load_id)
        return progress.started <= progress.finished and watch.quiet() > PARTIAL_SECONDS

    def _say(self, load_id: str, *, settled: bool) -> None:
        watch = self._watches.pop(load_id)
        aggregate = self._aggregator.aggregate(load_id, settled=settled, expected=self._expected())
        # Of several nodes the first one says that all is well.
        if aggregate is not None and not (watch.good and aggregate.verdict == "ok" and self._first_rank):
            say(aggregate)


class OwnSpeaker:
    """
    Speaks for this process alone, at once.

    Of several ranks without a common launcher only one is heard: the first for what all of them see, and each for a
    failure of its own.
    """

    def __init__(self) -> None:
        me = identity.identity()
        self._records = records_for(me)
        self._aggregators: dict[str, Aggregator] = {}
        self._lock = threading.Lock()

    def hear(self, event: Event) -> None:
        """
        Take one event of this process; a finished load is said.
        """
        with self._lock:
            self._records.append(otlp_json.encode((event,)))
            load_id = otlp_json.load_id(event)
            if load_id is None:
                return
            aggregator = self._aggregators.setdefault(load_id, Aggregator())
            aggregator.add(event, source=f"{event.identity.node}:{event.identity.pid}")
            if not isinstance(event, LoadFinished):
                return
            del self._aggregators[load_id]
            aggregate = aggregator.aggregate(load_id, expected=(event.identity.rank,))
        if aggregate is not None and (event.identity.rank == 0 or _is_own_failure(event)):
            say(aggregate)


def records_for(me: Identity) -> Records:
    """
    The records of this process, where the settings want them.
    """
    where = place(config.settings().dir, me.run_id)
    return Records(where, run_id=me.run_id, node=me.node, pid=me.pid)


_own: OwnSpeaker | None = None
_own_lock = threading.Lock()


def own() -> OwnSpeaker:
    """
    The speaker of this process, made at first use.
    """
    global _own  # noqa: PLW0603 - one for the process, as are its settings
    with _own_lock:
        if _own is None:
            _own = OwnSpeaker()
        return _own


def _after_fork_in_child() -> None:
    global _own, _own_lock  # noqa: PLW0603 - the parent's may have been in use at the fork
    _own, _own_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def say(aggregate: Aggregate) -> None:
    """
    Print the report of a load for a person, unless `CKPT_SENTRY_LOG` leaves that to the log lines.
    """
    if config.settings().log in ("auto", "console"):
        terminal.show(aggregate)


def _is_own_failure(event: LoadFinished) -> bool:
    report = event.report
    return report.error is not None and all(finding.code != "peer_failed" for finding in report.findings)
