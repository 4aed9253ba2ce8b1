"""
One file with a state dict, read the way the loaders choose a format: by the extension ".safetensors" alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.inventory import Inventory
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.formats import safetensors
from ckpt_sentry.formats.elements import Slot
from ckpt_sentry.formats.errors import HeaderError, plural
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core.fold import key_list
    from ckpt_sentry.formats import sniff
    from ckpt_sentry.formats.torch_save import file as pickle_
else:
    pickle_ = later("ckpt_sentry.formats.torch_save.file")
    sniff = later("ckpt_sentry.formats.sniff")
    key_list = later("ckpt_sentry.core.fold:key_list")


@dataclass(frozen=True, slots=True)
class StateFile:
    """
    What a loader will get from one file. `readable` is False where it will raise; the findings then say why.

    `nested_under`, `nested` and `nested_slots` are as in `pickle_.PickleFacts`; `format` is "safetensors",
    "torch_save" or "dcp"; `bytes` is the file's size.
    """

    path: str
    format: str
    readable: bool
    inventory: Inventory = field(default_factory=Inventory)
    slots: Mapping[str, Slot] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    metadata: Mapping[str, str] | None = None
    nested_under: str | None = None
    nested: Inventory | None = None
    nested_slots: Mapping[str, Slot] = field(default_factory=dict)
    bytes: int = 0


def read(path: str | os.PathLike[str], under: str | None = None) -> StateFile:
    """
    Read the header or the pickle of one file. Never raises OSError or HeaderError: they become findings.

    `under` is the key of a `torch.save` file below which its state dict lies, where the loader takes it from there.
    """
    path = os.fspath(path)
    if path.endswith(".distcp") and (found := sniff.findings(path)):
        return StateFile(path, "dcp", readable=False, findings=found)
    by_name = "safetensors" if path.endswith(".safetensors") else "torch_save"
    try:
        return _read_safetensors(path) if by_name == "safetensors" else _read_pickle(path, under)
    except (OSError, HeaderError, ValueError) as error:
        let_through(error)
        # What it holds on to may be large.
        error.__traceback__ = None
        # What the file really is says more than what its reader ran into.
        tried = error if isinstance(error, HeaderError) and by_name == "safetensors" else None
        found = sniff.findings(path, tried=tried)
        if isinstance(error, HeaderError) and (not found or found[0].code == error.code):
            found = (error.finding(),)
        if not found:
            found = (Finding("file_unreadable", "error", f"{shown(path)} cannot be read: {shown(str(error))}"),)
        return StateFile(path, by_name, readable=False, findings=found)


def _read_safetensors(path: str) -> StateFile:
    header = safetensors.read(path)
    findings = _twice(path, header.duplicates)
    size = os.path.getsize(path)
    return StateFile(
        path,
        "safetensors",
        readable=True,
        inventory=header.inventory,
        slots=header.slots,
        findings=findings,
        metadata=header.metadata,
        bytes=size,
    )


def _read_pickle(path: str, under: str | None) -> StateFile:
    facts = pickle_.read(path, under)
    name = shown(os.path.basename(path))
    found: list[Finding] = []
    if facts.opaque:
        classes = ", ".join(map(shown, facts.opaque[:5])) + (", …" if len(facts.opaque) > 5 else "")  # noqa: PLR2004
        text = f"{name} holds more than tensors ({classes}): torch.load refuses it unless told to trust these"
        step = "save the state dict alone, or allow what you trust with torch.serialization.add_safe_globals"
        found.append(Finding("unsafe_globals", "warning", text, step))
    if facts.holds != "dict":
        text = f"{name} holds no state dict but one object: {shown(facts.holds)}"
        found.append(Finding("no_state_dict", "error", text, "save model.state_dict() instead"))
    if facts.nested_under is not None and facts.nested is not None:
        found.append(_nested(name, facts.nested_under, len(facts.nested.entries), facts.others))
    return StateFile(
        path,
        "torch_save",
        facts.holds == "dict",
        facts.inventory,
        facts.slots,
        tuple(found),
        nested_under=facts.nested_under,
        nested=facts.nested,
        nested_slots=facts.nested_slots,
        bytes=os.path.getsize(path),
    )


def _nested(name: str, under: str, keys: int, others: tuple[str, ...]) -> Finding:
    beside = f", beside {', '.join(map(shown, others[:5]))}" if others else ""
    text = f"the state dict ({plural(keys, 'key')}) is one level down in {name}, under {shown(under)!r}{beside}"
    path = "".join(f"[{part!r}]" for part in under.split("."))
    step = f"pass torch.load(…){shown(path)} on, or save that alone"
    return Finding("nested_state_dict", "error", text, step)


def _twice(path: str, duplicates: tuple[str, ...]) -> tuple[Finding, ...]:
    if not duplicates:
        return ()
    keys = ", ".join(key_list(duplicates).keys[:3])
    text = (
        f"{shown(os.path.basename(path))} names {plural(len(duplicates), 'key')} twice ({keys}): the last entry counts"
    )
    return (Finding("duplicate_keys", "warning", text),)
