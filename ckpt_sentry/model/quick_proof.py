"""
The quick part of a proof: samples of tensors that lie in memory as they lie in the file, compared all at once.

A tensor that is not of that kind, or whose sample is not equal, is left to the thorough comparison in `proof`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckpt_sentry.formats.elements import is_flat
from ckpt_sentry.model.tensors import PLAIN

if TYPE_CHECKING:
    from ckpt_sentry.formats.elements import Sampler, Slot

RUN: Final = 8
"""Elements that are read at once: neighbours, of which a large tensor gives several, evenly spread."""

_NAMES: Final = {
    getattr(torch, name): name
    for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
}


class _Pair(NamedTuple):
    name: str
    held: tuple[torch.Tensor, ...]
    """Views: one of a whole small tensor, or some of runs."""
    saved: bytes
    shows: bool
    """Whether the saved values differ among themselves, or are only one: else it shows nothing that they are equal."""


def equal(claims: Iterable[tuple[str, Any, Slot]], sampler: Sampler, count: int) -> Mapping[str, bool]:
    """
    Names of which `count` elements are bit for bit what the file has, each with whether that shows anything.

    Args:
        claims: name, what the model holds, and where its value lies in a file.

    :raises OSError: a file cannot be read.
    """
    groups: dict[tuple[torch.dtype, bool], list[_Pair]] = {}
    for name, held, slot in claims:
        if _is_quick(held, slot):
            pair = _pair(name, held, slot, sampler, count)
            groups.setdefault((held.dtype, pair.held[0].dim() == 1), []).append(pair)
    return {pair.name: pair.shows for (dtype, _), pairs in groups.items() for pair in _halved(pairs, dtype)}


def _is_quick(held: Any, slot: Slot) -> bool:
    return (
        type(held) in PLAIN
        and _NAMES.get(held.dtype) == slot.dtype
        and held.shape == slot.shape
        and held.is_contiguous()
        and held.device.type == "cpu"
        and held.numel() > 0
        and is_flat(slot)
    )


def _pair(name: str, held: torch.Tensor, slot: Slot, sampler: Sampler, count: int) -> _Pair:
    file, offset, numel, size = sampler.open(slot.file), slot.offset or 0, held.numel(), held.element_size()
    runs = max(2, count // RUN)
    if numel <= runs * RUN:
        saved = os.pread(file, numel * size, offset)
        return _Pair(name, (held.reshape(-1),), saved, numel == 1 or saved != saved[:size] * numel)
    # The last run ends where the tensor does, which is no even step from the others.
    step = (numel - RUN) // (runs - 1)
    starts = [*range(0, step * (runs - 1), step), numel - RUN]
    saved = b"".join([os.pread(file, RUN * size, offset + start * size) for start in starts])
    first = held.storage_offset()
    views: tuple[torch.Tensor, ...]
    if step * (runs - 1) == numel - RUN:
        views = (held.as_strided((runs, RUN), (step, 1), first),)
    else:
        views = (
            held.as_strided((runs - 1, RUN), (step, 1), first),
            held.as_strided((1, RUN), (RUN, 1), first + numel - RUN),
        )
    return _Pair(name, views, saved, saved != saved[:size] * (runs * RUN))


def _halved(pairs: list[_Pair], dtype: torch.dtype) -> list[_Pair]:
    """
    The pairs that are equal, by halves: where all are, one comparison shows it, and few that are not cost few more.
    """
    if _are_equal(pairs, dtype):
        return pairs
    if len(pairs) == 1:
        return []
    middle = len(pairs) // 2
    return _halved(pairs[:middle], dtype) + _halved(pairs[middle:], dtype)


def _are_equal(pairs: list[_Pair], dtype: torch.dtype) -> bool:
    held = torch.cat([view for pair in pairs for view in pair.held]).reshape(-1)
    saved = bytearray(b"".join([pair.saved for pair in pairs]))
    # A file that ends too early is for the thorough comparison, which says so.
    return len(saved) == held.nbytes and bool(torch.equal(torch.frombuffer(saved, dtype=dtype), held))
