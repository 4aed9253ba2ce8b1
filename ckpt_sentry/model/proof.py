"""
The proof of a load: values in the model compared with the checkpoint's, a few of each tensor or all.

The values of a model are where its forward pass will take them from: in the module itself, or in the map or file that
accelerate's hook offloads them to. A tensor without any variation shows nothing by being equal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch.utils import _python_dispatch

from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.formats import safetensors
from ckpt_sentry.formats.elements import (
    SAMPLE_COUNT,
    Sampler,
    Slot,
    can_sample,
    contiguous_strides,
    element_count,
    is_flat,
    sample_indices,
)
from ckpt_sentry.formats.regular import regular
from ckpt_sentry.model import inventories, quick_proof
from ckpt_sentry.model.tensors import PLAIN

FEW: Final = 16
"""Elements that are looked at in each tensor where there are more than `MANY` of them."""
MANY: Final = 64

_CHUNK_BYTES: Final = 1 << 24
_REAL: Final = {"complex64": "float32", "complex128": "float64"}
_CHECKPOINT_WRAPPED: Final = "_checkpoint_wrapped_module"
Held: TypeAlias = "torch.Tensor | Slot"
"""Where a value of the model is: a tensor, or a place in a file that it was offloaded to."""


class Claim(NamedTuple):
    """
    A name of the model and the places in the checkpoint any of which may have filled it.
    """

    name: str
    slots: tuple[Slot, ...]


@dataclass(slots=True)
class Outcome:
    """
    What a proof has seen: names that were compared and show something, that differ, and that hold a NaN.
    """

    checked: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    offloaded: set[str] = field(default_factory=set)
    """Those of the compared names whose values lie in a file on disk."""


def prove(holder: Holder, claims: Sequence[Claim], depth: Literal["sample", "full"]) -> Outcome:
    """
    Compare what a model holds with what the checkpoint has for it. Nothing of the host is run, no value is kept.

    :raises OSError: the checkpoint cannot be read any more.
    """
    outcome = Outcome()
    count = SAMPLE_COUNT if len(claims) <= MANY else FEW
    with Sampler() as sampler, _undisturbed():
        found = [
            (name, *_real(held, slots)) for name, slots in claims if (held := holder.find(name)) is not None and slots
        ]
        first = ((name, held, slots[0]) for name, held, slots in found)
        quick = quick_proof.equal(first, sampler, count) if depth == "sample" else {}
        for name, held, slots in found:
            if (shows := quick.get(name)) is not None:
                seen = _Seen(equal=True, shows=shows, has_nan=False)
            elif not _comparable(held, slots):
                continue
            elif depth == "full" and all(map(is_flat, slots)):
                seen = _compare_all(held, slots)
            else:
                seen = _compare(held, slots, sampler, count)
            _note(outcome, name, held, seen)
    return outcome


def _real(held: Held, slots: tuple[Slot, ...]) -> tuple[Held, tuple[Slot, ...]]:
    """
    Complex numbers as the pairs of real ones that they are in memory and in a file; all others as they are.
    """
    if slots[0].dtype not in _REAL:
        return held, slots
    if isinstance(held, Slot):
        held = _real_slot(held)
    elif held.is_complex():
        held = torch.view_as_real(held.detach().resolve_conj())
    return held, tuple(map(_real_slot, slots))


def _real_slot(slot: Slot) -> Slot:
    if slot.dtype not in _REAL:
        return slot
    strides = None if slot.strides is None else (*(2 * stride for stride in slot.strides), 1)
    return slot._replace(dtype=_REAL[slot.dtype], shape=(*slot.shape, 2), strides=strides)


def _note(outcome: Outcome, name: str, held: Held, seen: _Seen) -> None:
    if not seen.equal:
        outcome.differing.append(name)
    if seen.shows or not seen.equal:
        outcome.checked.append(name)
    if seen.has_nan:
        outcome.not_finite.append(name)
    if isinstance(held, Slot):
        outcome.offloaded.add(name)


def samples(holder: Holder, names: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """
    A few values of each tensor that a model holds now, to see later whether it has changed.
    """
    found = {}
    with Sampler() as sampler, _undisturbed():
        for name in names:
            held = holder.find(name)
            if held is not None and _readable(held):
                found[name] = tuple(_held_values(held, sampler, FEW).tolist())
    return found


def vary(slots: Sequence[Slot]) -> bool:
    """
    Whether these places in a checkpoint hold different values.
    """
    with Sampler() as sampler:
        return len({repr(sampler.sample(slot, FEW).values) for slot in slots}) > 1


@contextmanager
def _undisturbed() -> Iterator[None]:
    """
    Compute with plain tensors on their own devices, whatever the host has around its load: `torch.device("meta")`, a
    mode that makes tensors fake, or one that counts operations.
    """
    with ExitStack() as stack:
        if without_modes := getattr(_python_dispatch, "_disable_current_modes", None):
            stack.enter_context(without_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        yield


class Holder:
    """
    Finds where the values of a model are, by name. `folder` stands for a map of offloaded weights beside the hooks'.
    """

    def __init__(self, model: torch.nn.Module, folder: object = None) -> None:
        self._folder = folder
        self._parts = _by_name(model)

    def find(self, name: str) -> Held | None:
        """
        The value under a name: a tensor, or its place on disk; None where it is nowhere, or packed by a quantizer.
        """
        path, _, leaf = name.rpartition(".")
        module = self._parts.get(path)
        if module is None:
            return None
        value = module._parameters.get(leaf)
        if value is None:
            value = module._buffers.get(leaf)
        if value is None or value.device.type != "meta":
            return value if value is None or type(value) in PLAIN else None
        return self._offloaded(name)

    def _offloaded(self, name: str) -> Held | None:
        path, rest = name, ""
        while path:
            path, _, leaf = path.rpartition(".")
            rest = f"{leaf}.{rest}" if rest else leaf
            for weights in _maps(getattr(self._parts.get(path), "_hf_hook", None)):
                if (found := in_map(weights, rest)) is not None:
                    return found
        return None if self._folder is None else in_map(self._folder, name)

    def is_offloaded(self, name: str) -> bool:
        """
        Whether a hook has a map for a name, whatever lies in it.
        """
        path, rest = name, ""
        while path:
            path, _, leaf = path.rpartition(".")
            rest = f"{leaf}.{rest}" if rest else leaf
            if any(rest in weights for weights in _maps(getattr(self._parts.get(path), "_hf_hook", None))):
                return True
        return False


def _by_name(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """
    The modules in a model by the paths that their tensors have in a state dict: activation checkpointing stands between
    a module and its name (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py).
    """
    parts = {}
    for path, part in inventories.parts_of(model):
        bare = path
        if _CHECKPOINT_WRAPPED in path:
            bare = ".".join(name for name in path.split(".") if name != _CHECKPOINT_WRAPPED)
        parts[bare] = part
    return parts


def _maps(hook: Any) -> Iterable[Mapping[str, Any]]:
    """
    The maps of an `AlignDevicesHook`, also within a `SequentialHook` (accelerate/hooks.py:245, 109).
    """
    for one in (hook, *getattr(hook, "hooks", ())):
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            yield weights


def in_map(weights: Any, name: str) -> Held | None:
    """
    The value of a name in an offload map: from memory, or its place in a file (utils/offload.py:127).
    """
    key, dataset = name, weights
    while hasattr(dataset, "prefix") and hasattr(dataset, "dataset"):
        key, dataset = f"{dataset.prefix}{key}", dataset.dataset
    in_memory = getattr(dataset, "state_dict", dataset)
    if key in in_memory:
        value = in_memory[key]
        return value if type(value) in PLAIN and value.device.type != "meta" else None
    info = getattr(dataset, "index", {}).get(key)
    if info is None:
        return None
    if (file := info.get("safetensors_file")) is not None:
        return _slots(os.fspath(file)).get(info.get("weight_name", key))
    return Slot(os.path.join(dataset.save_folder, f"{key}.dat"), str(info["dtype"]), tuple(info["shape"]), 0)


def _slots(file: str) -> Mapping[str, Slot]:
    status = os.stat(file)
    return _header(file, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4)
def _header(file: str, _state: tuple[int, int, int]) -> Mapping[str, Slot]:
    return safetensors.read(file).slots


def _comparable(held: Held, slots: Sequence[Slot]) -> bool:
    if not _readable(held):
        return False
    shape = tuple(held.shape)
    dtype = getattr(torch, held.dtype) if isinstance(held, Slot) else held.dtype
    return all(can_sample(slot) and slot.shape == shape and _may_become(slot, dtype) for slot in slots)


def _readable(held: Held) -> bool:
    if isinstance(held, Slot):
        return can_sample(held) and hasattr(torch, held.dtype) and element_count(held.shape) > 0
    return held.layout is torch.strided and held.device.type != "meta" and held.numel() > 0 and not held.is_complex()


def _may_become(slot: Slot, dtype: torch.dtype) -> bool:
    """
    Whether a cast keeps the meaning: whole numbers that stand for real ones are a quantizer's.
    """
    saved = getattr(torch, slot.dtype, None)
    return saved is not None and bool(saved.is_floating_point == dtype.is_floating_point)


class _Seen(NamedTuple):
    """
    A comparison: whether the values are equal, show anything by it (they vary), and hold a NaN that is a float's.
    """

    equal: bool
    shows: bool
    has_nan: bool


def _compare(held: Held, slots: Sequence[Slot], sampler: Sampler, count: int) -> _Seen:
    wanted = [sampler.sample(slot, count).values for slot in slots]
    dtype = getattr(torch, held.dtype) if isinstance(held, Slot) else held.dtype
    values = _held_values(held, sampler, count)
    equal = any(_same(_cast(saved, slot.dtype, dtype), values) for saved, slot in zip(wanted, slots, strict=True))
    shows = len(set(wanted[0])) > 1 or len(values) == 1
    return _Seen(equal, shows, equal and any(map(math.isnan, wanted[0])))


def _cast(saved: Sequence[float], kind: str, dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor(saved, dtype=torch.float64)
    # The largest whole numbers are no float64: what is not cast is not to be rounded there and back.
    return values if getattr(torch, kind) == dtype else values.to(dtype).to(torch.float64)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A NaN equals itself here: it is the checkpoint's.
    return bool(torch.equal(one, other)) or bool(torch.equal(one.nan_to_num(nan=0.5), other.nan_to_num(nan=0.5)))


def _held_values(held: Held, sampler: Sampler, count: int) -> torch.Tensor:
    """
    The values at `sample_indices` as float64, on the CPU.
    """
    if isinstance(held, Slot):
        return torch.tensor(sampler.sample(held, count).values, dtype=torch.float64)
    indices = _indices(held.numel(), count, tuple(held.shape), tuple(held.stride()))
    flat = torch.as_strided(held.detach(), (_extent(held),), (1,))
    if held.dtype.is_floating_point and held.dtype.itemsize == 1:
        # torch 2.8 and before picks no elements of FP8; bytes it does.
        flat = flat.view(torch.uint8)
    return flat[indices.to(held.device)].view(held.dtype).to("cpu", torch.float64)


def _extent(held: torch.Tensor) -> int:
    return 1 + int(sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True)))


@lru_cache(maxsize=256)
def _indices(numel: int, count: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """
    Where the sampled elements lie in the memory of a tensor, counted from its first.
    """
    flat = sample_indices(numel, count)
    if strides == contiguous_strides(shape):
        return torch.tensor(flat)
    places = []
    for index in flat:
        place = 0
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            index, along = divmod(index, size)  # noqa: PLW2901
            place += along * stride
        places.append(place)
    return torch.tensor(places)


def _compare_all(held: Held, slots: Sequence[Slot]) -> _Seen:
    verdicts = [_compare_with(held, slot) for slot in slots]
    return next((seen for seen in verdicts if seen.equal), verdicts[0])


def _compare_with(held: Held, slot: Slot) -> _Seen:
    """
    Compare every element, a chunk at a time.
    """
    numel, first, shows, has_nan = element_count(slot.shape), None, False, False
    dtype = getattr(torch, held.dtype) if isinstance(held, Slot) else held.dtype
    flat = None if isinstance(held, Slot) else held.detach().reshape(-1)
    step = _CHUNK_BYTES // 8
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        saved = _chunk(slot, start, stop).to(dtype).to(torch.float64)
        got = _chunk(held, start, stop) if flat is None and isinstance(held, Slot) else flat[start:stop].cpu()  # type: ignore[index]
        if not _same(saved, got.to(torch.float64)):
            return _Seen(equal=False, shows=True, has_nan=False)
        first = saved[0] if first is None else first
        shows = shows or not bool((saved == first).all())
        has_nan = has_nan or (dtype.is_floating_point and bool(saved.isnan().any()))
    return _Seen(equal=True, shows=shows or numel == 1, has_nan=has_nan)


def _chunk(slot: Slot, start: int, stop: int) -> torch.Tensor:
    dtype = getattr(torch, slot.dtype)
    size = dtype.itemsize
    with open(slot.file, "rb", buffering=0, opener=regular) as file:
        file.seek((slot.offset or 0) + start * size)
        data = bytearray((stop - start) * size)
        view, done = memoryview(data), 0
        while done < len(data):
            got = file.readinto(view[done:])
            if not got:
                raise EOFError(f"{slot.file} ends before its end")
            done += got
    return torch.frombuffer(data, dtype=dtype)
