"""
Loads by nn.Module alone, as a job makes them: module_loads.py SCENARIO.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))


def net() -> nn.Module:
    torch.manual_seed(RANK)
    return nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})


def state(prefix: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {f"{prefix}{key}": torch.randn(value.shape) for key, value in net().state_dict().items()}


def good() -> None:
    """
    What every job does: resumes, and swaps averaged weights in and out.
    """
    model, average = net(), net()
    model.load_state_dict(state())
    for _ in range(50):
        average.load_state_dict(model.state_dict())


def loose() -> None:
    """
    Not one key matches, on every rank.
    """
    net().load_state_dict(state("module."), strict=False)


def first_only() -> None:
    """
    The first rank alone loads, and broadcasts.
    """
    if RANK == 0:
        net().load_state_dict(state("module."), strict=False)


def strict() -> None:
    net().load_state_dict(state("module."))


if __name__ == "__main__":
    {"good": good, "loose": loose, "first_only": first_only, "strict": strict}[sys.argv[1]]()
