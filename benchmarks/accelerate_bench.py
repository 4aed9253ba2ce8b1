"""
What the agent costs a load by accelerate, and what it saves.

    python benchmarks/accelerate_bench.py [--pairs 15] [--pool FILE] [--only cached] [--tensors 256]

A good safetensors file of so many tensors of 4 MB into a model that has values, proof on, the first load of its
process; with the agent and without it, in processes that take turns (see `pairs.py`). "cached": the file lies in the
page cache; "from disk": it is put out of the cache before. What a first load imports, `torch.distributed.checkpoint`,
has been imported before in both.

Then a checkpoint of that size with a wrong prefix: refused, and the same file loaded under its name, in one process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pairs

WIDTH = 1024


def model(tensors: int):
    """
    So many square matrices, each in a module of its own.
    """
    import torch
    from torch import nn

    torch.set_num_threads(1)
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False) for _ in range(tensors)
            )
        }
    )


def save(path: Path, tensors: int, prefix: str = "") -> None:
    from safetensors.torch import save_file

    state = {prefix + key: value for key, value in model(tensors).state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def evict(path: str) -> None:
    """
    Put a file out of the page cache.
    """
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(path: str, tensors: str, way: str) -> None:
    """
    The work: one load.
    """
    warnings.simplefilter("ignore")
    import accelerate
    import torch.distributed.checkpoint  # noqa: F401 - accelerate imports it in its first load

    target = model(int(tensors))
    if way == "from disk":
        evict(path)
    else:
        Path(path).read_bytes()
    with pairs.measured():
        accelerate.load_checkpoint_in_model(target, path)


def refused(path: str, tensors: str) -> None:
    """
    The factor between loading a file under its name and refusing it under a wrong one.
    """
    os.environ["CKPT_SENTRY_LOG"] = "off"
    warnings.simplefilter("ignore")
    import accelerate
    from torch import nn

    import ckpt_sentry

    wrong = model(int(tensors))
    right = nn.ModuleDict({"model": wrong})
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for is_on in 5 * [False, True]:
        (ckpt_sentry.install if is_on else ckpt_sentry.uninstall)()
        began = time.perf_counter()
        try:
            accelerate.load_checkpoint_in_model(wrong if is_on else right, path)
        except ckpt_sentry.LowCoverageError:
            assert is_on
        seconds[is_on].append(time.perf_counter() - began)
    loading, refusing = (statistics.median(seconds[is_on]) for is_on in (False, True))
    print(json.dumps({"load_seconds": loading, "refuse_seconds": refusing, "times_faster": round(loading / refusing)}))


def main() -> None:
    parser = pairs.arguments(__doc__, pairs=15)
    parser.add_argument("--tensors", type=int, default=256, help="of 4 MB each")
    options = parser.parse_args()
    if options.work:
        pairs.do({"load": load, "refused": refused}, options.work)
        return
    os.environ.pop("CKPT_SENTRY", None)
    with tempfile.TemporaryDirectory(prefix="accelerate-bench-") as folder:
        path = Path(folder, "model.safetensors")
        works = [
            pairs.Work(
                f"load_checkpoint_in_model of {options.tensors} tensors, {way}",
                ("load", str(path), str(options.tensors), way),
            )
            for way in ("cached", "from disk")
        ]
        chosen = pairs.chosen(works, options)
        if chosen and options.pairs:
            save(path, options.tensors)
        pairs.compare(__file__, chosen, options)
        if not options.only:
            save(path, options.tensors, "model.")
            refused(str(path), str(options.tensors))


if __name__ == "__main__":
    sys.exit(main())
