"""
Reading a state dict from a file: `torch.load` and `safetensors.torch.load_file`.

What they return is remembered by its file (`provenance`). Where they raise, the exception gets a note that says what
the file really is: a shard or folder of a distributed checkpoint, a Git LFS pointer, a web page, half a file.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ckpt_sentry import hooks, loads
from ckpt_sentry.checkpoints import sniff
from ckpt_sentry.guard import contained
from ckpt_sentry.hooks import Patch
from ckpt_sentry.render.cells import visible
from ckpt_sentry.targets import provenance

TARGET = "torch_load"


def instrument_torch(module: ModuleType) -> None:
    """
    Patch `torch.serialization.load`, which is `torch.load`.
    """
    hooks.patch(module, "load", _reader, target=TARGET)


def instrument_safetensors(module: ModuleType) -> None:
    """
    Patch `safetensors.torch.load_file`; `load_model` calls it by its global name.
    """
    hooks.patch(module, "load_file", _reader, target=TARGET)


def _reader(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    within, came, failed = loads.within, _came, _failed

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        # Within a load its target knows the files.
        if not patch.active or within() is not None:
            return original(*args, **kwargs)
        try:
            loaded = original(*args, **kwargs)
        except Exception as error:
            failed(error, args, kwargs)
            raise
        came(loaded, args, kwargs)
        return loaded

    return read


@contained("torch_load.aside")
def step_aside() -> Callable[[], None] | None:
    """
    Give `torch.load` back while DCP reads: it is called for each tensor there, and would only pass through.

    Returns what ends that. What other threads load meanwhile is not remembered.
    """
    back = hooks.set_aside(sys.modules["torch"], "load")
    return None if back is None else contained("torch_load.back")(back)


def _path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    return provenance.path_of(args[0] if args else kwargs.get("f", kwargs.get("filename")))


@contained("torch_load.came")
def _came(loaded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (path := _path(args, kwargs)) is not None:
        provenance.remember(loaded, os.path.abspath(path))


@contained("torch_load.failed")
def _failed(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Within a load of its own that load's report says it.
    path = _path(args, kwargs)
    if loads.current() is None and path is not None:
        explain(error, path)


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
