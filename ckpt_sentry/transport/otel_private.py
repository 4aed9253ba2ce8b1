"""
The providers of a job that has none of its own: private, never global, and with one way out for each signal.

All of it runs on the agent's own thread, so that a slow endpoint is not the host's time.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs import export as logs_export
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics import export as metrics_export
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace import export as trace_export
from opentelemetry.sdk.version import __version__ as sdk_version

from ckpt_sentry import names
from ckpt_sentry.masking import mask
from ckpt_sentry.transport import otel_env
from ckpt_sentry.transport.otel_http import Route
from ckpt_sentry.transport.otel_ids import Ids
from ckpt_sentry.transport.otel_signals import Signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_sentry.core.report import Identity

__all__ = ["Pipeline"]


class _Spans(trace_export.SpanExporter):
    """
    Keeps ended spans until they are sent together.
    """

    def __init__(self) -> None:
        self.batch: list[Any] = []

    def export(self, spans: Sequence[Any]) -> trace_export.SpanExportResult:
        self.batch.extend(spans)
        return trace_export.SpanExportResult.SUCCESS


# These have other names from 1.39 on, and the old ones go.
_LogExporter: Any = getattr(logs_export, "LogRecordExporter", None) or logs_export.LogExporter
_LogResult: Any = getattr(logs_export, "LogRecordExportResult", None) or logs_export.LogExportResult
_ConsoleLogs: Any = getattr(logs_export, "ConsoleLogRecordExporter", None) or logs_export.ConsoleLogExporter


class _Logs(_LogExporter):  # type: ignore[misc]
    """
    Keeps log records until they are sent together.
    """

    def __init__(self) -> None:
        self.batch: list[Any] = []

    def export(self, batch: Sequence[Any]) -> Any:
        self.batch.extend(batch)
        return _LogResult.SUCCESS

    def shutdown(self) -> None:
        """
        Nothing to close.
        """

    def force_flush(self, timeout_millis: int = 30000) -> bool:  # noqa: ARG002 -- the SDK's name for it
        """
        Nothing that leaves from here.
        """
        return True


class Pipeline:
    """
    Private providers for the signals that the environment sends somewhere. For one process and one thread.
    """

    def __init__(self, identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
        self._spans, self._logs = _Spans(), _Logs()
        self._lanes: dict[str, Route] = {}
        self._console: set[str] = set()
        for signal in otel_env.SIGNALS:
            asked = otel_env.exporters(environ, signal)
            if "otlp" in asked:
                self._lanes[signal] = Route(otel_env.target(environ, signal))
            if "console" in asked:
                self._console.add(signal)
        self._problem: str | None = None
        self._environ = environ
        self.become(identity)

    def become(self, identity: Identity) -> None:
        """
        Send as this identity from now on: a process may learn its rank after its first event.
        """
        self.identity = identity
        resource = _resource(identity)
        wanted = self._lanes.keys() | self._console
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=Ids())
        tracers.add_span_processor(trace_export.SimpleSpanProcessor(self._spans))
        loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
        loggers.add_log_record_processor(logs_export.SimpleLogRecordProcessor(self._logs))
        # A reader serves one provider for its whole life.
        self._reader = metrics_export.InMemoryMetricReader(preferred_temporality=_temporality(self._environ))
        meters = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        self._providers = {
            "traces": tracers if "traces" in wanted else None,
            "logs": loggers if "logs" in wanted else None,
            "metrics": meters if "metrics" in wanted else None,
        }
        self._ways: dict[frozenset[str], Signals] = {}

    def signals(self, without: frozenset[str]) -> Signals:
        """
        The way out for all signals but those that the host takes itself.
        """
        if without not in self._ways:
            traces, logs, metrics = (
                None if signal in without else self._providers[signal] for signal in ("traces", "logs", "metrics")
            )
            self._ways[without] = Signals(traces, logs, metrics)  # type: ignore[arg-type]
        return self._ways[without]

    def gather(self) -> None:
        """
        Make requests of what has come together.
        """
        spans, self._spans.batch = self._spans.batch, []
        logs, self._logs.batch = self._logs.batch, []
        metrics = self._reader.get_metrics_data() if self._providers["metrics"] else None
        if logs:
            self._hand_over("logs", logs, encode_logs, _ConsoleLogs)
        if spans:
            self._hand_over("traces", spans, encode_spans, trace_export.ConsoleSpanExporter)
        if metrics is not None and metrics.resource_metrics:
            self._hand_over("metrics", metrics, encode_metrics, metrics_export.ConsoleMetricExporter)

    def send(self) -> bool:
        """
        Send the requests. False if some were not taken, whether they are left for later or refused for good.
        """
        # Whoever instruments the host's HTTP client must not make spans of this.
        token = context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, value=True))  # noqa: SLF001
        try:
            taken = [route.send() for route in self._lanes.values()]
        finally:
            context.detach(token)
        for route in self._lanes.values():
            self._say(route)
        return all(taken)

    def _hand_over(self, signal: str, batch: Any, encode: Any, console: Any) -> None:
        if (route := self._lanes.get(signal)) is not None:
            route.add(encode(batch).SerializeToString())
        if signal in self._console:
            console().export(batch)

    def _say(self, route: Route) -> None:
        """
        Tell whoever listens to our logger once why telemetry does not leave; a terminal that shows warnings does not.
        """
        if route.problem is not None and self._problem is None:
            self._problem = route.problem
            logging.getLogger(names.SCOPE).info("OTLP: %s: %s", mask(route.target.url.partition("?")[0]), route.problem)


def _resource(identity: Identity) -> Resource:
    """
    Which process this is. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before what we know ourselves.
    """
    own: dict[str, str | int] = {
        names.ATTR_SERVICE_NAME: names.SCOPE,
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": sdk_version,
        names.ATTR_HOST_NAME: identity.node,
        names.ATTR_PROCESS_PID: identity.pid,
        names.ATTR_RUN_ID: identity.run_id,
        names.ATTR_RUN_UUID: identity.run_id,
        names.ATTR_RANK: identity.rank,
        names.ATTR_LOCAL_RANK: identity.local_rank,
        names.ATTR_WORLD_SIZE: identity.world_size,
    }
    if slurm_job := os.environ.get("SLURM_JOB_ID"):
        own[names.ATTR_SLURM_JOB] = slurm_job
    # `Resource.create` asks a pool of threads for the same, which a process that ends cannot start any more.
    return Resource(own).merge(OTELResourceDetector().detect())


def _temporality(environ: Mapping[str, str]) -> dict[type, metrics_export.AggregationTemporality]:
    """
    OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE, for the only kind of instrument there is here.
    """
    preference = environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").strip().lower()
    kinds = metrics_export.AggregationTemporality
    return {Histogram: kinds.DELTA if preference in {"delta", "lowmemory"} else kinds.CUMULATIVE}
