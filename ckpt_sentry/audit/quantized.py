"""
State that a quantizer keeps beside a weight: scales and tables, without which the weight's numbers mean nothing.

A loader that knows the weight's key and not those of its state loads codes as if they were values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from ckpt_sentry.audit.inventory import Entry, Inventory
from ckpt_sentry.audit.report import Finding
from ckpt_sentry.later import later

if TYPE_CHECKING:
    from ckpt_sentry.audit.findings import counted, listing, verb
    from ckpt_sentry.audit.fold import folds
else:
    counted = later("ckpt_sentry.audit.findings:counted")
    listing = later("ckpt_sentry.audit.findings:listing")
    verb = later("ckpt_sentry.audit.findings:verb")
    folds = later("ckpt_sentry.audit.fold:folds")

_BESIDE: Final = re.compile(
    r"(?P<weight>.+\.weight)(?:"
    r"\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.[^.]+)"  # bitsandbytes, 4 bits
    r"|_scale|_scale_inv|_zero_point|_global_scale|\._(?:data|scale|zero_point)"  # compressed-tensors, FP8, quanto
    r")"
)
_IN_MODULE: Final = re.compile(r"(?P<module>(?:.+\.)?)(?:SCB|weight_format)")  # bitsandbytes, 8 bits
_CODES: Final = ("int", "uint", "float8", "float4")


def dropped(wanted: Inventory, offered: Inventory, unexpected: Iterable[str], packed: Collection[str]) -> list[str]:
    """
    Keys of the checkpoint that nobody reads, though the weight beside them is loaded, and means nothing without.

    Args:
        packed: the names of parameters that a quantizer packs. Of any other, the checkpoint's numbers are codes where
            their type is one of codes and the model's is none.
    """
    return [
        key
        for key in unexpected
        if (weight := _weight(key)) is not None
        # The scale of 8 bits is handed on to a weight of a class that takes it (modeling.py:2005).
        and (
            (weight in packed and _BESIDE.fullmatch(key))
            or _is_code(wanted.entries.get(weight), offered.entries.get(weight))
        )
    ]


def findings(keys: Collection[str], offered: Inventory) -> Iterator[Finding]:
    """
    Say what is dropped, and of how many weights.
    """
    if not keys:
        return
    weights = {weight for key in keys if (weight := _weight(key)) in offered.entries}
    text = (
        f"{counted(len(weights), 'weight')} {verb(len(weights), 'is', 'are')} quantized in the checkpoint, and "
        f"{verb(len(keys), 'its scale is', 'their scales are')} not read: {listing(list(folds(sorted(keys))))}. "
        f"What came in are codes, not values."
    )
    step = "Dequantize the weights before the load, or load them with the library that quantized them."
    yield Finding("quantized_state_dropped", "error", text, step)


def _weight(key: str) -> str | None:
    if (found := _BESIDE.fullmatch(key)) is not None:
        return found["weight"]
    if (found := _IN_MODULE.fullmatch(key)) is not None:
        return f"{found['module']}weight"
    return None


def _is_code(wanted: Entry | None, offered: Entry | None) -> bool:
    if wanted is None or offered is None or wanted.dtype is None or offered.dtype is None:
        return False
    return offered.dtype.startswith(_CODES) and not wanted.dtype.startswith(_CODES)
