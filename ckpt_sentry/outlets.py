"""
Where the events of a load go: to the launcher's receiver, to OpenTelemetry, to the log, or to this process's own
speaker where there is no launcher.

A good load never waits for any of them longer than `GOOD_SECONDS` in all, a failing one `FAILING_SECONDS`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckpt_sentry import config, names, stall
from ckpt_sentry.guard import contained
from ckpt_sentry.telemetry import log, otel
from ckpt_sentry.telemetry.channel import Channel
from ckpt_sentry.telemetry.events import PhaseEntered

if TYPE_CHECKING:
    from ckpt_sentry.speaker import OwnSpeaker
    from ckpt_sentry.telemetry.events import Event, LoadFailing, LoadFinished

GOOD_SECONDS = 0.1
FAILING_SECONDS = 1.5


def prepare() -> None:
    """
    Import what the first load needs, now rather than then. A worker of a launcher does not speak for itself.
    """
    if config.settings().receiver is None:
        _own_speaker()


def _own_speaker() -> OwnSpeaker:
    # Not at the top: aggregates and their text are half of what this package takes to import.
    from ckpt_sentry import speaker

    return speaker.own()


class Outlets:
    """
    The outlets of one load. Holds at most one connection, closed when the load has finished.
    """

    def __init__(self) -> None:
        settings = config.settings()
        self._settings = settings
        self._channel = Channel(settings.receiver, settings.token) if settings.receiver else None
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

    def finished(self, event: LoadFinished) -> None:
        """
        The load has ended: hand over the report, and wait for its arrival within what is left of the time.
        """
        if event.report.verdict != "ok":
            self._begin_failing()
        self._deliver(event)
        self._say(event)
        if self._otel:
            self._report(event)
        if self._channel is not None:
            self._channel.close()

    def _begin_failing(self) -> None:
        if not self._failing:
            self._failing = True
            self._left = FAILING_SECONDS

    @contained("outlets.deliver")
    def _deliver(self, event: Event) -> None:
        if self._channel is None:
            _own_speaker().hear(event)
        elif isinstance(event, PhaseEntered) and stall.tell(event):
            pass
        elif self._left > 0:
            began = time.perf_counter()
            self._channel.send(event, self._left)
            self._left -= time.perf_counter() - began
            if self._channel.gone:
                # What a launcher left behind in the environment of a job that outlives it: the job speaks for itself.
                self._channel = None
                _own_speaker().hear(event)
        if self._otel and event.name != names.EVENT_LOAD_FINISHED:
            otel.event(event)

    @contained("outlets.say")
    def _say(self, event: LoadFinished) -> None:
        log.say(event.report, self._settings)

    @contained("outlets.report")
    def _report(self, event: LoadFinished) -> None:
        otel.finished(event.report)
        if self._failing:
            otel.flush(max(0.0, self._left))
