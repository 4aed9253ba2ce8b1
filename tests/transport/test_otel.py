"""
OpenTelemetry signals: what leaves, through whose providers, and what an endpoint that does not answer costs.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from ckpt_sentry import identity, names
from ckpt_sentry.core import codec
from ckpt_sentry.core.report import Coverage, Finding, Identity, KeyList, LoadError, LoadReport, Phase, ShapeMismatch
from ckpt_sentry.transport import otel, otel_env, otlp_json
from ckpt_sentry.transport.events import LoadFinished, LoadStarted, RunEnded
from ckpt_sentry.transport.otel_private import Route
from ckpt_sentry.transport.otel_signals import Ids, Signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan
    from typing_extensions import Self

LOAD_ID = "0123456789abcdef0123456789abcdef"
WHO = Identity("run7", 0, 0, 2, 2, "node0", os.getpid(), 0)
GOOD = LoadReport(
    load_id=LOAD_ID,
    ordinal=0,
    identity=WHO,
    framework="dcp",
    entry_point="dcp.load",
    verdict="ok",
    started_at=1000.0,
    ended_at=1003.0,
    path="/data/step-1200",
    format="dcp",
    step=1200,
    step_source="folder name",
    coverage=Coverage(1.0, 0.99),
    phases=(Phase("plan", 1.0), Phase("read", 2.0)),
    bytes_read=2**20,
)
BAD = replace(
    GOOD,
    verdict="failed",
    missing=KeyList(2, ("model.adapter{0-1}",)),
    mismatched=(ShapeMismatch("model.head.weight", 1, "model.head", (32, 8), (16, 8)),),
    findings=(Finding("shape_mismatch", "error", "…"), Finding("missing_keys", "error", "…")),
    error=LoadError("builtins.ValueError", "Size mismatch\nsecond line", "read"),
)
STARTED = LoadStarted(
    identity=WHO, at=1000.0, load_id=LOAD_ID, ordinal=0, framework="dcp", entry_point="dcp.load", path="/data/step-1200"
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name.startswith(("OTEL_", "TRACEPARENT")):
            monkeypatch.delenv(name)
    yield
    otel.shutdown(5)


def finished(report: LoadReport) -> LoadFinished:
    return LoadFinished(identity=report.identity, at=report.ended_at, report=report)


class Counter:
    """
    Entropy that counts: 1, 2, 3, …
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, size: int) -> bytes:
        self.count += 1
        return self.count.to_bytes(size, "big")


def spans_of(*reports: LoadReport, caller: SpanContext | None = None) -> list[ReadableSpan]:
    memory = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(memory))
    signals = Signals(tracers=tracers, ids=Ids(Counter()))
    for report in reports:
        signals.report(finished(report), caller)
    return list(memory.get_finished_spans())


def readable(span: ReadableSpan) -> dict[str, Any]:
    """
    A span as a person would write it down; ids in hexadecimal without leading zeros, times in seconds.
    """
    assert span.start_time is not None
    assert span.end_time is not None
    found = {
        "name": span.name,
        "trace": f"{span.context.trace_id:032x}",
        "id": f"{span.context.span_id:x}",
        "parent": f"{span.parent.span_id:x}" if span.parent else None,
        "times": (span.start_time / 1e9, span.end_time / 1e9),
        "status": (span.status.status_code.name, span.status.description),
        "attributes": dict(span.attributes or {}),
    }
    return found | ({"links": [f"{link.context.span_id:x}" for link in span.links]} if span.links else {})


ROOT = identity.root_span_id(LOAD_ID).lstrip("0")
SHARED = {
    "ckpt_sentry.run_id": "run7",
    "ckpt_sentry.attempt": 0,
    "ckpt_sentry.load_id": LOAD_ID,
    "ckpt_sentry.ordinal": 0,
    "ckpt_sentry.framework": "dcp",
    "ckpt_sentry.entry_point": "dcp.load",
    "ckpt_sentry.checkpoint.path": "/data/step-1200",
    "ckpt_sentry.checkpoint.format": "dcp",
    "ckpt_sentry.checkpoint.step": 1200,
    "ckpt_sentry.checkpoint.step_source": "folder name",
    "nv.dl.world_size": 2,
}


