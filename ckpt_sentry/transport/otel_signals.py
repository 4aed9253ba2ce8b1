"""
Events as OpenTelemetry log records, and a report as spans and measurements; by the API, whoever provides it.

A load is over when its spans are made, so they get their times afterwards: an open span of a killed rank would never
leave it. What a killed rank began is told by the log events.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry._logs import SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from ckpt_sentry import __version__, identity, names
from ckpt_sentry.core import codec
from ckpt_sentry.core.escape import cut
from ckpt_sentry.transport import otlp_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from ckpt_sentry.core.report import LoadReport
    from ckpt_sentry.transport.events import Event, LoadFinished

__all__ = ["Ids", "Signals"]

_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
_RATIOS: Final = (0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1)
_BYTES: Final = tuple(4**power * 2**20 for power in range(11))
"""1 MiB to 1 TiB."""

_PASSING: Final = frozenset({"ok", "partial", "diverged"})
"""Verdicts after which the host goes on with what it asked for; any other sets the span's status to ERROR."""

_TOP: Final = (
    names.ATTR_RUN_ID,
    names.ATTR_ATTEMPT,
    names.ATTR_LOAD_ID,
    names.ATTR_ORDINAL,
    names.ATTR_FRAMEWORK,
    names.ATTR_ENTRY_POINT,
    names.ATTR_PATH,
    names.ATTR_FORMAT,
    names.ATTR_STEP,
    names.ATTR_STEP_SOURCE,
    names.ATTR_WORLD_SIZE,
)
"""What is the same on all ranks, and so stands on the root."""

_INT64: Final = range(-(2**63), 2**63)


class Ids(IdGenerator):
    """
    Span ids that no two ranks share, and the ids of the root that all ranks share.

    The SDK's generator draws from the global `random`: ranks that call `random.seed(0)` get the same span ids, and each
    draw moves the host's own sequence. This one draws from `entropy` (a number of bytes to that many random bytes), by
    default the operating system, so a fork needs no new seed either. `given` dictates ids instead.
    """

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy
        self._dictated = threading.local()

    @contextmanager
    def given(self, trace_id: int, span_id: int) -> Iterator[None]:
        """
        The next span that this thread starts within the block has these ids (the trace id only if it has no parent).
        """
        self._dictated.ids = (trace_id, span_id)
        try:
            yield
        finally:
            self._dictated.ids = None

    def generate_trace_id(self) -> int:
        dictated: tuple[int, int] | None = getattr(self._dictated, "ids", None)
        return dictated[0] if dictated else self._draw(16)

    def generate_span_id(self) -> int:
        dictated: tuple[int, int] | None = getattr(self._dictated, "ids", None)
        self._dictated.ids = None
        return dictated[1] if dictated else self._draw(8)

    def is_trace_id_random(self) -> bool:
        # A derived trace id is a hash: as evenly spread as a random one, which is all that samplers ask for.
        return True

    def _draw(self, size: int) -> int:
        """
        A number of `size` bytes, not 0: neither a trace nor a span may have that id.
        """
        while not (number := int.from_bytes(self._entropy(size), "big")):
            pass
        return number


class _Trace(NamedTuple):
    """
    Where a load hangs: its trace, the root of all ranks, and what TRACEPARENT puts above that root.
    """

    trace_id: int
    root_id: int
    above: int | None

    @classmethod
    def of(cls, load_id: str) -> _Trace:
        root_id = int(identity.root_span_id(load_id), 16)
        if (outer := identity.traceparent()) is None:
            return cls(int(load_id, 16), root_id, None)
        return cls(int(outer[0], 16), root_id, int(outer[1], 16))

    def below_root(self) -> Context:
        return _remote(self.trace_id, self.root_id)


