"""
The real Collector between our events, or the Python SDK's exporter, and our reader.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource

from ckpt_sentry.collector import records
from ckpt_sentry.core import codec
from ckpt_sentry.core.report import Coverage, Finding, Identity, KeyList, LoadReport, ShapeMismatch
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import Event, LoadFinished, LoadStalled, PhaseEntered, RankEnded, RunEnded

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

CONFIG = """
receivers:
  otlp:
    protocols:
      http:
        endpoint: 127.0.0.1:{port}
exporters:
  file:
    path: {path}
service:
  telemetry:
    metrics:
      level: none
  pipelines:
    logs:
      receivers: [otlp]
      exporters: [file]
"""


@contextmanager
def collector(folder: Path) -> Iterator[str]:
    """
    A running Collector that writes to `records.jsonl`; its URL for logs.
    """
    binary = os.environ.get("CKPT_SENTRY_OTELCOL") or shutil.which("otelcol")
    if not binary:
        pytest.skip("no Collector: CKPT_SENTRY_OTELCOL is unset and there is no otelcol on the PATH")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "collector.yaml"
    config.write_text(CONFIG.format(port=port, path=folder / "records.jsonl"))
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
            yield f"http://127.0.0.1:{port}/v1/logs"
            process.terminate()
            process.stderr.read()
        finally:
            process.kill()


def read_back(folder: Path) -> list[Event]:
    reading = records.read(folder / "records.jsonl")
    found = [event for sourced in reading for event in sourced.events]
    assert (reading.damaged, reading.refused) == (0, 0)
    return found


def test_events_as_json_through_the_real_collector(tmp_path: Path) -> None:
    with collector(tmp_path) as url:
        body = json.dumps(otlp_json.encode(EVENTS)).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
    assert read_back(tmp_path) == EVENTS


@pytest.mark.parametrize("compression", list(Compression))
def test_events_that_the_sdk_exports_through_the_real_collector(tmp_path: Path, compression: Compression) -> None:
    with collector(tmp_path) as url:
        provider = LoggerProvider(Resource({"service.name": "trainer"}))
        provider.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(url, compression=compression)))
        logger = provider.get_logger("ckpt_sentry", "1")
        for event in EVENTS:
            body = {**codec.dump(event), **EMPTY}
            logger.emit(event_name=event.name, body=body, timestamp=5, observed_timestamp=6)
        logger.emit(body="a record of others", severity_number=SeverityNumber.INFO)
        provider.shutdown()
    assert read_back(tmp_path) == EVENTS
