"""
The reporter of a job: folds the events of its ranks, keeps the records and prints one report for each load.

Used by a launcher, which receives the events of more than one process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from ckpt_sentry.collector.aggregate import Aggregator
from ckpt_sentry.collector.groups import MAX_RANKS
from ckpt_sentry.collector.repeats import Repeats
from ckpt_sentry.collector.wording import was
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.render.stack import first_line
from ckpt_sentry.session.process_reporter import print_line, print_report
from ckpt_sentry.transport import otel, otlp_json
from ckpt_sentry.transport.events import LoadFailing, LoadFinished, LoadStalled, LoadStarted, RankEnded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_sentry.collector.aggregate import Aggregate
    from ckpt_sentry.collector.records import Records
    from ckpt_sentry.core.report import Identity
    from ckpt_sentry.transport.events import Event

QUIET_SECONDS = 15.0
"""
The report of a load that has raised waits for the end of the job, so that it stands below what the job itself prints;
but not longer than this much silence, for the job may go on.
"""

PARTIAL_SECONDS = 5.0
"""A load that only some of the ranks take part in counts as complete after this much silence."""

ANSWER_SECONDS = 3.0
"""How long the report of a stall waits for the ranks' answers."""

NO_STACK = "(no answer: native code holds its interpreter, or the process is stopped)"

LONGEST_WORD = 200
MOST_RUNS = 1_000
MOST_REPORTED = 10_000


@dataclass(slots=True)
class _Watch:
    """
    A load that has not been reported yet: whether it is good so far, or has raised on a rank, when it began and when
    its last event came.

    Times are of the monotonic clock, but for `since`, which is in seconds since the epoch. `asked` is when the ranks
    were asked for their stacks, or the first of them sent its own; `hung` whether that has been reported.
    """

    since: float
    began: float
    last: float
    good: bool = True
    raised: bool = False
    asked: float | None = None
    hung: bool = False

    def quiet(self) -> float:
        return time.monotonic() - self.last


