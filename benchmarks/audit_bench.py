"""
What the audit costs, in one process and without torch: the median of a few runs, in milliseconds of processor time.

    python benchmarks/audit_bench.py [--json FILE] [--runs N]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ckpt_sentry.core.diff import diff
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.fold import fold
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.rename import infer

MOST = 200_000
Entries = dict[str, Entry]


def experts(count: int) -> Entries:
    """A mixture of experts: 20 keys each, 128 to a layer."""
    entries: Entries = {}
    for number in range(count // 20 + 1):
        for name in ("up", "down", "gate", "w1", "w2"):
            for kind in ("weight", "bias", "scale", "zero"):
                key = f"model.layers.{number // 128}.experts.{number % 128}.{name}.{kind}"
                entries[key] = Entry((len(entries) % 7 + 1, number % 5 + 1), "float32")
    return dict(list(entries.items())[:count])


def copied(entries: Entries, change: Callable[[str], str] = str, dtype: str = "float32") -> Entries:
    """Another side with equal entries that are other objects, as if read from a file."""
    return {change(key): Entry(tuple(entry.shape or ()), dtype) for key, entry in entries.items()}


def renames() -> dict[str, Callable[[str], str]]:
    return {
        "prefix": lambda key: "module." + key,
        "wrapper": lambda key: key.replace("layers.", "layers._orig_mod."),
        "components": lambda key: key.replace("layers.", "h.").replace(".weight", ".w"),
        "prefix and components": lambda key: "module." + key.replace("layers.", "h.").replace(".weight", ".w"),
        "nothing in common": lambda key: "x.y." + key.replace(".", "-"),
    }


def measure(run: Callable[[], object], runs: int) -> dict[str, float]:
    times = []
    for _ in range(runs):
        gc.collect()
        start = time.process_time()
        run()
        times.append((time.process_time() - start) * 1000)
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each case in turn; its data is let go before the next."""
    for count in (1_000, 10_000, 50_000):
        model = experts(count)
        same, cast = copied(model), copied(model, dtype="bfloat16")
        ours, theirs, other = Inventory(model), Inventory(same), Inventory(cast)
        yield f"diff, {count:,} equal keys", partial(diff, model, same)
        yield f"examine, {count:,} equal keys", partial(examine, ours, theirs)
        yield f"examine, {count:,} keys cast", partial(examine, ours, other)
    model = experts(MOST)
    yield f"fold, {MOST:,} keys", partial(fold, model)
    for name, change in renames().items():
        changed = copied(model, change)
        sides = Inventory(model), Inventory(changed), diff(model, changed)
        yield f"rename, {MOST:,} keys, {name}", partial(infer, *sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    results = {}
    for name, run in cases():
        found = results[name] = measure(run, arguments.runs)
        print(f"{name:48} {found['median_ms']:9.2f} ms  ({found['min_ms']:.2f}-{found['max_ms']:.2f})")
    if arguments.json:
        document = {"python": platform.python_version(), "machine": platform.machine(), "results": results}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
