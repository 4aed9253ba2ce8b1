"""
What a load by a planner or a reader that is not torch's own has written, whoever wrote it and by whatever way.

Such code may give keys other names, read by a way of its own, or read nothing: names and plans do not tell. The tensors
do: a copy into one counts a version more, another object in its place is a load too, and what is written to its memory
without torch shows in its values. Nothing is looked at where both are torch's.

Nothing of the host's is kept alive but the state dict itself, until the load ends: no tensor of it, so that one that is
replaced is freed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from ckpt_sentry.integrations.dcp.entries import flattened
from ckpt_sentry.model.provenance import storage_of
from ckpt_sentry.model.tensors import local_parts, quietly
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Seen = Literal["written", "same", "unclear"]
"""
What was seen of a value: the load wrote it; neither its version nor its values have changed; or nothing can be said.
"""

WHOLE: Final = 256
"""Elements up to which the values of a tensor are looked at as a whole."""
RUNS: Final = 4
RUN: Final = 64
"""Elements of one run."""

_SIMPLE: Final = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.Size})
_CONTAINERS: Final = frozenset({dict, list, set, tuple})


class _Part(NamedTuple):
    """
    A tensor's state: its version, and where it lies. The weak reference is to the storage, since
    `torch.utils.swap_tensors` refuses a tensor that has one.
    """

    storage: weakref.ref[torch.UntypedStorage] | None
    address: int
    version: int | None
    is_meta: bool


class _Mark(NamedTuple):
    identity: int
    kind: type
    parts: tuple[_Part, ...]


class Before:
    """
    What the values of a state dict are before a load: of the one that the load is given, nested or not.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._state_dict = state_dict
        self._marks: dict[str, _Mark] = {}
        self._places: dict[int, str] = {}
        samples = _Samples()
        stretches: dict[int, set[tuple[int, int]]] = {}
        for key, value in flattened(state_dict).items():
            self._places[id(value)] = key
            self._marks[key] = _mark(key, value, samples, stretches)
        self._samples = samples.taken()
        self._now: dict[str, Any] | None = None
        self._shared = frozenset(address for address, found in stretches.items() if len(found) > 1)

    def place(self, key: str, value: Any) -> str:
        """
        The key of a value in the state dict as it was given: a planner may know it by another.
        """
        return self._places.get(id(value), key)

    def after(self, places: Iterable[str]) -> dict[str, Seen]:
        """
        What was seen of the values at these places of the state dict, now that the load is over.
        """
        return {place: self._seen(place) for place in places}

    def is_of_its_kind(self, place: str) -> bool:
        """
        Whether what is at a place now is of the type of what was there.
        """
        mark = self._marks.get(place)
        return mark is not None and type(self._values().get(place)) is mark.kind

    def changed(self, place: str) -> float:
        """
        The part in [0, 1] of the sampled elements of a value that the load has changed; 0 where there are none.
        """
        others = total = 0
        try:
            with quietly(), torch.no_grad():
                for number, part in enumerate(local_parts(self._values().get(place))):
                    was, now = self._samples.get((place, number)), _sample(part)
                    if was is not None and now is not None and was.shape == now.shape:
                        total += was.numel()
                        others += int((was != now).sum())
        except Exception as error:  # a tensor may refuse anything
            let_through(error)
        return others / total if total else 0.0

    def _values(self) -> dict[str, Any]:
        if self._now is None:
            self._now = flattened(self._state_dict)
        return self._now

    def _seen(self, place: str) -> Seen:
        mark, now = self._marks.get(place), self._values()
        if mark is None or place not in now:
            return "unclear"
        try:
            with quietly(), torch.no_grad():
                return self._compared(place, mark, now[place])
        except Exception as error:  # a tensor may refuse anything
            let_through(error)
            return "unclear"

    def _compared(self, place: str, mark: _Mark, value: Any) -> Seen:
        if not mark.parts:
            return _object(mark, value)
        parts = local_parts(value)
        if len(parts) != len(mark.parts):
            return "written"
        found = [self._part((place, number), *pair) for number, pair in enumerate(zip(mark.parts, parts, strict=True))]
        return "written" if "written" in found else "unclear" if "unclear" in found else "same"

    def _part(self, at: tuple[str, int], was: _Part, part: torch.Tensor) -> Seen:
        if was.is_meta or part.is_meta:
            # Torch's planner puts an empty tensor in the place of one on meta: it is another, filled or not.
            return "unclear"
        storage = storage_of(part)
        if storage is None or was.storage is None:
            return "unclear"
        address = storage.data_ptr()
        if was.storage() is not storage or address != was.address:
            return "written"
        version, sample = _version(part), self._samples.get(at)
        if version != was.version and was.address not in self._shared:
            return "written"
        if sample is not None and not torch.equal(_bytes(_sample(part)), _bytes(sample)):
            return "written"
        # A version belongs to all that lie in one storage.
        return "same" if version is not None and version == was.version else "unclear"


