"""
Tiny models, and values for them that no initialisation gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class Net(nn.Module):
    """
    embed, layers.{0-1}.{attn,norm}.{weight,bias}, head: 10 keys.
    """

    def __init__(self, *, tied: bool = False, counter: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if counter:
            self.bn = nn.BatchNorm1d(8)


def before_load(module: nn.Module, hook: Callable[..., Any]) -> None:
    """
    Register a pre-hook of `load_state_dict`: torch 2.4 has that by its private name alone.
    """
    public = getattr(module, "register_load_state_dict_pre_hook", None)
    (public or partial(module._register_load_state_dict_pre_hook, with_module=True))(hook)


def values(seed: int = 1, **options: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    seen: dict[int, torch.Tensor] = {}
    return {
        key: seen.setdefault(value.data_ptr(), torch.randn(value.shape).to(value.dtype))
        for key, value in Net(**options).state_dict().items()
    }


def renamed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in values().items()}


def equal(module: nn.Module, wanted: dict[str, torch.Tensor]) -> bool:
    held = module.state_dict()
    return all(torch.equal(held[key], value) for key, value in wanted.items())
