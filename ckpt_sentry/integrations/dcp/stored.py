"""
Values that a DCP checkpoint on this machine holds, for a load of which nothing was seen to be written.

A slice of a file is what `torch.save` made of one tensor (torch 2.13.0, filesystem.py, `_write_item`). It is read as
`weights_only`, and only where it is small.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, Final

import torch

from ckpt_sentry.formats.elements import open_regular
from ckpt_sentry.integrations.dcp.reads import items_of
from ckpt_sentry.model.tensors import local_parts, owns_memory, quietly
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MOST_BYTES: Final = 2**24
"""Of one slice."""


class Stored:
    """
    What a checkpoint at a path, of this metadata, holds for the keys that a plan reads into these values.
    """

    def __init__(self, folder: str | None, metadata: Any, plan: Any, values: Mapping[str, Any]) -> None:
        self._folder = folder if folder is not None and "://" not in folder else None
        self._places = getattr(metadata, "storage_data", None) or {}
        self._values = values
        self._items: dict[str, list[Any]] = {}
        for item in items_of(plan) or ():
            self._items.setdefault(item.dest_index.fqn, []).append(item)

    @property
    def keys(self) -> Collection[str]:
        """
        The keys into which the plan reads.
        """
        return self._items.keys()

    def is_tensor(self, key: str) -> bool:
        """
        Whether a key is a tensor here with values in memory.
        """
        return any(part.numel() and not part.is_meta for part in local_parts(self._values.get(key)))

    def is_held(self, key: str) -> bool | None:
        """
        Whether the tensor of this key has the values that the checkpoint has for it; None where that cannot be told.
        """
        value = self._values.get(key)
        if not owns_memory(value) or self._folder is None:
            return None
        try:
            with quietly(), torch.no_grad():
                answers = [self._agrees(item, value) for item in self._items.get(key, ())]
        except Exception as error:  # another format, another torch, a file that is gone
            let_through(error)
            return None
        return None if not answers or None in answers else all(answers)

    def _agrees(self, item: Any, value: torch.Tensor) -> bool | None:
        place = self._places.get(item.storage_index)
        if place is None or not 0 < place.length <= MOST_BYTES or getattr(place, "transform_descriptors", None):
            return None
        file = os.path.join(self._folder or "", place.relative_path)
        if os.path.isabs(place.relative_path) or ".." in place.relative_path.split("/"):
            return None
        with open_regular(file) as opened:
            data = os.pread(opened.fileno(), place.length, place.offset)
        saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        wanted = _narrow(saved, item.storage_offsets, item.lengths)
        held = _narrow(value, item.dest_offsets, item.lengths).detach().cpu()
        return bool(torch.equal(wanted.to(held.dtype), held)) or bool(torch.isnan(held).any())


def _narrow(tensor: torch.Tensor, offsets: Any, lengths: Any) -> torch.Tensor:
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor
