"""
Which tensors of a module have been written to since a moment, whoever wrote them and by whatever way.

A loader either copies into a tensor, which then counts one version more, or puts another in its place. Loading the same
values again is a load too: equal values alone prove nothing. Nothing of the module is kept alive, nor is a tensor
referenced weakly: `torch.utils.swap_tensors`, by which a loader may fill it, refuses one that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckpt_sentry.model import inventories, proof, provenance

if TYPE_CHECKING:
    import torch


class _Mark(NamedTuple):
    tensor: int
    storage: weakref.ref[torch.UntypedStorage] | None
    version: int | None
    address: int | None


class Snapshot:
    """
    The state of a module's parameters and persistent buffers at the moment of its making.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._marks = {key: _mark(value) for key, value in inventories.tensors_of(module)}
        self._values = proof.samples(proof.Holder(module), self._marks)

    def written(self, module: torch.nn.Module) -> Iterator[str]:
        """
        Yield the keys whose tensors the module has got, or whose values have changed, since then.

        What is on the meta device holds nothing, unless its values were offloaded.
        """
        holder = proof.Holder(module)
        unclear = []
        for key, value in inventories.tensors_of(module):
            mark = self._marks.get(key)
            if value.device.type == "meta" and holder.find(key) is None:
                continue
            if mark is None or not _is_same(mark, value) or (mark.version, mark.address) != _state(value):
                yield key
            else:
                unclear.append(key)
        # `tensor.data.copy_()` counts no version.
        now = proof.samples(holder, unclear)
        yield from (key for key in unclear if repr(now.get(key)) != repr(self._values.get(key)))


def _mark(value: torch.Tensor) -> _Mark:
    storage = provenance.storage_of(value)
    return _Mark(id(value), None if storage is None else weakref.ref(storage), *_state(value))


def _is_same(mark: _Mark, value: torch.Tensor) -> bool:
    # The identity alone may be that of a tensor made since.
    is_here = mark.storage is None or mark.storage() is provenance.storage_of(value)
    return mark.tensor == id(value) and is_here


def _state(value: torch.Tensor) -> tuple[int | None, int | None]:
    try:
        version = value._version
    except RuntimeError:  # an inference tensor counts none
        version = None
    try:
        return version, value.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return version, None
