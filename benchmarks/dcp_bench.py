"""
What watching costs a good `dcp.load`, and how soon a hopeless one is diagnosed.

    python benchmarks/dcp_bench.py [--keys 1000,10000,50000] [--rounds 7] [--gigabytes 2]

One process; the agent is switched on and off in turn, the order changing in every round. `ratio` is the median of the
ratios of the rounds, `spread` the middle half of them. `own_seconds` is the time spent inside the agent, which noise of
the machine does not hide. The diagnosis is that of a prefix mismatch in a checkpoint of 16 shards, against the time to
read its data once. One JSON object on standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"CKPT_SENTRY_LOG": "off", "CKPT_SENTRY_DIR": tempfile.mkdtemp(prefix="dcp-bench-records-")}
os.environ.pop("CKPT_SENTRY", None)
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

import ckpt_sentry  # noqa: E402
from ckpt_sentry.targets import dcp as target  # noqa: E402

SHARDS = 16


def timed_load(state: dict[str, Any], path: Path) -> float:
    gc.collect()
    began = time.perf_counter()
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return time.perf_counter() - began


def cost(keys: int, rounds: int, folder: Path) -> dict[str, Any]:
    """
    Loads of `keys` tensors of 16 elements, on and off in turn.
    """
    state = {"model": {f"layers.{i // 10}.w{i % 10}": torch.ones(16) for i in range(keys)}}
    path = folder / f"step-{keys}"
    dcp.save(state, checkpoint_id=path, no_dist=True)
    times: dict[str, list[float]] = {"on": [], "off": []}
    timed_load(state, path)
    for place in range(rounds):
        for mode in ("on", "off") if place % 2 else ("off", "on"):
            (ckpt_sentry.install if mode == "on" else ckpt_sentry.uninstall)()
            times[mode].append(timed_load(state, path))
    ckpt_sentry.uninstall()
    ratios = sorted(on / off for on, off in zip(times["on"], times["off"], strict=True))
    quarter = len(ratios) // 4
    own = own_seconds(state, path)
    off = statistics.median(times["off"])
    return {
        "keys": keys,
        "seconds_off": round(off, 4),
        "ratio": round(statistics.median(ratios), 4),
        "spread": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
        "own_seconds": round(own, 5),
        "own_ratio": round(1 + own / off, 4),
    }


def own_seconds(state: dict[str, Any], path: Path) -> float:
    """
    The least of three loads: time inside of the agent's own functions, called by the hooks.
    """
    spent: list[float] = []
    kept: list[Any] = []
    names = ("_begin", "_end", "_enter", "_planned", "_read", "_left")
    originals = {name: getattr(target, name) for name in names}

    def timing(function: Any) -> Any:
        def call(*args: Any) -> Any:
            # What torch would free itself when it returns is not to be freed inside of ours.
            kept.append(dict(getattr(args[0], "notes", {})))
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent.append(time.perf_counter() - began)

        return call

    for name, function in originals.items():
        setattr(target, name, timing(function))
    target._LOAD = target.around(target._begin, target._end)
    totals = []
    try:
        ckpt_sentry.install()
        for _ in range(3):
            spent.clear()
            timed_load(state, path)
            totals.append(sum(spent))
            kept.clear()
    finally:
        ckpt_sentry.uninstall()
        for name, function in originals.items():
            setattr(target, name, function)
        target._LOAD = target.around(target._begin, target._end)
    return min(totals)


def diagnosis(gigabytes: float, folder: Path) -> dict[str, Any]:
    """
    A checkpoint of which every key has the wrong prefix: from the call to the exception, against reading all of it.
    """
    rows = int(gigabytes * 2**30 / 4 / SHARDS / 1024)
    state = {f"module.layers.{i}.weight": torch.ones(rows, 1024) for i in range(SHARDS)}
    path = folder / "step-2"
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    wanted = {key.removeprefix("module."): value for key, value in state.items()}
    reading = [timed_load(state, path) for _ in range(3)]
    failing = []
    ckpt_sentry.install()
    for _ in range(3):
        began = time.perf_counter()
        with contextlib.suppress(dcp.CheckpointException):
            dcp.load(wanted, checkpoint_id=path, no_dist=True)
        failing.append(time.perf_counter() - began)
    ckpt_sentry.uninstall()
    read, failed = min(reading), statistics.median(failing)
    shards = len(list(path.glob("*.distcp")))
    return {
        "bytes": rows * 1024 * 4 * SHARDS,
        "shards": shards,
        "read_seconds": round(read, 4),
        "diagnosis_seconds": round(failed, 5),
        "times_faster": round(read / failed, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", default="1000,10000,50000")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    args = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "loads": []}
    with tempfile.TemporaryDirectory(prefix="dcp-bench-") as folder:
        for keys in filter(None, args.keys.split(",")):
            found["loads"].append(cost(int(keys), args.rounds, Path(folder)))
        if args.gigabytes:
            found["diagnosis"] = diagnosis(args.gigabytes, Path(folder))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
