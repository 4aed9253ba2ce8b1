"""
Where the events of a load go: to the launcher, to OpenTelemetry, to the log, or to this process's own reporter where
there is no launcher, or one that does not listen.

A good load never waits for any of them longer than `GOOD_SECONDS` in all, a failing one `FAILING_SECONDS`.
"""

from __future__ import annotations

import atexit
import time
from typing import TYPE_CHECKING

from ckpt_sentry import config, names
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.session import stall
from ckpt_sentry.transport import log, otel

if TYPE_CHECKING:
    from ckpt_sentry.session.process_reporter import ProcessReporter
    from ckpt_sentry.transport import connection
    from ckpt_sentry.transport.connection import Connection
    from ckpt_sentry.transport.events import Event, LoadFailing, LoadFinished
else:
    connection = later("ckpt_sentry.transport.connection")

GOOD_SECONDS = 0.1
FAILING_SECONDS = 1.5


def prepare() -> None:
    """
    Import what the first load needs, now rather than then. A worker of a launcher does not report for itself.
    """
    if config.settings().socket is None:
        _process_reporter()


def _process_reporter() -> ProcessReporter:
    # Not at the top: aggregates and their text are half of what this package takes to import.
    from ckpt_sentry.session import process_reporter

    return process_reporter.own()


class Sinks:
    """
    The sinks of one load.
    """

    def __init__(self) -> None:
        self._settings = config.settings()
        self._launcher = stall.connect()
        self._otel = otel.active()
        self._left = GOOD_SECONDS
        self._failing = False

    def event(self, event: Event) -> None:
        """
        Something has happened in a load that is well so far.
        """
        self._deliver(event)

    def urgent(self, event: LoadFailing) -> None:
        """
        The load fails on this rank: from here on what is known has to leave before the process may be killed.
        """
        self._begin_failing()
        self._deliver(event)
        self._make_sure()

    def finished(self, event: LoadFinished) -> None:
        """
        The load has ended: hand over the report, and wait for its arrival within what is left of the time.
        """
        if event.report.verdict != "ok":
            self._begin_failing()
        self._deliver(event)
        if self._failing:
            self._make_sure()
        self._write(event)
        if self._otel:
            self._export(event)

    def _begin_failing(self) -> None:
        if not self._failing:
            self._failing = True
            self._left = FAILING_SECONDS

    @contained("sinks.deliver")
    def _deliver(self, event: Event) -> None:
        if self._launcher is None:
            _process_reporter().on_event(event)
        else:
            began = time.perf_counter()
            if not self._launcher.send(event, self._left):
                self._report_here(self._launcher, event)
            self._left -= time.perf_counter() - began
        if self._otel and event.name != names.EVENT_LOAD_FINISHED:
            otel.event(event)

    @contained("sinks.make_sure")
    def _make_sure(self) -> None:
        """
        Wait until the launcher has taken everything in.
        """
        if self._launcher is None:
            return
        began = time.perf_counter()
        if not self._launcher.taken(self._left):
            self._report_here(self._launcher)
        self._left -= time.perf_counter() - began

    def _report_here(self, launcher: Connection, *last: Event) -> None:
        """
        Report in this process what the launcher has not taken in: it is gone (the job has outlived it, and its
        environment with it) or does not listen.
        """
        self._launcher = None
        untaken = launcher.untaken()
        for event in (*untaken, *(event for event in last if event not in untaken)):
            _process_reporter().on_event(event)

    @contained("sinks.log")
    def _write(self, event: LoadFinished) -> None:
        log.write(event.report, self._settings)

    @contained("sinks.export")
    def _export(self, event: LoadFinished) -> None:
        otel.finished(event.report)
        if self._failing:
            otel.flush(max(0.0, self._left))


@contained("sinks.settle")
def _settle() -> None:
    """
    At the end of the process: say the good loads that the launcher has not taken in. Nobody has waited for that.
    """
    if config.settings().socket is None:
        return
    launcher = connection.opened()
    if launcher is not None and not launcher.taken(GOOD_SECONDS):
        for event in launcher.untaken():
            _process_reporter().on_event(event)


atexit.register(_settle)
