"""
Which tensors of a module have been written to since a moment, whoever wrote them and by whatever way.

A loader either copies into a tensor, which then counts one version more, or puts another in its place. Loading the same
values again is a load too: equal values alone prove nothing. Nothing of the module is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckpt_sentry.targets import module_facts, proof

if TYPE_CHECKING:
    import torch


class _Mark(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    version: int | None
    address: int | None


class Snapshot:
    """
    The state of a module's parameters and persistent buffers at the moment of its making.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._marks = {key: _mark(value) for key, value in module_facts.tensors_of(module)}
        self._values = proof.samples(proof.Holder(module), self._marks)

    def written(self, module: torch.nn.Module) -> Iterator[str]:
        """
        Yield the keys whose tensors the module has got, or whose values have changed, since then.

        What is on the meta device holds nothing, unless its values were offloaded.
        """
        holder = proof.Holder(module)
        unclear = []
        for key, value in module_facts.tensors_of(module):
            mark = self._marks.get(key)
            if value.device.type == "meta" and holder.find(key) is None:
                continue
            if mark is None or mark.tensor() is not value or (mark.version, mark.address) != _state(value):
                yield key
            else:
                unclear.append(key)
        # `tensor.data.copy_()` counts no version.
        now = proof.samples(holder, unclear)
        yield from (key for key in unclear if repr(now.get(key)) != repr(self._values.get(key)))


def _mark(value: torch.Tensor) -> _Mark:
    return _Mark(weakref.ref(value), *_state(value))


def _state(value: torch.Tensor) -> tuple[int | None, int | None]:
    try:
        version = value._version
    except RuntimeError:  # an inference tensor counts none
        version = None
    try:
        return version, value.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return version, None
