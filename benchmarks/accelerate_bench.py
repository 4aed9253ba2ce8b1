"""
What the agent costs a load by accelerate, and what it saves: `python benchmarks/accelerate_bench.py [--gigabytes 1]`.

* on/off: a good safetensors checkpoint into a model that has values, proof on, the agent installed and not, alternating
  in one process. The values are copied. A model on the meta device gets the mapped file itself, and nothing is read
  yet: such a "load" of any size takes as long as its bookkeeping, so what the agent adds is given in milliseconds.
* refused/loaded: a checkpoint of twice the size with a wrong prefix, refused, and the same one loaded under its name.

Medians, and the spread of the ratios of neighbouring pairs, in two ways: "cached", the file lies in the page cache, and
"from disk", it is put out of the cache before each load. Seconds are those of the CPU and those on the clock, of one
thread; a wait for the disk is on the clock alone, and on shared machines it is mostly noise.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ |= {"CKPT_SENTRY": "1", "CKPT_SENTRY_LOG": "off", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
os.environ.setdefault("CKPT_SENTRY_DIR", tempfile.mkdtemp(prefix="ckpt-sentry-bench-records-"))
warnings.simplefilter("ignore")

import torch  # noqa: E402
from accelerate import big_modeling, init_empty_weights  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

import ckpt_sentry  # noqa: E402

torch.set_num_threads(1)
WIDTH = 1024


class Block(nn.Module):
    """
    The matrices and norms of a transformer's block: 12 x WIDTH² elements, 9 tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)


def model(gigabytes: float, *, empty: bool = False) -> nn.Module:
    """
    So many blocks that they take `gigabytes` in float32; `empty` on the meta device, else zeros.
    """
    blocks = round(gigabytes * 2**30 / (12 * WIDTH * WIDTH * 4))
    with init_empty_weights():
        made = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(blocks))})
    if not empty:
        made.to_empty(device="cpu")
        with torch.no_grad():
            for value in made.parameters():
                value.zero_()
    return made


def save(path: Path, gigabytes: float, prefix: str = "") -> None:
    """
    Values for that model.
    """
    save_file(
        {prefix + key: torch.randn(value.shape) for key, value in model(gigabytes, empty=True).state_dict().items()},
        path,
        metadata={"format": "pt"},
    )


class Way(NamedTuple):
    """
    How a load is measured: what is done to its file before.
    """

    name: str
    prepare: Callable[[Path], object]


class Seconds(NamedTuple):
    """
    What a load takes.
    """

    cpu: float
    clock: float


def evict(path: Path) -> None:
    """
    Put a file out of the page cache.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


WAYS = (Way("cached", lambda _: None), Way("from disk", evict))


def timed(load: Callable[[], object], path: Path, way: Way) -> Seconds:
    """
    Seconds that a load takes, garbage of the last one not counted.
    """
    gc.collect()
    way.prepare(path)
    began = Seconds(time.process_time(), time.perf_counter())
    load()
    return Seconds(time.process_time() - began.cpu, time.perf_counter() - began.clock)


def quartiles(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs)"


def cost(folder: Path, gigabytes: float, pairs: int) -> None:
    """
    Print on/off of a load that copies, and what one that only maps takes longer.
    """
    path = folder / "good.safetensors"
    save(path, gigabytes)
    target = model(gigabytes)
    for way in WAYS:
        on, off = alternate(partial(big_modeling.load_checkpoint_and_dispatch, target, str(path)), path, way, pairs)
        for kind in Seconds._fields:
            ratios = [getattr(one, kind) / getattr(other, kind) for one, other in zip(on, off, strict=True)]
            middle = statistics.median(getattr(one, kind) for one in off)
            print(f"good load of {gigabytes:g} GB, {way.name}, {kind} {middle:.2f} s: on/off {quartiles(ratios)}")
    del target
    on, off = alternate(
        lambda: big_modeling.load_checkpoint_and_dispatch(
            model(gigabytes, empty=True), str(path), device_map={"": "cpu"}
        ),
        path,
        WAYS[0],
        pairs,
    )
    with_it, without = (statistics.median(one.cpu for one in some) for some in (on, off))
    print(f"mapped, not read, cpu {without * 1e3:.0f} ms: {(with_it - without) * 1e3:+.1f} ms with the agent")
    path.unlink()


def alternate(load: Callable[[], object], path: Path, way: Way, pairs: int) -> tuple[list[Seconds], list[Seconds]]:
    """
    Seconds with the agent and without, in pairs, of which every other begins with the agent.
    """
    seconds: dict[bool, list[Seconds]] = {True: [], False: []}
    ckpt_sentry.install()
    load()
    for pair in range(pairs):
        for is_on in (True, False) if pair % 2 else (False, True):
            (ckpt_sentry.install if is_on else ckpt_sentry.uninstall)()
            seconds[is_on].append(timed(load, path, way))
    return seconds[True], seconds[False]


def saving(folder: Path, gigabytes: float, pairs: int) -> None:
    """
    Print how much faster a refusal is than the load.
    """
    path = folder / "wrong.safetensors"
    save(path, gigabytes, "model.")
    target = model(gigabytes)
    right = nn.ModuleDict({"model": target})
    for way in WAYS:
        loaded, refused = [], []
        for _ in range(pairs):
            ckpt_sentry.uninstall()
            load = partial(big_modeling.load_checkpoint_and_dispatch, right, str(path))
            loaded.append(timed(load, path, way))
            ckpt_sentry.install()
            refused.append(timed(partial(refuse, target, path), path, way))
        for kind in Seconds._fields:
            factors = [getattr(one, kind) / getattr(other, kind) for one, other in zip(loaded, refused, strict=True)]
            middle = statistics.median(getattr(one, kind) for one in refused)
            print(
                f"wrong prefix, {gigabytes:g} GB, {way.name}, {kind}: refused in {middle * 1e3:.1f} ms, "
                f"{statistics.median(factors):.0f} times as fast as loaded ({min(factors):.0f} to {max(factors):.0f})"
            )


def refuse(wrong: nn.Module, path: Path) -> None:
    """
    A load that has to be refused.
    """
    try:
        big_modeling.load_checkpoint_and_dispatch(wrong, str(path))
    except ckpt_sentry.LowCoverageError:
        return
    sys.exit("the load was not refused")


def main() -> None:
    """
    Run both.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=21)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckpt-sentry-bench-"))
    try:
        cost(folder, options.gigabytes, options.pairs)
        saving(folder, 2 * options.gigabytes, 5)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
