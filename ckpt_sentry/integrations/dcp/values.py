"""
A look at what a DCP load left behind: values that are no numbers, entries that became something else.

Samples only. Of a tensor with at most `WHOLE` elements every one is looked at, of a larger one `RUNS` runs that are
spread over it; of many tensors as many as the bytes read pay for. The samples of all tensors are judged in a few calls.
An infinite value is no evidence: masks hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from ckpt_sentry.core import codes
from ckpt_sentry.core.report import Finding
from ckpt_sentry.model.tensors import PLAIN, local_parts, quietly
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ckpt_sentry.core.findings import counted, verb
    from ckpt_sentry.core.fold import key_list
else:
    counted = later("ckpt_sentry.core.findings:counted")
    verb = later("ckpt_sentry.core.findings:verb")
    key_list = later("ckpt_sentry.core.fold:key_list")

WHOLE: Final = 4_096
"""Elements up to which a tensor is looked at as a whole."""
RUNS: Final = 16
RUN: Final = 64
"""Elements of one run."""
MOST_TENSORS: Final = 128
BYTES_A_TENSOR: Final = 2**20
"""For each of these bytes that the load has read, one tensor more is looked at: a look costs microseconds."""
MOST_OBJECTS: Final = 1_024

_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SHOWN_BYTES: Final = 200
_USUAL: Final = PLAIN | {type(None)}


def types_of(state_dict: Mapping[str, Any]) -> dict[str, type]:
    """
    The types of the entries that are no tensors and not None: what they are before the load.
    """
    found = {}
    for key, value in state_dict.items():
        kind = type(value)
        if kind not in _USUAL and not issubclass(kind, torch.Tensor) and not hasattr(value, "local_shards"):
            found[key] = kind
            if len(found) == MOST_OBJECTS:
                break
    return found


def retyped(before: Mapping[str, type], planner: Any) -> Finding | None:
    """
    Entries that the load replaced by an object of another type; numbers of any kind are one type. None where there are
    none.
    """
    changed: dict[tuple[str, str], list[str]] = {}
    for key, kind in before.items():
        now = type(_value(planner, key))
        if now is not kind and not _alike(kind, now):
            changed.setdefault((kind.__name__, now.__name__), []).append(key)
    if not changed:
        return None
    said = "; ".join(f"{_listed(keys)} was {was}, is {now}" for (was, now), keys in sorted(changed.items())[:3])
    text = f"the load put objects of another type in place: {said}"
    return Finding("type_mismatch", "warning", text, codes.BY_NAME["type_mismatch"].step)


def not_put_back(before: Collection[str], planner: Any) -> Finding | None:
    """
    Objects that were read into a copy of the state dict and are not in the caller's; None where there are none.

    Torch's planner makes one for `flatten_sharded_tensors`, and sets what is no tensor in it unless it flattens
    (default_planner.py of torch 2.13.0, `set_up_planner` and `load_bytes`).
    """
    given, copied = getattr(planner, "original_state_dict", None), getattr(planner, "state_dict", None)
    if getattr(planner, "flatten_state_dict", True) or given is copied:
        return None
    if not isinstance(given, dict) or not isinstance(copied, dict):
        return None
    lost = [key for key in before if key in given and given[key] is not copied[key]]
    if not lost:
        return None
    were = verb(len(lost), "was", "were")
    text = f"{counted(len(lost), 'object')} {were} read, but not put into the state dict: {_listed(lost)}"
    step = "Give the planner flatten_sharded_tensors=False as well: torch's puts objects into a copy otherwise."
    return Finding("values_not_loaded", "warning", text, step)


def not_a_number(tensors: Mapping[str, Any], bytes_read: int) -> Finding | None:
    """
    Which of these tensors hold NaN, by sample; None where no sample does.
    """
    keys, samples = [], []
    for key, sample in _samples(tensors, MOST_TENSORS + bytes_read // BYTES_A_TENSOR):
        keys.append(key)
        samples.append(sample)
    found = sorted({keys[place] for place in _with_nan(samples)})
    if not found:
        return None
    hold = verb(len(found), "holds", "hold")
    text = f"{counted(len(found), 'tensor')} {hold} NaN after the load: {_listed(found)}"
    step = "The values in the checkpoint are damaged, or were NaN when it was saved: load an earlier step and compare."
    return Finding("non_finite_values", "warning", text, step)


def _samples(tensors: Mapping[str, Any], most: int) -> Iterator[tuple[str, torch.Tensor]]:
    chosen = list(tensors)
    if len(chosen) > most:
        step = len(chosen) / most
        chosen = [chosen[int(place * step)] for place in range(most)]
    for key in chosen:
        for part in _floats(tensors[key]):
            yield key, part


def _floats(value: Any) -> list[torch.Tensor]:
    """
    Samples of the parts of a value that hold floating-point numbers; none of a tensor that refuses to be looked at.
    """
    try:
        with quietly():
            return [
                _sample(part.detach())
                for part in local_parts(value)
                if part.dtype in _FLOATS and part.layout is torch.strided and not part.is_meta and part.numel()
            ]
    except Exception as error:
        let_through(error)
        return []


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """
    A view on some of the elements: runs, evenly spread, the first at the very start.
    """
    size = tensor.numel()
    if size <= WHOLE:
        return tensor
    if not tensor.is_contiguous():
        return tensor[tuple(slice(0, RUN if place == tensor.ndim - 1 else 1) for place in range(tensor.ndim))]
    stride = (size - RUN) // (RUNS - 1)
    return tensor.as_strided((RUNS, RUN), (stride, 1), tensor.storage_offset())


def _with_nan(samples: list[torch.Tensor]) -> Iterator[int]:
    """
    The places of the samples that hold NaN. The largest absolute value of such a sample is NaN, that of others never.
    """
    kinds: dict[Any, list[int]] = {}
    for place, sample in enumerate(samples):
        kinds.setdefault((sample.device, sample.dtype), []).append(place)
    for places in kinds.values():
        largest = torch.stack(torch._foreach_norm([samples[place] for place in places], float("inf")))
        for index in torch.nonzero(torch.isnan(largest)).flatten().tolist():
            yield places[index]


def _value(planner: Any, key: str) -> Any:
    """
    What is now under a flattened key: the planner sets objects in the state dict as it was given, by their path.
    """
    path = (getattr(planner, "mappings", None) or {}).get(key)
    if path is None or not getattr(planner, "flatten_state_dict", False):
        return planner.state_dict.get(key)
    value: Any = planner.original_state_dict
    for part in path:
        value = value[part]
    return value


def _alike(before: type, now: type) -> bool:
    numbers = (int, float)
    return now is type(None) or issubclass(now, before) or (issubclass(before, numbers) and issubclass(now, numbers))


def _listed(keys: Collection[str]) -> str:
    shown = key_list(keys, _SHOWN_BYTES)
    return ", ".join(shown.keys) + (f" and {shown.omitted:,} more" if shown.omitted else "")