def test_spans_of_a_failed_load() -> None:
    failed = ("ERROR", "Size mismatch")
    assert [readable(span) for span in spans_of(BAD)] == [
        {
            "name": "checkpoint.load",
            "trace": LOAD_ID,
            "id": ROOT,
            "parent": None,
            "times": (1000.0, 1003.0),
            "status": failed,
            "attributes": SHARED | {"error.type": "builtins.ValueError"},
        },
        {
            "name": "checkpoint.load.plan",
            "trace": LOAD_ID,
            "id": "2",
            "parent": "1",
            "times": (1000.0, 1001.0),
            "status": ("UNSET", None),
            "attributes": {"ckpt_sentry.phase": "plan", "nv.dl.rank": 0},
        },
        {
            "name": "checkpoint.load.read",
            "trace": LOAD_ID,
            "id": "3",
            "parent": "1",
            "times": (1001.0, 1003.0),
            "status": failed,
            "attributes": {"ckpt_sentry.phase": "read", "nv.dl.rank": 0, "error.type": "builtins.ValueError"},
        },
        {
            "name": "checkpoint.load",
            "trace": LOAD_ID,
            "id": "1",
            "parent": ROOT,
            "times": (1000.0, 1003.0),
            "status": failed,
            "attributes": SHARED
            | {
                "nv.dl.rank": 0,
                "nv.dl.local_rank": 0,
                "host.name": "node0",
                "process.pid": os.getpid(),
                "ckpt_sentry.verdict": "failed",
                "ckpt_sentry.coverage.keys": 1.0,
                "ckpt_sentry.coverage.elements": 0.99,
                "ckpt_sentry.keys.missing": 2,
                "ckpt_sentry.keys.unexpected": 0,
                "ckpt_sentry.keys.mismatched": 1,
                "ckpt_sentry.findings": ("missing_keys", "shape_mismatch"),
                "ckpt_sentry.bytes_read": 2**20,
                "ckpt_sentry.phase": "read",
                "error.type": "builtins.ValueError",
            },
        },
    ]


def test_a_good_load_has_no_error_type_and_is_linked_to_the_caller() -> None:
    caller = SpanContext(0xA, 0xB, is_remote=False)
    spans = [readable(span) for span in spans_of(GOOD, caller=caller)]
    assert {span["status"] for span in spans} == {("UNSET", None)}
    assert all("error.type" not in span["attributes"] for span in spans)
    assert [span.get("links") for span in spans] == [None, None, None, ["b"]]


@pytest.mark.parametrize(
    ("verdict", "status"), [("partial", "UNSET"), ("diverged", "UNSET"), ("no_op", "ERROR"), ("wrong_values", "ERROR")]
)
def test_status_by_verdict(verdict: Any, status: str) -> None:
    span = readable(spans_of(replace(GOOD, verdict=verdict))[-1])
    assert span["status"][0] == status
    assert span["attributes"].get("error.type") == (verdict if status == "ERROR" else None)


def test_ranks_are_one_trace_under_one_root() -> None:
    reports = [replace(GOOD, phases=(), identity=replace(WHO, rank=rank, world_size=4)) for rank in range(4)]
    spans = [readable(span) for report in reports for span in spans_of(report)]
    assert [(span["trace"], span["parent"], span["attributes"].get("nv.dl.rank")) for span in spans] == [
        (LOAD_ID, None, None),
        *[(LOAD_ID, ROOT, rank) for rank in range(4)],
    ]
    assert spans[0]["id"] == ROOT


def test_traceparent_is_above_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{'a' * 32}-{'b' * 16}-01")
    spans = [readable(span) for span in spans_of(replace(GOOD, phases=()))]
    assert [(span["trace"], span["id"], span["parent"]) for span in spans] == [
        ("a" * 32, ROOT, "b" * 16),
        ("a" * 32, "1", ROOT),
    ]


def test_console_exporters_write_to_stdout() -> None:
    done = run(
        "otel.finished(GOOD); otel.flush(20)",
        **{f"OTEL_{name}_EXPORTER": "console" for name in ("TRACES", "LOGS", "METRICS")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in (names.SPAN_LOAD, names.EVENT_LOAD_FINISHED, names.METRIC_DURATION))


def test_text_that_protobuf_cannot_hold_and_numbers_beyond_64_bits() -> None:
    span = readable(spans_of(replace(GOOD, path="/data/\udcff", step=2**64))[-1])
    assert span["attributes"]["ckpt_sentry.checkpoint.path"] == "/data/\\udcff"
    assert span["attributes"]["ckpt_sentry.checkpoint.step"] == str(2**64)


def test_ids_do_not_come_from_the_global_random() -> None:
    random.seed(0)
    before = random.getstate()
    first = Ids().generate_span_id(), Ids().generate_trace_id()
    random.seed(0)
    second = Ids().generate_span_id(), Ids().generate_trace_id()
    assert set(first).isdisjoint(second)
    assert random.getstate() == before


def test_ids_are_dictated_once_and_never_zero() -> None:
    ids = Ids(Counter())
    with ids.given(7, 8):
        assert (ids.generate_trace_id(), ids.generate_span_id(), ids.generate_span_id()) == (7, 8, 1)
    with ids.given(7, 8):
        pass
    assert ids.generate_span_id() == 2
    numbers = iter([bytes(8), b"\x01" + bytes(7)])
    assert Ids(lambda _size: next(numbers)).generate_span_id() == 1 << 56


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/v1/logs"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_LOGS_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"}, False),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}
            | {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "LOGS", "METRICS")},
            False,
        ),
    ],
)
def test_active(environ: dict[str, str], expected: bool) -> None:  # noqa: FBT001
    assert otel.active(environ) is expected


