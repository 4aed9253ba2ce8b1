"""
Which file a state dict came from, where this process itself read it with torch or safetensors.

A plain dict cannot be referenced weakly, and people rename its keys into a new one anyway. So a few of its tensors are
remembered, by identity: they travel with the values, and are forgotten as soon as the host lets them go. The weak
reference is to the storage, since `torch.utils.swap_tensors` refuses a tensor that has one.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from ckpt_sentry.core.report import Finding
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.patching.guard import let_through

EDGE = 4
"""Tensors that are remembered at either end of a dict."""
MOST_DICTS = 16
"""Dicts one level down that are looked into: `state_dict`, `ema`, `optimizer`, …"""
MOST_REMEMBERED = 4_096

MOST_UNCLAIMED = 4
"""Files that are remembered as read and not loaded."""

_unclaimed: dict[str, None] = {}
"""Paths that were read, of which no tensor was loaded yet; the last one comes last."""
_known: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
"""By the identity of a tensor: its storage, and the path it was read from. An entry goes when the storage does."""


def path_of(file: Any) -> str | None:
    """
    The path in what `torch.load` was given: a path, or a file that has a name.
    """
    candidate = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    if not isinstance(candidate, (str, bytes, os.PathLike)):
        return None
    return os.fsdecode(candidate) or None


def remember(loaded: Any, path: str) -> None:
    """
    Note that what was loaded came from this path. Costs the same for a dict of any size.
    """
    _unclaimed.pop(path, None)
    _unclaimed[path] = None
    while len(_unclaimed) > MOST_UNCLAIMED:
        _unclaimed.pop(next(iter(_unclaimed)), None)
    for tensor in _landmarks(loaded):
        if len(_known) >= MOST_REMEMBERED:
            return
        place, storage = id(tensor), storage_of(tensor)
        if storage is not None:
            _known[place] = weakref.ref(storage, _forgetter(place)), path


def origin(state_dict: Mapping[Any, Any] | torch.Tensor) -> str | None:
    """
    The path that a dict's tensors (or a lone tensor) were read from, or None where no tensor of either end is known.
    """
    if not _known:
        return None
    for tensor in _landmarks(state_dict):
        known = _known.get(id(tensor))
        if known is not None and known[0]() is storage_of(tensor):
            _unclaimed.pop(known[1], None)
            return known[1]
    return None


def unclaimed() -> tuple[str, ...]:
    """
    The files that were read and of which no tensor has been looked for since, the last one first.
    """
    return tuple(reversed(_unclaimed))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """
    What holds a tensor's values, always as the same object; None where it has nothing of the kind (sparse, packed).
    """
    try:
        return tensor.untyped_storage()
    except (RuntimeError, AttributeError):
        return None


def written(path: str) -> Finding | None:
    """
    Say which file the values came from and since when it has been as it is; None where it is not there any more.
    """
    try:
        changed = os.stat(path).st_mtime
    except (OSError, ValueError) as failure:
        let_through(failure)
        return None
    # A moment, not an age: all ranks say the same.
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(changed))
    return Finding("source_file", "info", f"The values were read from {shown_path(path)}, last written {moment}.")


def forget() -> None:
    """
    Forget every path.
    """
    _known.clear()
    _unclaimed.clear()


def _forgetter(place: int) -> Any:
    forget_place = _known.pop

    def gone(reference: weakref.ref[torch.UntypedStorage]) -> None:
        # The identity may belong to another tensor by now.
        known = _known.get(place)
        if known is not None and known[0] is reference:
            forget_place(place, None)

    return gone


def _landmarks(loaded: Any) -> Iterator[torch.Tensor]:
    if isinstance(loaded, torch.Tensor):
        yield loaded
        return
    # A mapping of another kind may read each value from a file when it is asked.
    if not isinstance(loaded, dict):
        return
    yield from _edges(loaded)
    for value in islice(loaded.values(), MOST_DICTS):
        if isinstance(value, dict):
            yield from _edges(value)


def _edges(values: dict[Any, Any]) -> Iterator[torch.Tensor]:
    yield from _tensors(islice(values.values(), EDGE))
    if len(values) > EDGE:
        yield from _tensors(islice(reversed(values.values()), EDGE))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))
