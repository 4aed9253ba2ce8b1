"""
Folders of offloaded weights: what lies in one, and whether a dispatched model takes another load's values from it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.formats.regular import regular
from ckpt_sentry.integrations.accelerate import device_map
from ckpt_sentry.model import inventories, proof
from ckpt_sentry.model.proof import Holder
from ckpt_sentry.patching.guard import let_through

_MAX_INDEX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Folder:
    """
    A folder of offloaded weights, in the form of accelerate's own map (utils/offload.py:127).
    """

    save_folder: str
    index: Mapping[str, Any]
    state_dict: Mapping[str, Any] = field(default_factory=dict)


def contents(folder: object) -> Folder | None:
    """
    What lies in an `offload_folder` now, or None.
    """
    try:
        path = os.fspath(folder)  # type: ignore[call-overload]
        file = os.path.join(path, "index.json")
        if os.path.getsize(file) > _MAX_INDEX:
            return None
        with open(file, encoding="utf-8", opener=regular) as stream:
            index = json.load(stream)
    except (OSError, TypeError, ValueError, RecursionError) as failure:
        let_through(failure)
        return None
    return Folder(path, index) if isinstance(index, dict) else None


def before_dispatch(model: Any, arguments: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """
    Samples of what `dispatch_model` is to offload, where it will find its folder in use and write nothing there.

    It takes an `index.json` in the folder for its own work of before (big_modeling.py:392). Empty elsewhere.
    """
    device_map_, folder = arguments.get("device_map"), arguments.get("offload_dir")
    if not isinstance(device_map_, dict) or folder is None or arguments.get("offload_index") is not None:
        return {}
    if device_map.DISK not in device_map_.values() or (found := contents(folder)) is None:
        return {}
    names = [name for name, _ in inventories.tensors_of(model) if name in found.index]
    on_disk = [name for name in names if device_map.device_of(device_map_, name) == device_map.DISK]
    return proof.samples(Holder(model), on_disk)


def stale_after_dispatch(model: Any, before: Mapping[str, tuple[float, ...]]) -> list[str]:
    """
    Of the tensors sampled before, those that the dispatched model would take other values for from the folder.
    """
    now = proof.samples(Holder(model), before)
    return [name for name, values in before.items() if name in now and not _alike(now[name], values)]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True))
