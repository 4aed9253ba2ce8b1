"""
What a value of a state dict is on this rank: a plain tensor, or the parts of one that many ranks share.

A tensor of a foreign class may refuse any operation. So it is asked what its C part knows, with `quietly` around:
neither its `__torch_function__` nor a mode of the host's is called then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of nearly all values: asked for by `type(value) in PLAIN`, which is quicker than `isinstance`."""

quietly: Final = torch._C.DisableTorchFunction


def owns_memory(value: Any) -> bool:
    """
    Whether a value is a tensor that holds its values itself: a class that takes operations over (`__torch_dispatch__`)
    may keep them anywhere, and may refuse any question.
    """
    kind = type(value)
    return kind in PLAIN or (
        issubclass(kind, torch.Tensor) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def is_shared(value: Any) -> bool:
    """
    Whether a value is a tensor of which this rank holds a part, of a kind of torch's: a DTensor, a ShardedTensor.
    """
    return hasattr(value, "_local_tensor") or hasattr(value, "local_shards")


def local_parts(value: Any) -> Sequence[torch.Tensor]:
    """
    The parts of a tensor that this rank holds: a plain one whole, of a DTensor its own, of a ShardedTensor its shards.
    Nothing of what is no tensor, or of one that keeps its values where only its class knows.
    """
    if type(value) in PLAIN:
        return (value,)
    if owns_memory(part := getattr(value, "_local_tensor", None)):
        return (part,)
    if callable(shards := getattr(value, "local_shards", None)):
        return tuple(shard.tensor for shard in shards() if owns_memory(shard.tensor))
    return (value,) if owns_memory(value) else ()
