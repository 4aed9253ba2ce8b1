"""
The providers of a job that has none of its own: private, never global, each signal sent to one endpoint over HTTP.

All of it runs on the agent's own thread, so that a slow endpoint is not the host's time.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 -- the first look-up of a host name imports it, on whatever thread that is
import gzip
import logging
import os
import ssl
import urllib.error
import urllib.request
import zlib
from collections import deque
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final

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
from ckpt_sentry.transport.otel_signals import Ids, Signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_sentry.core.report import Identity
    from ckpt_sentry.transport.otel_env import Target

__all__ = ["Pipeline", "Route"]

_PENDING: Final = 256
"""Requests kept for an endpoint that does not answer; the oldest go first."""

_TRY_AGAIN: Final = frozenset({408, 429, 502, 503, 504})


class Route:
    """
    Requests to one target over HTTP, in order. What it could not take stays, up to a bound, for the next time.

    The SDK's own exporter does more than a guest may: it draws from the global `random` for each request, which moves
    the host's shuffles, writes its troubles to logging, where they land on the job's terminal, and drops a batch whose
    endpoint restarts.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.problem: str | None = None
        """Why a request was not taken, the last time that one was not, in a few words."""
        self._pending: deque[bytes] = deque(maxlen=_PENDING)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_tls(target)))

    def __bool__(self) -> bool:
        """
        Whether requests wait for the target to come back.
        """
        return bool(self._pending)

    def add(self, request: bytes) -> None:
        self._pending.append(request)

    def send(self) -> bool:
        """
        Send what is there, until something is to be tried again later; each request takes up to the target's timeout.

        True if all was taken. What the target refuses for good is dropped.
        """
        taken = True
        while self._pending:
            request = self._pending[0]
            try:
                self._post(request)
            except urllib.error.HTTPError as error:
                error.close()
                self.problem = f"HTTP {error.code}"
                if error.code in _TRY_AGAIN:
                    return False
                taken = False
            except (OSError, ValueError, HTTPException) as error:
                self.problem = str(getattr(error, "reason", error)) or type(error).__name__
                return False
            if self._pending and self._pending[0] is request:
                self._pending.popleft()
        return taken

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "ckpt_sentry"} | dict(self.target.headers)
        if self.target.compression == "gzip":
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        elif self.target.compression == "deflate":
            body, headers["Content-Encoding"] = zlib.compress(body), "deflate"
        request = urllib.request.Request(self.target.url, body, headers, method="POST")  # noqa: S310 -- OTEL_* says it
        with self._opener.open(request, timeout=self.target.timeout) as response:
            response.read()


def _tls(target: Target) -> ssl.SSLContext | None:
    """
    What the certificates in the environment ask for; None for the default. Raises OSError for a file that is no use.
    """
    if not target.url.lower().startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=target.certificate)
    if target.client_certificate:
        context.load_cert_chain(target.client_certificate, target.client_key)
    return context


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
        self._routes: dict[str, Route] = {}
        self._console: set[str] = set()
        for signal in otel_env.SIGNALS:
            asked = otel_env.exporters(environ, signal)
            if "otlp" in asked:
                self._routes[signal] = Route(otel_env.target(environ, signal))
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
        wanted = self._routes.keys() | self._console
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
            taken = [route.send() for route in self._routes.values()]
        finally:
            context.detach(token)
        for route in self._routes.values():
            self._log_problem(route)
        return all(taken)

    def _hand_over(self, signal: str, batch: Any, encode: Any, console: Any) -> None:
        if (route := self._routes.get(signal)) is not None:
            route.add(encode(batch).SerializeToString())
        if signal in self._console:
            console().export(batch)

    def _log_problem(self, route: Route) -> None:
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