class _Samples:
    """
    Values of many tensors, copied in a few calls.
    """

    def __init__(self) -> None:
        self._views: dict[Any, tuple[list[Any], list[torch.Tensor]]] = {}

    def add(self, at: Any, part: torch.Tensor) -> None:
        if (view := _sample(part)) is not None:
            places, views = self._views.setdefault((view.device, view.dtype, view.ndim), ([], []))
            places.append(at)
            views.append(view)

    def taken(self) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = {}
        for places, views in self._views.values():
            try:
                with quietly(), torch.no_grad():
                    all_ = torch.cat(views)
                    found |= zip(places, all_.split([view.shape[0] for view in views]), strict=True)
            except Exception as error:  # not on this device, or a mode of the host's refuses
                let_through(error)
        return found


def _mark(key: str, value: Any, samples: _Samples, stretches: dict[int, set[tuple[int, int]]]) -> _Mark:
    parts: list[_Part] = []
    try:
        with quietly(), torch.no_grad():
            for number, part in enumerate(local_parts(value)):
                storage = storage_of(part)
                reference = None if storage is None else weakref.ref(storage)
                address = 0 if storage is None or part.is_meta else int(storage.data_ptr())
                parts.append(_Part(reference, address, _version(part), part.is_meta))
                samples.add((key, number), part)
                stretches.setdefault(address, set()).add((part.storage_offset(), part.numel()))
    except Exception as error:  # a tensor may refuse anything
        let_through(error)
        parts = []
    return _Mark(id(value), type(value), tuple(parts))


def _object(mark: _Mark, value: Any) -> Seen:
    """
    What is no tensor, or one that tells nothing. Whether an object that is still there is what it was, it alone knows.
    """
    if id(value) != mark.identity or type(value) is not mark.kind:
        return "written"
    return "same" if mark.kind in _SIMPLE or (mark.kind in _CONTAINERS and not value) else "unclear"


def _version(part: torch.Tensor) -> int | None:
    try:
        return int(part._version)
    except RuntimeError:  # an inference tensor counts none
        return None


def _sample(part: torch.Tensor) -> Any:
    """
    A view on some elements of a tensor: of a large one runs that are spread over it. None of what does not lie in
    memory in one piece.
    """
    size = part.numel()
    if part.is_meta or not size or part.layout is not torch.strided or part.is_quantized or not part.is_contiguous():
        return None
    if part.element_size() == 1:
        part = part.view(torch.uint8)  # `cat` knows not every type of 8 bits
    if size <= WHOLE:
        return part.view(-1)
    return part.as_strided((RUNS, RUN), ((size - RUN) // (RUNS - 1), 1), part.storage_offset())


def _bytes(sample: torch.Tensor) -> torch.Tensor:
    # NaN is not equal to itself.
    return sample.contiguous().view(torch.uint8)
