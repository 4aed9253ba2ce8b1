"""
What torch says of keys when it raises: it stops at the first that does not fit, and names the kind of that one alone.
"""

from __future__ import annotations

from typing import Final

_OF_DCP: Final = {
    # torch/distributed/checkpoint/default_planner.py, create_default_local_load_plan
    "Missing key in checkpoint state_dict": "missing_keys",
    "Size mismatch between saved": "shape_mismatch",
    "Invalid checkpoint metadata for": "type_mismatch",
}
_OF_MODULES: Final = {
    # torch/nn/modules/module.py, load_state_dict: it lists all of one kind, and both kinds
    "Missing key(s) in state_dict": "missing_keys",
    "size mismatch for ": "shape_mismatch",
}
_OF_MAPS: Final = {
    # accelerate/utils/modeling.py, check_device_map
    "The device_map provided does not give any device": "device_map_uncovered",
}
_TEXTS: Final = {**_OF_DCP, **_OF_MODULES, **_OF_MAPS}
KEYS: Final = frozenset({*_OF_DCP.values(), *_OF_MODULES.values()})
"""The findings on keys that torch itself raises for."""
NAMED: Final = frozenset(_TEXTS.values())
"""All findings that a library raises for in words that are known here."""


def codes(message: str) -> frozenset[str]:
    """
    The findings that an exception's text speaks of; none where it is not torch's on keys.
    """
    return frozenset(code for text, code in _TEXTS.items() if text in message)


def is_planners(message: str) -> bool:
    """
    Whether DCP's own planner has raised for a key.
    """
    return message.startswith(tuple(_OF_DCP))
