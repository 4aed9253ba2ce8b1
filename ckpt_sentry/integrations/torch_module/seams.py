"""
torch.nn: `Module.load_state_dict`, and `set_model_state_dict` of `torch.distributed.checkpoint.state_dict`.

Everybody calls this all the time, so a load that lacks nothing costs a hash of its keys; the first of its kind in the
process (class of the module, keys) is recorded, none is printed. One that lacks keys is examined and said, once for
each gap in a class of modules; loads that come in parts are judged as the whole (`module_parts`). What raises keeps its
exception, with the report attached. A call from within another load, or from within `load_state_dict` itself, is part
of that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_sentry.integrations.torch_module.entry_points import MODEL, MODULE, EntryPoint
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import around, contained
from ckpt_sentry.patching.pause import uncollected
from ckpt_sentry.patching.wrapping_importlib_bootstrap import repeating
from ckpt_sentry.session import loads, sinks

if TYPE_CHECKING:
    from types import ModuleType

    from ckpt_sentry.patching.patches import Wrap

TARGET = "module"


def instrument(module: ModuleType) -> None:
    """
    Patch `torch.nn.modules.module.Module`.
    """
    ledger.patch(module.Module, "load_state_dict", _wrapper(MODULE), target=TARGET)


def instrument_state_dict(module: ModuleType) -> None:
    """
    Patch `torch.distributed.checkpoint.state_dict.set_model_state_dict`.

    It fills what the dict lacks with the module's own values before it calls `load_state_dict` (state_dict.py:618):
    only here are the dict's own keys to be seen.
    """
    ledger.patch(module, "set_model_state_dict", _wrapper(MODEL), target=TARGET)


def instrument_safetensors(module: ModuleType) -> None:
    """
    Patch `safetensors.torch.load_model`: it always asks for `strict=False`, and refuses afterwards by itself.
    """
    ledger.patch(module, "load_model", _file_loader(), target=TARGET)


def prepare(_module: ModuleType) -> None:
    """
    Import what every load needs, now that torch is whole: the first one shall not wait for it.
    """
    sinks.prepare()


@contained("module.calls")
def _calls() -> Any:
    """
    What watches the calls; None where this one is a part of another load that does not ask for it.
    """
    load = loads.current()
    return _module_calls() if load is None or load.on_filled is not None else None


@functools.cache
def _module_calls() -> Any:
    def found() -> Any:
        # When this module is imported, torch itself is but half there.
        from ckpt_sentry.integrations.torch_module import calls

        return calls

    return uncollected(found)


def _wrapper(entry: EntryPoint) -> Wrap:
    """
    Watch a function that fills a module, and call it a second time where the agent may, and can, mend the keys.
    """
    find, found = _calls, _module_calls

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = find()
        return None if calls is None else calls.enter(entry, args, kwargs)

    def end(call: Any, result: Any, error: BaseException | None) -> bool:
        ended: bool = found().end(call, result, error)
        return ended

    return repeating(begin, end)


def _file_loader() -> Wrap:
    find, found = _calls, _module_calls

    def enter(_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = find()
        return None if calls is None else calls.enter_file(args, kwargs)

    def leave(file: Any, error: BaseException | None) -> None:
        found().end_file(file, error)

    return around(enter, leave)
