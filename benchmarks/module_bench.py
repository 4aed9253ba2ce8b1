"""
What watching costs a good `load_state_dict`, and `torch.load`.

    python benchmarks/module_bench.py [--pairs 15] [--pool FILE] [--only "10,000 keys"]

The first of its process, which is recorded, is measured by itself; then a hundred of the same, and many small ones.
With the agent and without it, in processes that take turns (see `pairs.py`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pairs

SMALL = 10_000
KEYS = "10000"


def layered(keys: int):
    """
    Layers of ten keys, as a transformer's: `stage.N.layer.{weight,bias}`.
    """
    import torch
    from torch import nn

    torch.set_num_threads(1)
    layers = [nn.ModuleList(nn.Linear(4, 4) for _ in range(5)) for _ in range(keys // 10)]
    return nn.ModuleList(nn.ModuleList(layers[start : start + 32]) for start in range(0, len(layers), 32))


def fill(keys: str, before: str, times: str) -> None:
    """
    The work: so many loads, after so many.
    """
    model = layered(int(keys))
    state = model.state_dict()
    for _ in range(int(before)):
        model.load_state_dict(state)
    with pairs.measured():
        for _ in range(int(times)):
            model.load_state_dict(state)


def read(path: str) -> None:
    import torch

    with pairs.measured():
        torch.load(path)


def main() -> None:
    options = pairs.arguments(__doc__, pairs=15).parse_args()
    if options.work:
        pairs.do({"fill": fill, "read": read}, options.work)
        return
    with tempfile.TemporaryDirectory(prefix="module-bench-") as folder:
        path = Path(folder, "model.pt")
        works = [
            pairs.Work("load_state_dict of 10,000 keys, the first", ("fill", KEYS, "0", "1")),
            pairs.Work("load_state_dict of 10,000 keys, 20 more", ("fill", KEYS, "1", "20"), each=20),
            pairs.Work(f"load_state_dict of 10 keys, {SMALL:,} more", ("fill", "10", "1", str(SMALL)), each=SMALL),
            pairs.Work("torch.load of 10,000 keys", ("read", str(path))),
        ]
        chosen = pairs.chosen(works, options)
        if any(work.arguments[0] == "read" for work in chosen) and options.pairs:
            import torch

            torch.save(layered(int(KEYS)).state_dict(), path)
        pairs.compare(__file__, chosen, options)


if __name__ == "__main__":
    main()
