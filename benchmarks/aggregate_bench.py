"""
How long and how much memory the aggregate of a large job takes, and how long its block is.

    python benchmarks/aggregate_bench.py [--ranks 16384] [--keys 800] [--json FILE]

Every rank has objects of its own, as if restored from the wire; three distinct things go wrong. Prints one line and
exits 1 where a bound (5 s, 200 MB beyond the start, 40 lines) is passed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import sys
import time
import tracemalloc
from collections.abc import Iterator

from ckpt_sentry.collector.aggregate import Aggregator
from ckpt_sentry.core import codec
from ckpt_sentry.core.report import Coverage, Finding, Identity, KeyList, LoadError, LoadReport, Phase
from ckpt_sentry.render import json_, text
from ckpt_sentry.transport.events import Event, LoadFailing, LoadFinished, LoadStarted, PhaseEntered

LOAD_ID = "c" * 32
MAX_SECONDS, MAX_BYTES, MAX_LINES = 5.0, 200_000_000, 40


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    arguments.add_argument("--ranks", type=int, default=16_384)
    arguments.add_argument("--keys", type=int, default=800)
    arguments.add_argument("--json", type=pathlib.Path)
    given = arguments.parse_args()
    took = measure_seconds(given.ranks, given.keys)
    peak, lines, size = measure_bytes(given.ranks, given.keys)
    result = {"ranks": given.ranks, "seconds": took, "peak_bytes": peak, "block_lines": lines, "json_bytes": size}
    result["process_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(took > MAX_SECONDS or peak > MAX_BYTES or lines > MAX_LINES)


def measure_seconds(ranks: int, keys: int) -> float:
    """
    Seconds inside the aggregator and the renderers: making the events is left out.
    """
    aggregator, spent = Aggregator(), 0.0
    for event in events(ranks, keys):
        begin = time.perf_counter()
        aggregator.add(event, source="receiver")
        spent += time.perf_counter() - begin
    begin = time.perf_counter()
    for one in aggregator.loads(settled=True):
        text.block(one)
        json_.text(json_.document([one]))
    return spent + time.perf_counter() - begin


def measure_bytes(ranks: int, keys: int) -> tuple[int, int, int]:
    """
    Peak of allocated bytes, lines of the block, bytes of the JSON.
    """
    tracemalloc.start()
    aggregator = Aggregator()
    for event in events(ranks, keys):
        aggregator.add(event, source="receiver")
    one = aggregator.loads(settled=True)[0]
    lines = len(text.block(one))
    size = len(json_.text(json_.document([one])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, lines, size


def events(ranks: int, keys: int) -> Iterator[Event]:
    """
    The events of one failing load, rank after rank in each stage.
    """
    for rank in range(ranks):
        me = identity(rank, ranks)
        yield LoadStarted(
            identity=me, at=1.0, load_id=LOAD_ID, ordinal=0, framework="dcp", entry_point="dcp.load", path="/c/step-7"
        )
        yield PhaseEntered(identity=me, at=1.5, load_id=LOAD_ID, phase="plan")
    for rank in range(ranks):
        report = finished(rank, ranks, keys)
        if report.error and report.error.type != "CheckpointException":
            yield LoadFailing(identity=report.identity, at=2.0, load_id=LOAD_ID, error=report.error)
        plain = codec.dump(LoadFinished(identity=report.identity, at=3.0, report=report))
        yield codec.restore(LoadFinished, json.loads(json.dumps(plain)))


def identity(rank: int, ranks: int) -> Identity:
    return Identity("run", rank, rank % 8, ranks, 8, f"node{rank // 8}", 1000 + rank)


def finished(rank: int, ranks: int, keys: int) -> LoadReport:
    kind = rank % 3
    error = (
        LoadError("RuntimeError", "Missing key in checkpoint state_dict: model.adapter0.", "plan"),
        LoadError("OSError", f"[Errno 5] Input/output error, object at 0x{rank:x}", "read"),
        LoadError("CheckpointException", f"from 10.0.{rank // 256}.{rank % 256}:29500", "plan"),
    )[kind]
    finding = (
        Finding("missing_keys", "error", f"{keys} keys missing from the checkpoint"),
        Finding("rank_raised", "error", "OSError: [Errno 5] Input/output error"),
        Finding("peer_failed", "error", "other ranks failed; this rank had no error of its own"),
    )[kind]
    missing = KeyList(keys, tuple(f"model.odd{number}x.weight" for number in range(keys))) if kind == 0 else KeyList()
    return LoadReport(
        load_id=LOAD_ID,
        ordinal=0,
        identity=identity(rank, ranks),
        framework="dcp",
        entry_point="dcp.load",
        verdict="failed",
        started_at=1.0,
        ended_at=3.0 + rank / ranks,
        path="/c/step-7",
        format="DCP",
        step=7,
        missing=missing,
        coverage=Coverage(0.9, 0.95),
        findings=(finding,),
        phases=tuple(Phase(name, rank / ranks) for name in ("setup", "plan", "read", "barrier", "restore")),
        bytes_read=rank,
        error=error,
    )


if __name__ == "__main__":
    main()
