"""
How much the receiver takes: records a second on one core, and memory under a flood.

    python benchmarks/receiver_bench.py [--json] [--rounds N] [--records N]

The receiver is a process of its own; requests are made beforehand, 512 records each, as the SDK's batch exporter does
by default, gzipped Protobuf and JSON. Each record is decoded, flattened and handed to a sink. Rates are by the
processor time of the receiver's process, so they are those of one core, whatever else the machine does. A ratio
compares with the target of 50,000 records a second.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import multiprocessing
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ckpt_sentry.audit import codec
from ckpt_sentry.audit.report import Identity
from ckpt_sentry.collector.receiver import Limits, Receiver, Request
from ckpt_sentry.telemetry import otlp_json
from ckpt_sentry.telemetry.events import PhaseEntered

TARGET = 50_000
MIB = 1024 * 1024
EVENT = PhaseEntered(
    identity=Identity("run7-a1b2", 3, 3, 8, 8, "node-17", 4711),
    at=1700000000.5,
    load_id="0af7651916cd43dd8448eb211c80319c",
    phase="plan",
)
FLOOD_LIMITS = Limits(pending=32 * MIB)


def flatten(request: Request) -> int:
    """Every record as a flat mapping or an event, as a store would take it."""
    if request.signal == "logs":
        events, _ = otlp_json.decode(request.body)
        if events:
            return len(events)
    count = 0
    for outer, inner, leaf in (("resourceSpans", "scopeSpans", "spans"), ("resourceLogs", "scopeLogs", "logRecords")):
        for resource_part in request.body.get(outer, ()):
            shared = otlp_json.plain_mapping(resource_part["resource"].get("attributes"))
            for scope in resource_part[inner]:
                rows = [{**shared, **record, **otlp_json.plain_mapping(record["attributes"])} for record in scope[leaf]]
                count += len(rows)
    return count


class Figures(NamedTuple):
    """
    What the receiver's process says of itself: records taken in, seconds of processor time, bytes grown at the peak.
    """

    taken: int
    seconds: float
    grown: int


def serve(pipe: Connection, *, flood: bool) -> None:
    taken = 0

    def sink(request: Request) -> None:
        nonlocal taken
        taken += flatten(request) if not flood else 1
        if flood:
            time.sleep(0.05)

    with Receiver(sink, token="t", limits=FLOOD_LIMITS if flood else None) as receiver:
        pipe.send(receiver.address)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        while pipe.recv():
            pipe.send(
                Figures(taken, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
            )


def event_records(count: int) -> bytes:
    """Our own events as the SDK exports them."""
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    logger = provider.get_logger("ckpt_sentry")
    for _ in range(count):
        logger.emit(event_name=EVENT.name, body=codec.dump(EVENT), attributes=otlp_json.attributes(EVENT))
    return encode_logs(exporter.get_finished_logs()).SerializeToString()


def log_records(count: int) -> bytes:
    """Log records of others: a sentence and six attributes."""
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    logger = provider.get_logger("trainer")
    for number in range(count):
        attributes = {"code.function.name": "train", "code.line.number": 17, "step": number, "loss": 0.25, "rank": 3}
        logger.emit(body=f"step {number} took 0.31 s", attributes={**attributes, "thread.name": "MainThread"})
    return encode_logs(exporter.get_finished_logs()).SerializeToString()


def spans(count: int) -> bytes:
    """Spans of loads: six attributes."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("ckpt_sentry")
    attributes = {name: value for name, value in otlp_json.attributes(EVENT).items() if name != "ckpt_sentry.attempt"}
    for _ in range(count):
        tracer.start_span("checkpoint.load.plan", attributes=attributes).end()
    return encode_spans(exporter.get_finished_spans()).SerializeToString()


def json_events(count: int) -> bytes:
    """Our own events as a worker or a launcher sends them."""
    return json.dumps(otlp_json.encode([EVENT] * count)).encode()