OTLP = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://localhost:4318/v1/traces"),
        ({OTLP + "ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({OTLP + "ENDPOINT": "c:4318"}, "http://c:4318/v1/traces"),
        ({OTLP + "ENDPOINT": "http://c/base", OTLP + "TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ({OTLP + "ENDPOINT": "http://c:4317", OTLP + "PROTOCOL": "grpc"}, "http://c:4318/v1/traces"),
        ({OTLP + "TRACES_ENDPOINT": "http://c:4317", OTLP + "PROTOCOL": "grpc"}, "http://c:4318/v1/traces"),
        ({OTLP + "ENDPOINT": "http://c:55", OTLP + "PROTOCOL": "grpc"}, "http://c:55/v1/traces"),
    ],
)
def test_url(environ: dict[str, str], url: str) -> None:
    assert otel_env.target(environ, "traces").url == url


def test_target_takes_the_signals_own_variables_first() -> None:
    environ = {
        OTLP + "HEADERS": "a=1",
        OTLP + "TRACES_HEADERS": "authorization=Bearer%20x=y, bad, =z",
        OTLP + "TIMEOUT": "3",
        OTLP + "COMPRESSION": "GZIP",
        OTLP + "CERTIFICATE": "/ca",
    }
    found = otel_env.target(environ, "traces")
    assert found.headers == {"authorization": "Bearer x=y"}
    assert (found.timeout, found.compression, found.certificate) == (3.0, "gzip", "/ca")
    assert otel_env.target(environ, "logs").headers == {"a": "1"}
    assert otel_env.target({OTLP + "TIMEOUT": "10000"}, "logs").timeout == 10.0


class Endpoint(HTTPServer):
    """
    An OTLP/HTTP endpoint that keeps what it gets and answers with the statuses it is told, then 200.
    """

    def __init__(self, *statuses: int) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.statuses = list(statuses)
        super().__init__(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def parsed(self, path: str, kind: type[Any]) -> list[Any]:
        return [kind.FromString(body) for where, _, body in self.requests if where == path]


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, body))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def plain(value: Any) -> Any:
    """
    The plain value of a protobuf `AnyValue`.
    """
    kind = value.WhichOneof("value")
    if kind == "kvlist_value":
        return mapping(value.kvlist_value.values)
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind)


