"""
What watching costs a good `dcp.load`, and how soon a hopeless one is diagnosed.

    python benchmarks/dcp_bench.py [--keys 1000,10000,50000] [--rounds 7] [--gigabytes 2]

One process; the agent is switched on and off in turn, the order changing in every round. `ratio` is the median of the
ratios of the rounds, `spread` the middle half of them; `ratio_without_gc` and its spread leave out the passes of the
garbage collector, which are a fifth of a load of 50,000 keys and most of its noise, `gc_passes` says how many there
were on and off. `own_seconds` is the time spent inside the agent, which noise of the machine does not hide: in its
functions, and in the look at each key while the planner plans, which is measured as what planning takes longer. The
diagnosis is that of a prefix mismatch in a checkpoint of 16 shards, against the time to read its data once. One JSON
object on standard output.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"CKPT_SENTRY_LOG": "off", "CKPT_SENTRY_DIR": tempfile.mkdtemp(prefix="dcp-bench-records-")}
os.environ.pop("CKPT_SENTRY", None)
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

import ckpt_sentry  # noqa: E402
from ckpt_sentry.targets import dcp as target  # noqa: E402
from ckpt_sentry.targets import dcp_planning  # noqa: E402

SHARDS = 16


class Load(NamedTuple):
    """
    What a load took, in seconds, and how many of these the garbage collector, in how many passes.
    """

    seconds: float
    collecting: float
    passes: int

    @property
    def without_gc(self) -> float:
        return self.seconds - self.collecting


def timed_load(state: dict[str, Any], path: Path) -> Load:
    began_pass, collecting, passes = 0.0, 0.0, 0

    def collector(phase: str, _: object) -> None:
        nonlocal began_pass, collecting, passes
        if phase == "start":
            began_pass = time.perf_counter()
        else:
            collecting, passes = collecting + time.perf_counter() - began_pass, passes + 1

    gc.collect()
    gc.callbacks.append(collector)
    began = time.perf_counter()
    dcp.load(state, checkpoint_id=path, no_dist=True)
    seconds = time.perf_counter() - began
    gc.callbacks.remove(collector)
    return Load(seconds, collecting, passes)


def middle(values: Iterable[float]) -> tuple[float, list[float]]:
    """
    The median, and the middle half.
    """
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return round(statistics.median(ordered), 4), [round(ordered[quarter], 4), round(ordered[-1 - quarter], 4)]


def cost(keys: int, rounds: int, folder: Path) -> dict[str, Any]:
    """
    Loads of `keys` tensors of 16 elements, on and off in turn.
    """
    state = {"model": {f"layers.{i // 10}.w{i % 10}": torch.ones(16) for i in range(keys)}}
    path = folder / f"step-{keys}"
    dcp.save(state, checkpoint_id=path, no_dist=True)
    loads: dict[str, list[Load]] = {"on": [], "off": []}
    timed_load(state, path)
    for place in range(rounds):
        for mode in ("on", "off") if place % 2 else ("off", "on"):
            (ckpt_sentry.install if mode == "on" else ckpt_sentry.uninstall)()
            loads[mode].append(timed_load(state, path))
    ckpt_sentry.uninstall()
    pairs = list(zip(loads["on"], loads["off"], strict=True))
    ratio, spread = middle(on.seconds / off.seconds for on, off in pairs)
    without_gc, its_spread = middle(on.without_gc / off.without_gc for on, off in pairs)
    own = own_seconds(state, path) + look_seconds(state, path)
    off = statistics.median(load.seconds for load in loads["off"])
    return {
        "keys": keys,
        "seconds_off": round(off, 4),
        "ratio": ratio,
        "spread": spread,
        "ratio_without_gc": without_gc,
        "spread_without_gc": its_spread,
        "gc_passes": {mode: statistics.median(load.passes for load in some) for mode, some in loads.items()},
        "own_seconds": round(own, 5),
        "own_ratio": round(1 + own / off, 4),
    }


def own_seconds(state: dict[str, Any], path: Path) -> float:
    """
    The least of three loads: time inside of the agent's own functions, called by the hooks.
    """
    spent: list[float] = []
    kept: list[Any] = []
    names = ("_begin", "_end", "_enter", "_planning", "_planned", "_reading", "_read", "_left")
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


def look_seconds(state: dict[str, Any], path: Path) -> float:
    """
    What a plan takes longer that is looked at while it is made: the median of 7 differences.
    """
    ckpt_sentry.install()
    differences = []
    for place in range(7):
        seconds = {}
        for is_watched in (True, False) if place % 2 else (False, True):
            planner = dcp.DefaultLoadPlanner()
            planner.set_up_planner(dict(state), dcp.FileSystemReader(path).read_metadata(), is_coordinator=True)
            if is_watched:
                dcp_planning.begin()
            gc.collect()
            began = time.perf_counter()
            planner.create_local_plan()
            seconds[is_watched] = time.perf_counter() - began
            dcp_planning.end()
        differences.append(seconds[True] - seconds[False])
    ckpt_sentry.uninstall()
    return statistics.median(differences)


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
    reading = [timed_load(state, path).seconds for _ in range(3)]
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
