"""
What a load by a planner or a reader that is not torch's own has written, whoever wrote it and by whatever way.

Such code may give keys other names, read by a way of its own, or read nothing: names and plans do not tell. The tensors
do: a copy into one counts a version more, another object in its place is a load too, and what is written to its memory
without torch shows in its values. Nothing is looked at where both are torch's.

Nothing of the host's is kept alive but the state dict itself, until the load ends: no tensor of it, so that one that is
replaced is freed.

`Stored` has the values of a DCP checkpoint on this machine, for a load of which nothing was seen to be written. A slice
of a file is what `torch.save` made of one tensor (torch 2.13.0, filesystem.py, `_write_item`); it is read as
`weights_only`, and only where it is small.

`revised` holds what names and plan say against that. Acquitted is a key that neither accounts for and that was written
all the same. What cannot be seen is not blamed. A key that the plan reads whole, while nothing was seen to be written
to it, is blamed only where the checkpoint itself shows other values than the tensor has.
"""

from __future__ import annotations

import io
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from ckpt_sentry import config
from ckpt_sentry.core.examine import Examination, examine
from ckpt_sentry.core.findings import counted, keys, listing, verb
from ckpt_sentry.core.fold import folds
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.formats.elements import open_regular
from ckpt_sentry.integrations.dcp.entries import flattened
from ckpt_sentry.integrations.dcp.reads import items_of
from ckpt_sentry.model.provenance import storage_of
from ckpt_sentry.model.tensors import local_parts, owns_memory, quietly
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

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


_ENOUGH: Final = 16
"""Keys of which the checkpoint is asked for values: what a reader passes over is rarely one key."""
_MARGIN: Final = 0.05
"""Sampled elements that may have changed beyond the part that the plan reads."""


@dataclass(frozen=True, slots=True)
class Sides:
    """
    What was compared: both inventories, the checkpoint's by the names under which the plan reads it; the part of each
    key that is not read whole; the planner's paths of the saved keys; and the bytes that this rank reads.
    """

    model: Inventory
    checkpoint: Inventory
    fractions: Mapping[str, float] | None
    paths: Mapping[str, Any] | None
    bytes_read: int
    passed_over: frozenset[str] = frozenset()
    """Keys that the plan reads whole and the load has not written."""

    def examined(self) -> Examination:
        settings = config.settings()
        return examine(self.model, self.checkpoint, allow_missing=settings.allow_missing, read_fractions=self.fractions)


def by_own_names(plan: Any, model: Mapping[str, Entry], saved: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """
    What the checkpoint holds by the names that the plan gives it: a planner may read "w" from "model.w".

    A shape that differs then is the planner's business: it may read a slice.
    """
    read = [(item.dest_index.fqn, item.storage_index.fqn) for item in items_of(plan) or ()]
    moved = {wanted: source for wanted, source in read if wanted != source and wanted in model}
    if not moved:
        return saved
    used = set(moved.values()) - {source for wanted, source in read if wanted == source}
    kept = {key: entry for key, entry in saved.items() if key not in used}
    return kept | {wanted: model[wanted] for wanted in moved}


@dataclass(frozen=True, slots=True)
class Revision:
    """
    The same sides, less those who are acquitted, and what is to be said of those of whom nothing was seen.
    """

    sides: Sides
    findings: tuple[Finding, ...]


def revised(sides: Sides, places: Mapping[str, str], before: Before, stored: Stored) -> Revision | None:
    """
    What is left of a comparison by names and plan when what was written is known; None where it holds.

    Args:
        sides: what was compared.
        places: where in the state dict each key of the model is.
        before: what the state dict was before the load.
        stored: what the checkpoint holds of the keys that the plan reads.
    """
    suspects = _suspects(sides)
    written, unclear = _acquitted(sides, suspects, places, before)
    whole = {key: places[key] for key in stored.keys if key in places and key not in suspects}
    lost, unsure = _passed_over(whole, before, stored)
    if not (written or unclear or lost or unsure):
        return None
    model = {key: entry for key, entry in sides.model.entries.items() if key not in unclear}
    checkpoint = {key: entry for key, entry in sides.checkpoint.entries.items() if key not in unclear}
    checkpoint |= {key: model[key] for key in written}
    parts = {key: part for key, part in (sides.fractions or {}).items() if key in model and key not in written}
    findings = (
        *([_not_written(lost)] if lost else []),
        *([not_compared(unclear | unsure)] if unclear | unsure else []),
    )
    left = replace(
        sides,
        model=Inventory(model),
        checkpoint=Inventory(checkpoint),
        fractions=parts | lost,
        passed_over=frozenset(lost),
    )
    return Revision(left, findings)


def _acquitted(
    sides: Sides, suspects: Mapping[str, bool], places: Mapping[str, str], before: Before
) -> tuple[set[str], set[str]]:
    """
    Of the suspects those that were written, and those of which nothing can be said.
    """
    found = before.after({places[key] for key in suspects}) if suspects else {}
    written: set[str] = set()
    unclear: set[str] = set()
    for key, is_retyped in suspects.items():
        place, part = places[key], (sides.fractions or {}).get(key, 0.0)
        if is_retyped and not before.is_of_its_kind(place):
            continue
        if part > 0 and not is_retyped:
            if before.changed(place) > part + _MARGIN:
                written.add(key)
        elif found[place] == "written":
            written.add(key)
        elif found[place] == "unclear":
            unclear.add(key)
    return written, unclear


def _suspects(sides: Sides) -> dict[str, bool]:
    """
    The keys that names or plan leave out, or read in part; and whether a tensor stands against something else.
    """
    difference, fractions = sides.examined().difference, sides.fractions or {}
    found = dict.fromkeys(difference.missing, False)
    found |= {pair.key: False for pair in difference.mismatched if fractions.get(pair.key, 0.0) <= 0}
    found |= {key: False for key, part in fractions.items() if part < 1 and key in sides.model.entries}
    return found | {pair.key: True for pair in difference.retyped}


def _passed_over(whole: Mapping[str, str], before: Before, stored: Stored) -> tuple[dict[str, float], set[str]]:
    """
    Of the keys that the plan reads whole, with their places: those that were not written, though the checkpoint has
    other values for them, with the part 0; and those that were not seen to be written, of which no more can be said.
    """
    found = before.after(whole.values())
    idle = [key for key, place in whole.items() if found[place] == "same" and stored.is_tensor(key)]
    asked = idle[:: max(1, len(idle) // _ENOUGH)][:_ENOUGH]
    answers = {key: stored.is_held(key) for key in asked}
    if None in answers.values():
        return {}, set(idle)
    if True not in answers.values():
        return dict.fromkeys(idle, 0.0), set()
    return {key: 0.0 for key, is_held in answers.items() if not is_held}, set()


def not_compared(which: Collection[str]) -> Finding:
    """
    Say of which keys nothing can be said.
    """
    text = f"{keys(len(which))} could not be compared: {listing(tuple(folds(sorted(which))))}."
    return Finding("not_compared", "info", text)


def _not_written(lost: Collection[str]) -> Finding:
    were, have = verb(len(lost), "was", "were"), verb(len(lost), "has", "have")
    text = (
        f"{counted(len(lost), 'tensor')} {were} not written, and {have} other values than the checkpoint: "
        f"{listing(tuple(folds(sorted(lost))))}."
    )
    return Finding(
        "not_read", "warning", text, "Look at what the planner and the reader of this load do with the plan."
    )
