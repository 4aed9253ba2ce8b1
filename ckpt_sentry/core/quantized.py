"""
State that a quantizer keeps beside a weight: scales and tables, without which the weight's numbers mean nothing.

A loader that knows the weight's key and not those of its state loads codes as if they were values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry.core.inventory import Inventory
from ckpt_sentry.core.report import Finding
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core.findings import counted, listing, verb
    from ckpt_sentry.core.fold import folds
else:
    counted = later("ckpt_sentry.core.findings:counted")
    listing = later("ckpt_sentry.core.findings:listing")
    verb = later("ckpt_sentry.core.findings:verb")
    folds = later("ckpt_sentry.core.fold:folds")

_BESIDE: Final = re.compile(
    r"(?P<weight>.+?)(?:"
    r"\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.[^.]+)"  # bitsandbytes, 4 bits
    r"|_(?:scale|scales|scale_inv|scale_2|zero_point|global_scale)"  # compressed-tensors, FP8, MXFP4, NVFP4
    r"|\._(?:data|scale|zero_point)"  # quanto
    r")"
)
_IN_MODULE: Final = re.compile(
    r"(?P<module>(?:.+\.)?)(?:SCB|weight_format"  # bitsandbytes, 8 bits
    r"|scales?|scale_inv|zeros|zero_points?|qzeros|g_idx)"  # GPTQ, AWQ, and who multiplies in a module of his own
)
_CODES: Final = ("int", "uint", "float8", "float4")
_REAL: Final = ("float", "bfloat")


class State(NamedTuple):
    """
    Keys of the checkpoint that belong to a weight which is loaded, and that nobody reads.

    `needed` are those of weights whose numbers mean nothing without: the types show it, or the model packs them. Of the
    `beside` only the names say so.
    """

    needed: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def dropped(
    model: Inventory,
    checkpoint: Inventory,
    unexpected: Iterable[str],
    packed: Collection[str] = (),
    lost: Collection[str] = (),
) -> State:
    """
    Sort out what of the unexpected keys belongs to a weight that is loaded.

    Args:
        packed: the names of parameters that a quantizer packs: they need their tables. The scale of 8 bits is handed
            on to a weight of a class that takes it (accelerate/utils/modeling.py:2005).
        lost: keys of both sides that are not loaded all the same, for their shapes.
    """
    needed: list[str] = []
    beside: list[str] = []
    for key in unexpected:
        weight = weight_of(key)
        if weight is None or weight in lost:
            continue
        mine, theirs = model.entries.get(weight), checkpoint.entries.get(weight)
        if mine is None or theirs is None:
            continue
        if weight in packed:
            if _BESIDE.fullmatch(key):
                needed.append(key)
        elif is_code(theirs.dtype):
            (needed if (mine.dtype or "").startswith(_REAL) and not is_code(mine.dtype) else beside).append(key)
    return State(tuple(needed), tuple(beside))


def findings(state: State) -> Iterator[Finding]:
    """
    Say what is dropped, and of how many weights.
    """
    if state.needed:
        count = len({weight_of(key) for key in state.needed})
        text = (
            f"{counted(count, 'weight')} {verb(count, 'is', 'are')} quantized in the checkpoint, and "
            f"{verb(len(state.needed), 'its scale is', 'their scales are')} not read: {_listed(state.needed)}. "
            f"Without them its numbers are codes, not values."
        )
        step = "Dequantize the weights before the load, or load them with the library that quantized them."
        yield Finding("quantized_state_dropped", "error", text, step)
    if state.beside:
        count = len(state.beside)
        text = (
            f"{counted(count, 'key')} beside quantized weights {verb(count, 'is', 'are')} not read: "
            f"{_listed(state.beside)}."
        )
        yield Finding("quantized_state_unread", "info", text)


def weight_of(key: str) -> str | None:
    """
    The weight that a key of this name belongs to; None where it has no such name.
    """
    if (found := _BESIDE.fullmatch(key)) is not None:
        return found["weight"]
    if (found := _IN_MODULE.fullmatch(key)) is not None:
        return f"{found['module']}weight"
    return None


def is_code(dtype: str | None) -> bool:
    """
    Whether numbers of a type are what a quantizer makes of real ones.
    """
    return (dtype or "").startswith(_CODES)


def _listed(keys: Collection[str]) -> str:
    return listing(list(folds(sorted(keys))))
