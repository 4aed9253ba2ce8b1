"""
What `nn.Module.load_state_dict` and `torch.load` cost with the agent, against without.

    python benchmarks/module_bench.py [--keys 10000] [--rounds 15]

The agent is switched in and out by one process, turn by turn, so that both sides see the same machine; the median of
the ratios of neighbours is printed. The first load of its kind, which is recorded, is measured by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ["CKPT_SENTRY"] = "1"
os.environ.setdefault("CKPT_SENTRY_DIR", tempfile.mkdtemp(prefix="module-bench-"))

import torch
from torch import nn

from ckpt_sentry import hooks
from ckpt_sentry.targets import module_report


def layered(keys: int, width: int) -> nn.Module:
    """
    Layers of ten keys, as a transformer's: `layers.N.{attn,mlp}.{q,k,…}.{weight,bias}`.
    """

    def part(*names: str) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(width, width) for name in names})

    layers = [nn.ModuleDict({"attn": part("q", "k", "v"), "mlp": part("up", "down")}) for _ in range(keys // 10)]
    groups = [nn.ModuleList(layers[start : start + 32]) for start in range(0, len(layers), 32)]
    return nn.ModuleDict({f"stage{number}": group for number, group in enumerate(groups)})


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1_000


def compare(name: str, with_agent: Callable[[], object], without: Callable[[], object], rounds: int) -> None:
    with_agent()
    without()
    pairs = []
    for number in range(rounds):
        # Who goes first takes turns.
        if number % 2:
            on = milliseconds(with_agent)
            off = milliseconds(without)
        else:
            off = milliseconds(without)
            on = milliseconds(with_agent)
        pairs.append((on, off))
    on, off = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    print(f"{name:48} off {off:9.3f} ms   on {on:9.3f} ms   ratio {ratio:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hooks.install()
    watched = nn.Module.load_state_dict
    original = watched.__wrapped__

    for width in (4, 64):
        model = layered(arguments.keys, width)
        state = model.state_dict()
        module_report.forget()
        first = milliseconds(lambda: watched(model, state))  # noqa: B023 - called at once
        title = f"load_state_dict, {len(state):,} keys of {width} x {width}"
        print(f"{title + ', the first':48} {'':16} on {first:9.3f} ms")
        compare(title, lambda: watched(model, state), lambda: original(model, state), arguments.rounds)  # noqa: B023

    small = nn.Linear(4, 4)
    values = small.state_dict()

    def often(call: Callable[..., object]) -> Callable[[], None]:
        return lambda: [call(small, values) for _ in range(1_000)] and None

    compare("load_state_dict, 2 keys, 1,000 times", often(watched), often(original), arguments.rounds)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt")
        torch.save(layered(arguments.keys, 4).state_dict(), path)
        load = torch.load
        compare("torch.load", lambda: load(path), lambda: load.__wrapped__(path), 5)
    hooks.uninstall()


if __name__ == "__main__":
    main()
