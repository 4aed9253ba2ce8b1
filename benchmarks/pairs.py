"""
What the agent costs, by comparing processes: one with it, one that never had it, in turn.

Switching it off within one process is no baseline: its modules, its objects and its wrappers stay, and what they cost
the garbage collector stays with them. So each measurement is a process of its own, `CKPT_SENTRY=1` or `0`, that does
the work once and prints what it took: seconds of the CPU (user and system, all threads) and on the clock. Who goes
first takes turns; a ratio is taken within a pair, so that a slow moment of the machine hits both of its sides.

With `--pool FILE` pairs are added to a file, and the figures are those of all that it holds: long series can be
measured in short calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Took(NamedTuple):
    """
    Seconds of the CPU and on the clock.
    """

    cpu: float
    clock: float


class Work(NamedTuple):
    """
    One thing to measure: its title, and the arguments by which the benchmark runs it in a process of its own.
    """

    title: str
    arguments: tuple[str, ...]
    each: int = 1
    """How many equal things it does: the difference is given for one."""


@contextmanager
def measured() -> Iterator[None]:
    """
    In the process that does the work: print what the block takes.
    """
    began = Took(time.process_time(), time.perf_counter())
    yield
    print(json.dumps([time.process_time() - began.cpu, time.perf_counter() - began.clock]), flush=True)


@contextmanager
def measured_from_the_start() -> Iterator[None]:
    """
    As `measured`, with the start of the interpreter: for what is imported. There is no clock for that.
    """
    yield
    took = time.process_time()
    print(json.dumps([took, took]), flush=True)


def one(script: str, work: Work, *, on: bool) -> Took:
    """
    Do the work in a process.
    """
    # Bytecode is written, as an installation does: to compile all of a package is not what is measured.
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("CKPT_SENTRY", "PYTHONDONTWRITE"))}
    with tempfile.TemporaryDirectory(prefix="bench-records-") as records:
        variables = {"CKPT_SENTRY": str(int(on)), "CKPT_SENTRY_DIR": records, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, script, "--work", *work.arguments],
            env={**kept, **variables, "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    return Took(*json.loads(done.stdout.splitlines()[-1]))


def middle(values: list[float]) -> tuple[float, float, float]:
    """
    The median, and the quartiles.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def figures(work: Work, pairs: list[tuple[Took, Took]]) -> dict[str, Any]:
    """
    What the pairs (on, off) say.
    """
    ratio, low, high = middle([on.cpu / off.cpu for on, off in pairs])
    added, least, most = (1_000 * value / work.each for value in middle([on.cpu - off.cpu for on, off in pairs]))
    return {
        "work": work.title,
        "pairs": len(pairs),
        "cpu_seconds_off": round(statistics.median(off.cpu for _, off in pairs), 4),
        "cpu_ratio": [round(value, 4) for value in (ratio, low, high)],
        "added_ms_each": [round(value, 3) for value in (added, least, most)],
        "clock_ratio": [round(value, 4) for value in middle([on.clock / off.clock for on, off in pairs])],
    }


def compare(script: str, works: list[Work], options: argparse.Namespace) -> None:
    """
    Measure each work in so many pairs, and print a line of figures: the median, and the quartiles.
    """
    known: dict[str, list[tuple[Took, Took]]] = {}
    if options.pool is not None and options.pool.exists():
        for line in options.pool.read_text().splitlines():
            title, on, off = json.loads(line)
            known.setdefault(title, []).append((Took(*on), Took(*off)))
    for work in works:
        pairs = known.setdefault(work.title, [])
        if options.pairs:
            one(script, work, on=True)
        for _ in range(options.pairs):
            order = (True, False) if len(pairs) % 2 else (False, True)
            took = {on: one(script, work, on=on) for on in order}
            pairs.append((took[True], took[False]))
            if options.pool is not None:
                with options.pool.open("a") as file:
                    file.write(json.dumps([work.title, took[True], took[False]]) + "\n")
        if pairs:
            print(json.dumps(figures(work, pairs)), flush=True)


def arguments(description: str | None, *, pairs: int) -> argparse.ArgumentParser:
    """
    A parser with what all of these benchmarks take.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs, help=f"pairs of processes for each work ({pairs})")
    parser.add_argument("--pool", type=Path, help="add the pairs to this file, and count all that it holds")
    parser.add_argument("--only", default="", help="works whose title has this text")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    return parser


def chosen(works: list[Work], options: argparse.Namespace) -> list[Work]:
    """
    The works that are asked for.
    """
    return [work for work in works if options.only in work.title]


def do(table: dict[str, Callable[..., None]], words: list[str]) -> None:
    """
    In the process that does the work: call what the first word names with the others.
    """
    table[words[0]](*words[1:])