CASES: dict[str, tuple[Callable[[int], bytes], str, str]] = {
    "spans, protobuf": (spans, "/v1/traces", "application/x-protobuf"),
    "log records, protobuf": (log_records, "/v1/logs", "application/x-protobuf"),
    "load events, protobuf": (event_records, "/v1/logs", "application/x-protobuf"),
    "load events, json": (json_events, "/v1/logs", "application/json"),
}


def post(connection: http.client.HTTPConnection, path: str, kind: str, body: bytes, coding: str = "gzip") -> int:
    headers = {"Content-Type": kind, "Content-Encoding": coding, "Authorization": "Bearer t"}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def started(*, flood: bool) -> tuple[Any, Connection, str]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), kwargs={"flood": flood})
    process.start()
    return process, ours, ours.recv()


def asked(pipe: Connection) -> Figures:
    pipe.send("figures")
    found: Figures = pipe.recv()
    return found


def throughput(name: str, rounds: int, total: int) -> dict[str, Any]:
    make, path, kind = CASES[name]
    batch = 512
    body = gzip.compress(make(batch), 6)
    process, pipe, address = started(flood=False)
    connection = http.client.HTTPConnection(address)
    rates, before = [], asked(pipe)
    for number in range(rounds + 1):
        for _ in range(total // batch):
            if post(connection, path, kind, body) != http.client.OK:
                sys.exit("the receiver refused a good request")
        after = asked(pipe)
        if after.taken - before.taken != total // batch * batch:
            sys.exit(f"{after.taken - before.taken} records were taken in, others sent")
        if number:  # the first is to warm up
            rates.append((after.taken - before.taken) / (after.seconds - before.seconds))
        before = after
    connection.close()
    pipe.send("")
    process.join()
    return {
        "records_per_second": {"min": min(rates), "median": statistics.median(rates), "max": max(rates)},
        "ratio": statistics.median(rates) / TARGET,
        "bytes_per_request": len(body),
    }


def flood(seconds: float) -> dict[str, Any]:
    """64 clients with bodies of 4 MiB, or that inflate to 16, against a sink that takes 20 requests a second."""
    bodies = [b"{}" + b" " * 4 * MIB, gzip.compress(b"{}" + b" " * 16 * MIB, 1)]
    process, pipe, address = started(flood=True)
    statuses: dict[int, int] = {}
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        connection = http.client.HTTPConnection(address)
        coding = ("identity", "gzip")[number % 2]
        while time.perf_counter() < end:
            try:
                status = post(connection, "/v1/logs", "application/json", bodies[number % 2], coding)
            except (OSError, http.client.HTTPException):
                status = 0
                connection.close()
            statuses[status] = statuses.get(status, 0) + 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figures = asked(pipe)
    pipe.send("")
    process.join()
    return {
        "statuses": dict(sorted(statuses.items())),
        "acknowledged_and_taken_in": [statuses.get(200, 0), figures.taken],
        "pending_limit_bytes": FLOOD_LIMITS.pending,
        "grown_by_bytes": figures.grown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=51_200, help="records in a round")
    options = parser.parse_args()
    results = {name: throughput(name, options.rounds, options.records) for name in CASES}
    document = {"cores": os.cpu_count(), "throughput": results, "flood": flood(3.0)}
    if options.json:
        print(json.dumps(document, indent=2))
        return
    for name, result in results.items():
        rate = result["records_per_second"]
        spread = f"({rate['min']:,.0f} to {rate['max']:,.0f})"
        print(f"{name:24}{rate['median']:>10,.0f} records/s {spread:24}{result['ratio']:.2f} of the target")
    found = document["flood"]
    answers = ", ".join(f"{count} × {status}" for status, count in found["statuses"].items())
    grown, limit = found["grown_by_bytes"] / MIB, found["pending_limit_bytes"] / MIB
    print(f"flood: {answers}; memory grew by {grown:.0f} MiB (limit for pending bodies {limit:.0f} MiB)")


if __name__ == "__main__":
    main()
