"""
What a value of a state dict is on this rank: a plain tensor, or the parts of one that many ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of nearly all values: asked for by `type(value) in PLAIN`, which is quicker than `isinstance`."""


def local_parts(value: Any) -> Sequence[torch.Tensor]:
    """
    The parts of a tensor that this rank holds: a plain one whole, of a DTensor its own, of a ShardedTensor its shards.
    Nothing of what is no tensor.
    """
    if type(value) in PLAIN:
        return (value,)
    if isinstance(part := getattr(value, "_local_tensor", None), torch.Tensor):
        return (part,)
    if callable(shards := getattr(value, "local_shards", None)):
        return tuple(shard.tensor for shard in shards())
    return (value,) if isinstance(value, torch.Tensor) else ()