class JobReporter:
    """
    Reports for the workers of one launcher. May be called by threads.

    Args:
        records: where every event is kept.
        local_ranks: how many workers the launcher has; None where their events tell that.
        source: the receiver's name, where all events come to it as they happen; None where launchers pass them on, so
            that only the clocks of their nodes tell what was first.
    """

    def __init__(self, records: Records, local_ranks: int | None, source: str | None) -> None:
        self._records = records
        self._kept = Repeats(records, is_alone=False)
        self._local_ranks = local_ranks
        self._first_rank: int | None = None
        self._source = source
        self._aggregator = Aggregator()
        self._watches: dict[str, _Watch] = {}
        self._reported: dict[str, None] = {}
        self._runs: dict[str, Aggregate | None] = {}
        self._ranks: dict[tuple[str, int], Identity] = {}
        self._vanished: deque[Identity] = deque(maxlen=MAX_RANKS)
        self._lock = threading.RLock()

    def receive(self, request: Mapping[str, Any]) -> int:
        """
        Take one OTLP request (in JSON form) of a worker. Returns how many of its records were refused.
        """
        with self._lock:
            events, refused = otlp_json.decode(request)
            # What is only known by a pid is kept once its rank is known, see `_note`.
            own = [event for event in events if event.identity.run_id]
            if own or not events:
                self._kept.add(own, request if len(own) == len(events) else otlp_json.encode(own))
            for event in events:
                self._note(event)
                if isinstance(event, (LoadStarted, LoadFinished)):
                    self._report_ready()
            return refused

    def on_event(self, event: Event) -> None:
        """
        Take one event of this very process. Workers export what they know themselves; this they do not know.
        """
        with self._lock:
            if event.identity.run_id:
                self._kept.add((event,), otlp_json.encode((event,)))
            self._note(event)
        otel.event(event)

    def on_disconnect(self, who: Identity) -> None:
        """
        A worker is no longer there, and nobody has seen how it ended.
        """
        with self._lock:
            self._vanished.append(self._ranks.setdefault((who.node, who.pid), who))
            self.on_event(RankEnded(identity=self._vanished[-1], at=time.time(), how="exited"))

    def assign_cause(self, signal: str) -> None:
        """
        One of the workers was killed by a signal: the first that is gone without a word, from amid a load if there is
        one. Those that left a load after it were then stopped.
        """
        with self._lock:
            gone = [who for who in self._vanished if self._aggregator.unexplained(who)]
            amid = [who for who in gone if any(self._is_amid(load_id, who) for load_id in self._watched())]
            for place, who in enumerate(amid or gone[:1]):
                how: Literal["stopped", "killed"] = "stopped" if place else "killed"
                self.on_event(RankEnded(identity=who, at=time.time(), how=how, signal=None if place else signal))

    def _is_amid(self, load_id: str, who: Identity) -> bool:
        progress = self._aggregator.progress(load_id)
        return who.rank in progress.started - progress.finished

    def runs(self) -> tuple[str, ...]:
        """
        The runs of which an event has come.
        """
        with self._lock:
            return tuple(self._runs)

    def overdue(self, seconds: float) -> dict[str, float]:
        """
        Loads that have lasted longer and that nobody has asked about; each with when it began (since the epoch).

        The ranks are to be asked now: what is still unanswered a moment later is reported as it stands.
        """
        with self._lock:
            now = time.monotonic()
            found = {}
            for load_id, watch in self._watches.items():
                if watch.asked is None and now - watch.began > seconds and not self._is_complete(load_id):
                    watch.asked = now
                    found[load_id] = watch.since
            return found

    def tick(self) -> None:
        """
        Report what is ready to be reported. Called now and then while the workers run.
        """
        with self._lock:
            self._report_ready()
            for load_id, watch in list(self._watches.items()):
                if watch.asked is not None and not watch.hung and time.monotonic() - watch.asked > ANSWER_SECONDS:
                    watch.hung = True
                    self._report_hanging(load_id)

    def settle(self) -> None:
        """
        Report what is left: nothing more will come.
        """
        with self._lock:
            for load_id in self._watched():
                self._report(load_id, settled=True)
            if self._source is not None:
                for run_id, last in self._runs.items():
                    self._report_end(run_id, last)

    def _note(self, event: Event) -> None:
        who = event.identity
        load_id = otlp_json.load_id(event)
        if load_id in self._reported:
            if not self._aggregator.begins_anew(event):
                return
            del self._reported[load_id]
        if not who.run_id:
            # Whoever started a process knows its pid, and not its rank.
            if (who.node, who.pid) in self._ranks:
                self.on_event(replace(event, identity=self._ranks[who.node, who.pid]))
            return
        self._ranks[who.node, who.pid] = who
        # What was not acknowledged comes again: that is no news of a load that was reported.
        anew = self._aggregator.begins_anew(event)
        if anew:
            self._settle_run(who.run_id)
        is_news = anew or load_id in self._watches or not self._aggregator.has_finished(load_id, who.rank)
        self._aggregator.add(event, source=self._source or who.node)
        self._runs.setdefault(event.identity.run_id, None)
        _bound(self._runs, MOST_RUNS)
        _bound(self._ranks, MAX_RANKS)
        if load_id is not None and is_news:
            self._follow(load_id, event)

    def _follow(self, load_id: str, event: Event) -> None:
        if not isinstance(event, LoadStalled):
            self._first_rank = max(0, event.identity.rank - event.identity.local_rank)
        now = time.monotonic()
        watch = self._watches.setdefault(load_id, _Watch(event.at, began=now, last=now))
        watch.last = now
        if isinstance(event, LoadFailing):
            watch.good, watch.raised = False, True
        elif isinstance(event, LoadStalled):
            watch.asked = watch.asked or watch.last
        elif isinstance(event, LoadFinished):
            watch.good = watch.good and event.report.verdict == "ok"
            watch.raised = watch.raised or event.report.error is not None

    def _expected(self) -> range | None:
        """
        The ranks of this launcher: nothing is concluded from the silence of other nodes.
        """
        if self._local_ranks is None or self._first_rank is None:
            return None
        return range(self._first_rank, self._first_rank + self._local_ranks)

    def _is_complete(self, load_id: str) -> bool:
        return self._aggregator.complete(load_id, self._expected())

    def _is_ready(self, load_id: str) -> bool:
        watch = self._watches[load_id]
        if self._is_complete(load_id):
            return not watch.raised or self._aggregator.is_past(load_id) or watch.quiet() > QUIET_SECONDS
        if watch.quiet() <= PARTIAL_SECONDS:
            return False
        progress = self._aggregator.progress(load_id)
        return progress.started <= progress.finished

    def _report_ready(self) -> None:
        for load_id in self._watched():
            if self._is_ready(load_id):
                self._report(load_id, settled=False)

    def _watched(self) -> list[str]:
        """
        The loads that have not been reported. One that the aggregator had to forget, among too many, never will be.
        """
        for load_id in [load_id for load_id in self._watches if self._aggregator.run_of(load_id) is None]:
            del self._watches[load_id]
        return list(self._watches)

    def _settle_run(self, run_id: str) -> None:
        """
        Report what is left of a run: another that has its name begins.
        """
        for load_id in self._watched():
            if self._aggregator.run_of(load_id) == run_id:
                self._report(load_id, settled=True)

    @contained("job_reporter.report")
    def _report(self, load_id: str, *, settled: bool) -> None:
        good = self._watches.pop(load_id).good
        complete = self._is_complete(load_id)
        aggregate = self._aggregator.aggregate(load_id, settled=settled, expected=self._expected())
        if aggregate is None:
            return
        self._runs[aggregate.run_id] = aggregate
        # Of the launchers of several nodes the first one says that all is well.
        is_second = self._source is not None and self._first_rank
        if not (good and aggregate.verdict == "ok" and is_second):
            print_report(aggregate, self._records)
        if complete and good:
            self._forget(load_id)

    def _forget(self, load_id: str) -> None:
        """
        Forget a load that has been reported: a job may make many thousands.
        """
        self._watches.pop(load_id, None)
        self._aggregator.forget(load_id)
        self._reported[load_id] = None
        _bound(self._reported, MOST_REPORTED)

    @contained("job_reporter.say_hanging")
    def _report_hanging(self, load_id: str) -> None:
        """
        Report a load that hangs. Ranks that are in it and did not answer are reported by their last phase.
        """
        progress = self._aggregator.progress(load_id)
        silent = progress.started - progress.finished - progress.stalled - progress.ended
        expected = self._expected()
        known = {who.rank: who for who in self._ranks.values() if expected is not None and who.rank in expected}
        for rank in sorted(silent & known.keys()):
            phase, since = self._aggregator.standing(load_id, rank)
            now = time.time()
            self.on_event(
                LoadStalled(identity=known[rank], at=now, load_id=load_id, phase=phase, since=since, stack=NO_STACK)
            )
        aggregate = self._aggregator.aggregate(load_id, expected=expected)
        if aggregate is not None:
            print_report(aggregate, self._records)

    @contained("job_reporter.say_end")
    def _report_end(self, run_id: str, last: Aggregate | None) -> None:
        """
        Name the rank that ended the run, unless the report of a load has: one line.
        """
        end = self._aggregator.first_end(run_id)
        if end is None:
            return
        attempt = end.identity.attempt
        if last is None or last.attempt < attempt:
            when = f"; no load was seen in attempt {attempt + 1}" if attempt else "; no load was seen before that"
        elif last.error is None and last.verdict != "stalled":
            when = f" after its last load ({last.entry_point}) had ended"
        else:
            return
        print_line(f"rank {end.identity.rank} {first_line(was(end))[:LONGEST_WORD]}{when}")


def _bound(table: dict[Any, Any], most: int) -> None:
    while len(table) > most:
        del table[next(iter(table))]