def mapping(pairs: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


def test_a_load_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.getstate()
    with Endpoint() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=t")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=trainer,team=llm")
        otel.started(STARTED)
        otel.finished(BAD)
        assert otel.flush(20)
    assert random.getstate() == before
    assert {headers["x-token"] for _, headers, _ in endpoint.requests} == {"t"}

    logs = endpoint.parsed("/v1/logs", ExportLogsServiceRequest)
    records = [record for request in logs for record in request.resource_logs[0].scope_logs[0].log_records]
    assert [(record.event_name, record.severity_text) for record in records] == [
        ("ckpt_sentry.load.started", "INFO"),
        ("ckpt_sentry.load.finished", "ERROR"),
    ]
    assert {(record.trace_id.hex(), record.span_id.hex()) for record in records} == {
        (LOAD_ID, identity.root_span_id(LOAD_ID))
    }
    assert codec.restore(LoadStarted, plain(records[0].body)) == STARTED
    assert codec.restore(LoadFinished, plain(records[1].body)) == finished(BAD)
    assert mapping(records[1].attributes) == otlp_json.attributes(finished(BAD))

    resource = mapping(logs[0].resource_logs[0].resource.attributes)
    expected = {
        "service.name": "trainer",
        "team": "llm",
        "host.name": "node0",
        "process.pid": os.getpid(),
        "ckpt_sentry.run_id": "run7",
        "nv.dl.run.uuid": "run7",
        "nv.dl.rank": 0,
        "nv.dl.local_rank": 0,
        "nv.dl.world_size": 2,
    }
    assert {name: resource[name] for name in expected} == expected

    (traces,) = endpoint.parsed("/v1/traces", ExportTraceServiceRequest)
    spans = traces.resource_spans[0].scope_spans[0].spans
    root, plan, read, rank = spans
    assert [span.name for span in spans] == [
        "checkpoint.load",
        "checkpoint.load.plan",
        "checkpoint.load.read",
        "checkpoint.load",
    ]
    assert {span.trace_id.hex() for span in spans} == {LOAD_ID}
    assert (root.parent_span_id, rank.parent_span_id) == (b"", root.span_id)
    assert {plan.parent_span_id, read.parent_span_id} == {rank.span_id}

    (metrics,) = endpoint.parsed("/v1/metrics", ExportMetricsServiceRequest)
    points = {
        (metric.name, metric.unit): metric.histogram.data_points[0]
        for metric in metrics.resource_metrics[0].scope_metrics[0].metrics
    }
    assert {name: (point.count, point.sum) for name, point in points.items()} == {
        ("ckpt_sentry.load.duration", "s"): (1, 3.0),
        ("ckpt_sentry.load.coverage", "1"): (1, 0.99),
        ("ckpt_sentry.load.read", "By"): (1, 2**20),
    }
    for point in points.values():
        assert mapping(point.attributes) == {
            "ckpt_sentry.framework": "dcp",
            "ckpt_sentry.verdict": "failed",
            "error.type": "builtins.ValueError",
        }
    assert list(points["ckpt_sentry.load.duration", "s"].explicit_bounds)[-1] == 1800


def test_signals_that_are_turned_off_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        otel.finished(GOOD)
        assert otel.flush(20)
    assert [path for path, _, _ in endpoint.requests] == ["/v1/logs"]


def test_a_rank_that_is_learnt_later_is_on_the_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", endpoint.url + "/v1/logs")
        otel.event(RunEnded(identity=WHO, at=1.0, ok=True))
        otel.event(RunEnded(identity=replace(WHO, rank=1), at=1.0, ok=True))
        assert otel.flush(20)
    resources = [
        mapping(resource.resource.attributes)["nv.dl.rank"]
        for request in endpoint.parsed("/v1/logs", ExportLogsServiceRequest)
        for resource in request.resource_logs
    ]
    assert resources == [0, 1]


