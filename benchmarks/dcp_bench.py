"""
What watching costs a good `dcp.load`, and how soon a hopeless one is diagnosed.

    python benchmarks/dcp_bench.py [--pairs 15] [--pool FILE] [--only "10,000 keys"] [--gigabytes 2]

Loads of so many tensors of 16 elements, the first of their process, and tiny loads in a row; with the agent and without
it, in processes that take turns (see `pairs.py`). The diagnosis is that of a prefix mismatch in a checkpoint of 16
shards, against the time to read its data once, in one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import pairs

SHARDS = 16
TINY = 10_000


def save(keys: int, path: Path) -> None:
    """
    Save in this process, before any is measured.
    """
    import torch.distributed.checkpoint as dcp

    dcp.save(state(keys), checkpoint_id=path, no_dist=True)


def state(keys: int) -> dict[str, object]:
    import torch

    return {"model": {f"layers.{i // 10}.w{i % 10}": torch.ones(16) for i in range(keys)}}


def load(path: str, keys: str, times: str) -> None:
    """
    The work: so many loads. What is imported is measured by `startup_bench.py`.
    """
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp

    values = state(int(keys))
    with pairs.measured():
        for _ in range(int(times)):
            dcp.load(values, checkpoint_id=path, no_dist=True)


def works(folder: Path) -> list[pairs.Work]:
    found = [
        pairs.Work(f"dcp.load of {keys:,} keys", ("load", str(folder / f"step-{keys}"), str(keys), "1"))
        for keys in (1_000, 10_000, 50_000)
    ]
    tiny = ("load", str(folder / "step-2"), "2", str(TINY))
    return [*found, pairs.Work(f"a tiny dcp.load, {TINY:,} in a row", tiny, each=TINY)]


def diagnosis(gigabytes: float, folder: Path) -> dict[str, object]:
    """
    A checkpoint of which every key has the wrong prefix: from the call to the exception, against reading all of it.
    """
    rows = int(gigabytes * 2**30 / 4 / SHARDS / 1024)
    import torch
    import torch.distributed.checkpoint as dcp

    import ckpt_sentry

    def seconds(values: dict[str, object]) -> float:
        began = time.perf_counter()
        with contextlib.suppress(dcp.CheckpointException):
            dcp.load(values, checkpoint_id=path, no_dist=True)
        return time.perf_counter() - began

    state = {f"module.layers.{i}.weight": torch.ones(rows, 1024) for i in range(SHARDS)}
    path = folder / "step-2"
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    wanted = {key.removeprefix("module."): value for key, value in state.items()}
    reading = [seconds(state) for _ in range(3)]
    ckpt_sentry.install()
    failing = [seconds(wanted) for _ in range(3)]
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
    parser = pairs.arguments(__doc__, pairs=15)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint to diagnose; 0: none")
    options = parser.parse_args()
    if options.work:
        pairs.do({"load": load}, options.work)
        return
    os.environ |= {"CKPT_SENTRY_LOG": "off", "CKPT_SENTRY_DIR": tempfile.mkdtemp(prefix="dcp-bench-records-")}
    os.environ.pop("CKPT_SENTRY", None)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="dcp-bench-") as folder:
        chosen = pairs.chosen(works(Path(folder)), options)
        for keys in sorted({int(work.arguments[2]) for work in chosen}) if options.pairs else ():
            save(keys, Path(folder, f"step-{keys}"))
        pairs.compare(__file__, chosen, options)
        if options.gigabytes and not options.only:
            print(json.dumps(diagnosis(options.gigabytes, Path(folder))))


if __name__ == "__main__":
    main()
