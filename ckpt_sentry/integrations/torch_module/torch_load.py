"""
Reading a state dict from a file: `torch.load` and `safetensors.torch.load_file`.

What they return is remembered by its file (`provenance`). Where they raise, the exception gets a note that says what
the file really is: a shard or folder of a distributed checkpoint, a Git LFS pointer, a web page, half a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckpt_sentry.model import provenance
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import reading
from ckpt_sentry.session import loads

if TYPE_CHECKING:
    from ckpt_sentry.formats import sniff
    from ckpt_sentry.render.cells import visible
else:
    sniff = later("ckpt_sentry.formats.sniff")
    visible = later("ckpt_sentry.render.cells:visible")

TARGET = "torch_load"


def instrument_torch(module: ModuleType) -> None:
    """
    Patch `torch.serialization.load`, which is `torch.load`.
    """
    ledger.patch(module, "load", _READER, target=TARGET)


def instrument_safetensors(module: ModuleType) -> None:
    """
    Patch `safetensors.torch.load_file`; `load_model` calls it by its global name.
    """
    ledger.patch(module, "load_file", _READER, target=TARGET)


@contained("torch_load.asked")
def _asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """
    The path that is read; None within a load, whose target knows the files, and of what has no path.
    """
    return None if loads.within() is not None else _path(args, kwargs)


@contained("torch_load.aside")
def step_aside() -> Callable[[], None] | None:
    """
    Give `torch.load` back while DCP reads: it is called for each tensor there, and would only pass through.

    Returns what ends that. What other threads load meanwhile is not remembered.
    """
    back = ledger.set_aside(sys.modules["torch"], "load")
    return None if back is None else contained("torch_load.back")(back)


def _path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    return provenance.path_of(args[0] if args else kwargs.get("f", kwargs.get("filename")))


@contained("torch_load.came")
def _came(path: str, loaded: Any) -> None:
    provenance.remember(loaded, os.path.abspath(path))


@contained("torch_load.failed")
def _failed(path: str, error: BaseException) -> None:
    if isinstance(error, Exception):
        explain(error, path)


_READER = reading(_asked, _came, _failed)


def explain(error: BaseException, path: str) -> None:
    """
    Add to an error what the file really is, if that keeps torch from reading it.
    """
    if not hasattr(error, "add_note"):
        return
    for finding in sniff.findings(path):
        # That there is no such file the error says itself.
        if finding.level == "error" and finding.code != "path_missing":
            error.add_note(f"ckpt_sentry: {visible(finding.text)}")
            if finding.next:
                error.add_note(f"  next: {visible(finding.next)}")
            return