class Signals:
    """
    One way out for logs, spans and measurements. A signal whose provider is None goes nowhere.
    """

    def __init__(
        self,
        tracers: TracerProvider | None = None,
        loggers: LoggerProvider | None = None,
        meters: MeterProvider | None = None,
        ids: Ids | None = None,
    ) -> None:
        self._tracer = tracers.get_tracer(names.SCOPE, __version__) if tracers else None
        self._logger = loggers.get_logger(names.SCOPE, __version__) if loggers else None
        self._meters = _histograms(meters) if meters else None
        self._ids = _take_over(self._tracer, ids or Ids())

    def event(self, event: Event) -> None:
        """
        Emit one log event: attributes to search by, the whole event as body.
        """
        if self._logger is None:
            return
        load_id, severity = otlp_json.load_id(event), otlp_json.severity(event)
        self._logger.emit(
            timestamp=_nanoseconds(event.at),
            # An event of a rank or a run belongs to no trace: not to the one that is open by chance, either.
            context=_Trace.of(load_id).below_root() if load_id else _nowhere(),
            severity_number=SeverityNumber(severity),
            severity_text=SeverityNumber(severity).name,
            body=_sendable(codec.dump(event)),
            attributes=_sendable(otlp_json.attributes(event)),
            event_name=event.name,
        )

    def report(self, finished: LoadFinished, caller: SpanContext | None) -> None:
        """
        Make the spans and measurements of a finished load. `caller` is the host's span at the time, to be linked to.
        """
        report = finished.report
        attributes = _sendable(otlp_json.attributes(finished))
        place = _Trace.of(report.load_id)
        context = place.below_root()
        if self._tracer is not None:
            if report.identity.rank == 0 and self._ids is not None:
                self._root(self._tracer, self._ids, report, place, attributes)
            context = self._rank(self._tracer, report, context, attributes, caller)
        if self._meters is not None:
            self._meters.record(report, context)

    def _root(self, tracer: Tracer, ids: Ids, report: LoadReport, place: _Trace, attributes: dict[str, Any]) -> None:
        """
        The span above all ranks. One rank makes it, in its own times: no rank knows the others'.
        """
        context = _nowhere() if place.above is None else _remote(place.trace_id, place.above)
        with ids.given(place.trace_id, place.root_id):
            span = tracer.start_span(
                names.SPAN_LOAD,
                context,
                attributes={name: attributes[name] for name in _TOP if name in attributes},
                start_time=_nanoseconds(report.started_at),
                record_exception=False,
            )
        _end(span, report, report.ended_at)

    def _rank(
        self,
        tracer: Tracer,
        report: LoadReport,
        context: Context,
        attributes: dict[str, Any],
        caller: SpanContext | None,
    ) -> Context:
        """
        The span of this rank with its phases below it; returns the context in which it is the current span.
        """
        who = report.identity
        texts = {names.ATTR_EXCEPTION_TYPE, names.ATTR_EXCEPTION_MESSAGE}
        own = {name: value for name, value in attributes.items() if name not in texts}
        span = tracer.start_span(
            names.SPAN_LOAD,
            context,
            attributes=own | {names.ATTR_LOCAL_RANK: who.local_rank, names.ATTR_PROCESS_PID: who.pid},
            links=[Link(caller)] if caller else None,
            start_time=_nanoseconds(report.started_at),
            record_exception=False,
        )
        below = set_span_in_context(span, context)
        self._phases(tracer, report, below)
        _end(span, report, report.ended_at)
        return below

    def _phases(self, tracer: Tracer, report: LoadReport, context: Context) -> None:
        """
        The phases, one after the other: they are told by how long they took, and they follow upon each other.
        """
        who = report.identity
        start = report.started_at
        for phase in report.phases:
            span = tracer.start_span(
                names.SPAN_PHASE_PREFIX + phase.name,
                context,
                attributes={names.ATTR_PHASE: phase.name, names.ATTR_RANK: who.rank},
                start_time=_nanoseconds(start),
                record_exception=False,
            )
            start = min(start + max(0.0, phase.seconds), report.ended_at)
            if report.error is not None and report.error.phase == phase.name:
                _end(span, report, start)
            else:
                span.end(_nanoseconds(start))


class _Meters(NamedTuple):
    """
    Measurements with attributes of few values: no rank, path or key, or a large job would have as many series.
    """

    duration: Histogram
    coverage: Histogram
    read: Histogram

    def record(self, report: LoadReport, context: Context) -> None:
        attributes: dict[str, str] = {names.ATTR_FRAMEWORK: report.framework, names.ATTR_VERDICT: report.verdict}
        if (error_type := _error_type(report)) is not None:
            attributes[names.ATTR_ERROR_TYPE] = error_type
        self.duration.record(report.seconds, attributes, context)
        if report.coverage is not None:
            self.coverage.record(report.coverage.judged, attributes, context)
        if report.bytes_read:
            self.read.record(report.bytes_read, attributes, context)


def _histograms(meters: MeterProvider) -> _Meters:
    meter = meters.get_meter(names.SCOPE, __version__)
    return _Meters(
        duration=meter.create_histogram(
            names.METRIC_DURATION,
            "s",
            "How long a rank's checkpoint load took.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        ),
        coverage=meter.create_histogram(
            names.METRIC_COVERAGE,
            "1",
            "Part of the model's state that a load supplied, by keys or elements, whichever is less.",
            explicit_bucket_boundaries_advisory=_RATIOS,
        ),
        read=meter.create_histogram(
            names.METRIC_READ,
            "By",
            "Bytes that a rank read from the checkpoint.",
            explicit_bucket_boundaries_advisory=_BYTES,
        ),
    )


def _take_over(tracer: Tracer | None, ids: Ids) -> Ids | None:
    """
    Have the tracer of our scope draw from our ids; None where it is not the SDK's own and cannot be told ids.

    The provider and every other tracer keep theirs (opentelemetry.sdk.trace.Tracer.id_generator is each tracer's own).
    """
    if tracer is None or not isinstance(getattr(tracer, "id_generator", None), IdGenerator):
        return None
    tracer.id_generator = ids  # type: ignore[attr-defined]
    return ids


def _error_type(report: LoadReport) -> str | None:
    if report.error is not None:
        return report.error.type
    return None if report.verdict in _PASSING else report.verdict


def _end(span: Span, report: LoadReport, at: float) -> None:
    """
    End a span that shares the outcome of the load.
    """
    if (error_type := _error_type(report)) is not None:
        message = report.error.message.partition("\n")[0] if report.error else report.verdict
        span.set_attribute(names.ATTR_ERROR_TYPE, _sendable(error_type))
        span.set_status(Status(StatusCode.ERROR, cut(_sendable(message))))
    span.end(_nanoseconds(at))


def _remote(trace_id: int, span_id: int) -> Context:
    """
    A context whose current span is another process's.
    """
    span = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)))
    return set_span_in_context(span, _nowhere())


def _nowhere() -> Context:
    """
    A context without a current span, whatever the host has open. Not an empty one: that would mean "the current one".
    """
    return set_span_in_context(INVALID_SPAN, Context())


def _nanoseconds(at: float) -> int:
    return round(at * 1e9)


def _sendable(value: Any) -> Any:
    """
    The same value in what protobuf takes: numbers beyond 64 bits and unpaired surrogates (from file names) as text.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if isinstance(value, dict):
        return {name: _sendable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sendable(item) for item in value]
    return value