def test_suppressed_instrumentation(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import context

    with Endpoint() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
        token = context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
        otel.finished(GOOD)
        context.detach(token)
        assert otel.flush(20)
    assert endpoint.requests == []


def route(url: str, **options: Any) -> Route:
    return Route(otel_env.target({OTLP + "ENDPOINT": url} | options, "logs"))


def test_lane_keeps_what_is_not_taken_and_drops_what_is_refused() -> None:
    with Endpoint(503, 400) as endpoint:
        to_send = route(endpoint.url)
        to_send.add(b"first")
        to_send.add(b"second")
        assert (to_send.send(), bool(to_send), to_send.problem) == (False, True, "HTTP 503")
        assert (to_send.send(), bool(to_send), to_send.problem) == (False, False, "HTTP 400")
        to_send.add(b"third")
        assert (to_send.send(), bool(to_send)) == (True, False)
    assert [body for _, _, body in endpoint.requests] == [b"first", b"first", b"second", b"third"]


def test_lane_compresses() -> None:
    with Endpoint() as endpoint:
        to_send = route(endpoint.url, **{OTLP + "COMPRESSION": "gzip"})
        to_send.add(b"body")
        to_send.send()
    ((_, headers, body),) = endpoint.requests
    assert (headers["content-encoding"], gzip.decompress(body)) == ("gzip", b"body")


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    prelude = f"""
import json, os, sys
sys.path[:0] = {[path for path in sys.path if path]!r}
from tests.transport.test_otel import *
"""
    return subprocess.run(
        [sys.executable, "-c", prelude + script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | environ,
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    )


FAILING = """
otel.started(STARTED)
otel.finished(BAD)
print(otel.flush(0.3))
"""


def test_an_endpoint_that_is_not_there_is_no_noise() -> None:
    done = run(FAILING, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_an_endpoint_that_never_answers_does_not_hold_the_process() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        done = run(FAILING, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_what_is_left_is_sent_when_the_process_ends() -> None:
    with Endpoint() as endpoint:
        done = run("otel.finished(GOOD)", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path for path, _, _ in endpoint.requests) == ["/v1/logs", "/v1/metrics", "/v1/traces"]


FORK = """
otel.finished(GOOD)
assert otel.flush(20)
if os.fork() == 0:
    import threading
    quiet = threading.active_count() == 1 and otel._worker is None
    otel.finished(replace(GOOD, identity=replace(WHO, pid=os.getpid())))
    os._exit(0 if quiet and otel.flush(20) else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_its_own_thread_and_ids() -> None:
    with Endpoint() as endpoint:
        done = run(FORK, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    parent, child = (request.resource_spans[0] for request in endpoint.parsed("/v1/traces", ExportTraceServiceRequest))
    pids = [mapping(part.resource.attributes)["process.pid"] for part in (parent, child)]
    ids = [{span.span_id for span in part.scope_spans[0].spans} for part in (parent, child)]
    assert pids[0] != pids[1]
    assert ids[0] & ids[1] == {bytes.fromhex(identity.root_span_id(LOAD_ID))}


HOST = """
import logging, random, structlog
from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk._logs import export as logs_export
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
memory = InMemorySpanExporter()
tracers = TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(memory))
records = getattr(logs_export, "InMemoryLogRecordExporter", None) or logs_export.InMemoryLogExporter
records = records()
loggers = LoggerProvider()
loggers.add_log_record_processor(SimpleLogRecordProcessor(records))
reader = InMemoryMetricReader()
meters = MeterProvider([reader])
trace.set_tracer_provider(tracers)
_logs.set_logger_provider(loggers)
metrics.set_meter_provider(meters)
generator = tracers.id_generator
state = random.getstate()
assert otel.active({})
with trace.get_tracer("host").start_as_current_span("training step") as step:
    state = random.getstate()
    otel.started(STARTED)
    otel.finished(GOOD)
    assert random.getstate() == state
assert otel.flush(20)
assert otel._worker is None
assert trace.get_tracer_provider() is tracers
assert _logs.get_logger_provider() is loggers
assert metrics.get_meter_provider() is meters
assert tracers.id_generator is generator
assert trace.get_tracer("host").id_generator is generator
spans = [readable(span) for span in memory.get_finished_spans()]
print(json.dumps({
    "spans": [(span["name"], span["id"] == ROOT, "links" in span) for span in spans],
    "logs": [record.log_record.event_name for record in records.get_finished_logs()],
    "metrics": sorted(m.name for m in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics),
}))
"""


def test_a_hosts_providers_are_used_and_left_as_they_are() -> None:
    done = run(HOST)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "spans": [
            ["checkpoint.load", True, False],
            ["checkpoint.load.plan", False, False],
            ["checkpoint.load.read", False, False],
            ["checkpoint.load", False, True],
            ["training step", False, False],
        ],
        "logs": [names.EVENT_LOAD_STARTED, names.EVENT_LOAD_FINISHED],
        "metrics": [names.METRIC_COVERAGE, names.METRIC_DURATION, names.METRIC_READ],
    }


def test_nothing_global_is_set() -> None:
    script = """
from opentelemetry import _logs, metrics, trace
import logging
before = [logging.getLogger().handlers[:], logging.getLogger().level]
otel.finished(GOOD)
assert otel.flush(20)
print(type(trace.get_tracer_provider()).__name__, type(_logs.get_logger_provider()).__name__,
      type(metrics.get_meter_provider()).__name__, before == [logging.getLogger().handlers, logging.getLogger().level])
"""
    with Endpoint() as endpoint:
        done = run(script, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint.url)
    assert (done.stdout, done.stderr) == ("ProxyTracerProvider ProxyLoggerProvider _ProxyMeterProvider True\n", "")


def test_importing_brings_no_sdk() -> None:
    code = "import sys; import ckpt_sentry.transport.otel as o; o.active({}); print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_grpc_is_said_not_to_be_spoken_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(otel, "_told_grpc", False)
    with Endpoint() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        otel.finished(GOOD)
        otel.finished(GOOD)
        assert otel.flush(20)
    assert [record.getMessage() for record in caplog.records] == [
        f"ckpt_sentry: OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not spoken; OTLP/HTTP goes to {endpoint.url}/v1/logs"
    ]


def test_lane_outlives_an_endpoint_that_does_not_speak_http() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 mail.example.org\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        to_send = route(f"http://127.0.0.1:{other.getsockname()[1]}")
        to_send.add(b"body")
        assert (to_send.send(), bool(to_send)) == (False, True)
        thread.join()
