"""
The real Python SDK's exporters against our receiver, and the real Collector between our events and our reader.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link

from ckpt_sentry.audit import codec
from ckpt_sentry.audit.report import Coverage, Finding, Identity, KeyList, LoadReport, ShapeMismatch
from ckpt_sentry.collector import records
from ckpt_sentry.collector.receiver import Receiver, Request
from ckpt_sentry.telemetry import otlp_json
from ckpt_sentry.telemetry.channel import Channel
from ckpt_sentry.telemetry.events import Event, LoadFinished, LoadStalled, PhaseEntered, RankEnded, RunEnded

LOAD = "0af7651916cd43dd8448eb211c80319c"
WHO = Identity("run", 3, 1, 4, 2, "n1", 4711, 1)
REPORT = LoadReport(
    load_id=LOAD,
    ordinal=0,
    identity=WHO,
    framework="dcp",
    entry_point="dcp.load",
    verdict="failed",
    started_at=1700000000.125,
    ended_at=1700000001.0,
    missing=KeyList(2, ("layers.{0-1}.ü\\x00",)),
    mismatched=(ShapeMismatch("scale", 1, "", (), (2**40, 0)),),
    coverage=Coverage(1.0, 0.1),
    utilisation=math.inf,
    findings=(Finding("shape_mismatch", "error", ""),),
)
EVENTS: list[Event] = [
    PhaseEntered(identity=WHO, at=1700000000.5, load_id=LOAD, phase=""),
    LoadFinished(identity=WHO, at=1700000001.0, report=REPORT),
    LoadStalled(identity=WHO, at=1700000002.0, load_id=LOAD, phase=None, since=0.0, stack="a\nb"),
    RankEnded(identity=WHO, at=1700000003.0, how="killed", signal="SIGKILL"),
    RunEnded(identity=WHO, at=1700000004.0, ok=False),
]

EMPTY: dict[str, Any] = {"unknown": None, "empty": {}, "list": [], "text": ""}
"""What newer writers may add, and what says nothing."""


@pytest.mark.parametrize("compression", list(Compression))
def test_events_that_the_sdk_exports(compression: Compression) -> None:
    got: list[Request] = []
    with Receiver(got.append, token="t") as receiver:
        exporter = OTLPLogExporter(
            f"http://{receiver.address}/v1/logs", headers={"Authorization": "Bearer t"}, compression=compression
        )
        provider = LoggerProvider(Resource({"service.name": "trainer"}))
        provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
        logger = provider.get_logger("ckpt_sentry", "1")
        for event in EVENTS:
            body = {**codec.dump(event), **EMPTY}
            logger.emit(event_name=event.name, body=body, timestamp=5, observed_timestamp=6)
        logger.emit(body="a record of others", severity_number=SeverityNumber.INFO)
        provider.shutdown()
    assert [request.signal for request in got] == ["logs"] * 6
    decoded = [otlp_json.decode(request.body) for request in got]
    assert decoded == [([event], 0) for event in EVENTS] + [([], 0)]
    assert got[0].body == {
        "resourceLogs": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "trainer"}}]},
                "scopeLogs": [
                    {
                        "scope": {"name": "ckpt_sentry", "version": "1"},
                        "logRecords": [
                            {
                                "timeUnixNano": "5",
                                "observedTimeUnixNano": "6",
                                "eventName": "ckpt_sentry.load.phase",
                                "body": otlp_json.any_value({**codec.dump(EVENTS[0]), **EMPTY}),
                            }
                        ],
                    }
                ],
            }
        ]
    }


def test_spans_that_the_sdk_exports() -> None:
    got: list[Request] = []
    with Receiver(got.append) as receiver:
        provider = TracerProvider(resource=Resource({"service.name": "trainer"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"http://{receiver.address}/v1/traces")))
        tracer = provider.get_tracer("ckpt_sentry", "1")
        root = tracer.start_span("checkpoint.load", start_time=1)
        root.end(2)
        span = tracer.start_span(
            "checkpoint.load.plan", attributes={"nv.dl.rank": 3}, links=[Link(root.get_span_context())], start_time=5
        )
        span.end(9)
        provider.shutdown()
    first, context = root.get_span_context(), span.get_span_context()
    assert got[1].signal == "traces"
    # Which flags are set has changed between versions of the SDK.
    (exported,) = got[1].body["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert {type(exported.pop("flags")), type(exported["links"][0].pop("flags"))} == {int}
    assert got[1].body == {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "trainer"}}]},
                "scopeSpans": [
                    {
                        "scope": {"name": "ckpt_sentry", "version": "1"},
                        "spans": [
                            {
                                "traceId": f"{context.trace_id:032x}",
                                "spanId": f"{context.span_id:016x}",
                                "name": "checkpoint.load.plan",
                                "kind": 1,
                                "startTimeUnixNano": "5",
                                "endTimeUnixNano": "9",
                                "attributes": [{"key": "nv.dl.rank", "value": {"intValue": "3"}}],
                                "links": [
                                    {
                                        "traceId": f"{first.trace_id:032x}",
                                        "spanId": f"{first.span_id:016x}",
                                    }
                                ],
                                "status": {},
                            }
                        ],
                    }
                ],
            }
        ]
    }


CONFIG = """
receivers:
  otlp:
    protocols:
      http:
        endpoint: 127.0.0.1:{port}
exporters:
  file:
    path: {path}
  otlp_http:
    endpoint: http://{forward}
    compression: gzip
    sending_queue:
      enabled: false
    headers:
      Authorization: Bearer t
service:
  telemetry:
    metrics:
      level: none
  pipelines:
    logs:
      receivers: [otlp]
      exporters: [file, otlp_http]
"""


@contextmanager
def collector(folder: Path, forward: str) -> Iterator[str]:
    """A running Collector; its address."""
    binary = os.environ.get("CKPT_SENTRY_OTELCOL") or shutil.which("otelcol")
    if not binary:
        pytest.skip("no Collector: CKPT_SENTRY_OTELCOL is unset and there is no otelcol on the PATH")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "collector.yaml"
    config.write_text(CONFIG.format(port=port, path=folder / "records.jsonl", forward=forward))
    with subprocess.Popen([binary, "--config", config], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if "Everything is ready" in line:
                    break
            else:
                pytest.fail("the Collector did not start:\n" + "".join(said))
            yield f"127.0.0.1:{port}"
            process.terminate()
            process.stderr.read()
        finally:
            process.kill()


def test_events_through_the_real_collector(tmp_path: Path) -> None:
    got: list[Request] = []
    with Receiver(got.append, token="t") as receiver:
        with collector(tmp_path, receiver.address) as address, Channel(address) as channel:
            assert channel.post(otlp_json.encode(EVENTS), 10.0)
        reading = records.read(tmp_path / "records.jsonl")
        assert [event for sourced in reading for event in sourced.events] == EVENTS
        assert (reading.damaged, reading.refused) == (0, 0)
    assert [otlp_json.decode(request.body) for request in got] == [(EVENTS, 0)]
