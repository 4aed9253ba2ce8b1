"""
What a `device_map` says and what it leaves out: findings before anything is written, and where each part ended.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.formats.paths import shown_path

if TYPE_CHECKING:
    from ckpt_sentry.core.inventory import Inventory

AUTOMATIC: Final = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})
"""The strings that `load_checkpoint_and_dispatch` turns into a map (big_modeling.py:605)."""
DISK: Final = "disk"

_SHOWN: Final = 5
_LIKELY: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class MapFacts:
    """
    A map held against a model. `unknown` are names that the model does not have, with the nearest real ones;
    `uncovered` keys of the model without a device; `bad` entries (or None for the map itself) with what is wrong.
    """

    unknown: Mapping[str, tuple[str, ...]]
    uncovered: tuple[str, ...] = ()
    bad: Mapping[str | None, str]


def examine(device_map: object, model: torch.nn.Module, wanted: Inventory) -> MapFacts:
    """
    Hold a map against a model. A string that accelerate resolves by itself, and None, are always well.
    """
    if device_map is None or (isinstance(device_map, str) and device_map in AUTOMATIC):
        return MapFacts(unknown={}, bad={})
    if not isinstance(device_map, Mapping):
        return MapFacts(unknown={}, bad={None: _no_map(device_map)})
    modules = dict(model.named_modules())
    names = [str(name) for name in device_map]
    unknown = [name for name in names if name and name not in modules and name not in wanted.entries]
    bad: dict[str | None, str] = {
        str(name): wrong for name, device in device_map.items() if (wrong := bad_device(device)) is not None
    }
    if set(device_map.values()) == {DISK}:
        bad[None] = "sends every part to disk: no device is left to run on; use accelerate.disk_offload"
    return MapFacts(
        unknown={name: _nearest(name, modules) for name in unknown},
        uncovered=uncovered(device_map, wanted.entries),
        bad=bad,
    )


def uncovered(device_map: Mapping[str, Any], keys: Iterable[str]) -> tuple[str, ...]:
    """
    Keys that neither have an entry nor lie in a module that has one (modeling.py:1629).
    """
    if "" in device_map:
        return ()
    return tuple(key for key in keys if _entry(device_map, key) is None)


def _entry(device_map: Mapping[str, Any], key: str) -> str | None:
    """
    The longest name of the map that holds a key, as the loader looks it up (modeling.py:1990).
    """
    name = key
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def device_of(device_map: Mapping[str, Any], key: str) -> Any:
    """
    The device that the map gives a key, or None.
    """
    name = _entry(device_map, key)
    return None if name is None else device_map[name]


def bad_device(device: object) -> str | None:
    """
    What is wrong with a value of a map, or None: neither "disk" nor a device of this machine.
    """
    if device == DISK:
        return None
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        return f"{shown(repr(device))} is no device"
    if isinstance(device, int):
        return None if 0 <= device < _accelerators() else f"device {device} is not there ({_there()})"
    try:
        parsed = torch.device(device)
    except RuntimeError:
        near = difflib.get_close_matches(str(device), ("cpu", "cuda", "disk", "meta", "mps", "xpu"), 1)
        return f"{shown(repr(device))} is no device" + (f"; did you mean {near[0]!r}?" if near else "")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        return f"device {parsed} is not there ({_there()})"
    return None


def _accelerators() -> int:
    accelerator = getattr(torch, "accelerator", None)
    return int(accelerator.device_count()) if accelerator is not None else int(torch.cuda.device_count())


def _there() -> str:
    count = _accelerators()
    return "this machine has no accelerator" if count == 0 else f"this machine has 0 to {count - 1}"


def _no_map(device_map: object) -> str:
    ways = "'auto', or a dict such as {'': 'cpu'}"
    if isinstance(device_map, str):
        return f"is {shown(repr(device_map))}, which is no name of a strategy: give {ways}"
    return f"is {shown(repr(device_map))} ({type(device_map).__name__}), not a map: give {ways}"


def _nearest(name: str, modules: Collection[str]) -> tuple[str, ...]:
    """
    Real modules that a wrong name may have meant: one that ends or begins alike, else those that are spelt alike.
    """
    last = name.rpartition(".")[2]
    by_end = [real for real in modules if real and (name.endswith(f".{real}") or real.endswith(f".{name}"))]
    if by_end:
        return (max(by_end, key=len),)
    same_last = [real for real in modules if real.rpartition(".")[2] == last]
    return tuple(difflib.get_close_matches(name, [real for real in modules if real], 2, _LIKELY) or same_last[:1])


def findings(facts: MapFacts) -> tuple[Finding, ...]:
    """
    Say what `examine` has found.
    """
    return tuple(found for say in (_bad, _unknown, _uncovered) for found in say(facts))


def _bad(facts: MapFacts) -> Iterable[Finding]:
    for name, wrong in list(facts.bad.items())[:_SHOWN]:
        part = "" if name is None else f"gives no device to {shown(name) or 'the whole model'}: "
        yield Finding("device_map_bad_value", "error", f"device_map {part}{wrong}.")


def _unknown(facts: MapFacts) -> Iterable[Finding]:
    if not facts.unknown:
        return
    said = [
        f"{shown(name)}{f' (the model has {shown(real[0])})' if real else ''}" for name, real in facts.unknown.items()
    ]
    more = f" and {len(said) - _SHOWN:,} more" if len(said) > _SHOWN else ""
    names = "a module" if len(said) == 1 else f"{len(said):,} modules"
    text = f"device_map names {names} that the model does not have: {', '.join(said[:_SHOWN])}{more}."
    yield Finding("device_map_unknown_name", "warning", text, "Name the modules as model.named_modules() does.")


def _uncovered(facts: MapFacts) -> Iterable[Finding]:
    if not facts.uncovered:
        return
    folded = key_list(facts.uncovered)
    more = ", …" if folded.omitted or len(folded.keys) > _SHOWN else ""
    count = f"{folded.count:,} keys" if folded.count != 1 else "1 key"
    text = f"device_map gives no device for {count} of the model: {', '.join(folded.keys[:_SHOWN])}{more}."
    yield Finding("device_map_uncovered", "error", text, 'Add an entry for each, or "" for all the rest.')


def folder_finding(folder: object) -> Finding | None:
    """
    Say that an `offload_folder` cannot be written to, or None. Nothing is created.
    """
    try:
        path = os.path.abspath(os.fspath(folder))  # type: ignore[call-overload]
    except TypeError:
        return None
    standing = path
    while not os.path.lexists(standing):
        standing = os.path.dirname(standing)
    if os.path.isdir(standing) and os.access(standing, os.W_OK | os.X_OK):
        return None
    why = "is no folder" if not os.path.isdir(standing) else "is not writable"
    text = f"offload_folder {shown_path(path)} cannot be written to: {shown_path(standing)} {why}."
    return Finding("offload_folder_unwritable", "error", text, "Pass a folder on a disk with room for the weights.")


def placed(asked: object, device_map: Mapping[str, Any]) -> Finding | None:
    """
    Say where each part of the model ended, where that was not plain from the map that was asked for.
    """
    parts: dict[str, list[str]] = {}
    for name, device in device_map.items():
        parts.setdefault(str(device), []).append(name or "the whole model")
    if len(parts) == 1 and not isinstance(asked, str):
        return None
    where = "; ".join(
        f"{device}: {', '.join(key_list(names).keys[:_SHOWN])}" for device, names in sorted(parts.items())
    )
    if len(parts) == 1:
        where = f"all of it on {next(iter(parts))}"
    return Finding("device_map_placed", "info", f"The model was placed so: {where}.")


def elsewhere(
    device_map: Mapping[str, Any], devices: Mapping[str, str], same: Callable[[str, Any], bool]
) -> Finding | None:
    """
    Say which keys ended on another device than the map says. `devices` maps keys to the type of their device.
    """
    wrong = [key for key, device in devices.items() if not same(device, device_of(device_map, key))]
    if not wrong:
        return None
    folded = key_list(wrong)
    text = (
        f"device_map had no effect on {folded.count:,} keys: {', '.join(folded.keys[:_SHOWN])} "
        f"ended on {', '.join(sorted({devices[key] for key in wrong}))}."
    )
    return Finding("device_map_ignored", "warning", text, "Compare the map with model.hf_device_map.")
