"""
accelerate: every load by `load_checkpoint_in_model` and `load_checkpoint_and_dispatch`.

What is patched, and why there (accelerate 1.15.0):

* `utils.modeling.load_checkpoint_in_model` (modeling.py:1817) and `big_modeling.load_checkpoint_and_dispatch`
  (big_modeling.py:520): the load as a whole. It is judged by headers before anything is written, and proved by values
  after ties are made anew and the model is dispatched.
* `utils.modeling.load_state_dict` (modeling.py:1649): called for each file; where a rename is applied.
* `big_modeling.dispatch_model` (big_modeling.py:316): a phase of the load; by itself, the one that serves the weights
  of another checkpoint from a folder that was used before.

These modules define the functions, so all later names of them are the wrappers; earlier ones are swept.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config
from ckpt_sentry.integrations.accelerate import facts as accelerate_facts
from ckpt_sentry.integrations.accelerate import judge as accelerate_judge
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import end, look

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ckpt_sentry.core.report import PhaseName
    from ckpt_sentry.integrations.accelerate import offload
    from ckpt_sentry.integrations.accelerate.facts import Call
    from ckpt_sentry.model import unify
    from ckpt_sentry.patching.ledger import Patch
    from ckpt_sentry.session.loads import Load
else:
    offload = later("ckpt_sentry.integrations.accelerate.offload")
    unify = later("ckpt_sentry.model.unify")

TARGET = "accelerate"
READ: Final = "read"
FILL: Final = "fill"
DISPATCH: Final = "dispatch"


def instrument_modeling(module: ModuleType) -> None:
    """
    Patch `accelerate.utils.modeling`.
    """
    ledger.patch(module, "load_state_dict", _reader, target=TARGET)
    ledger.patch(module, "load_checkpoint_in_model", _LOADER, target=TARGET)


def instrument_big_modeling(module: ModuleType) -> None:
    """
    Patch `accelerate.big_modeling`.
    """
    ledger.patch(module, "dispatch_model", _dispatcher, target=TARGET)
    ledger.patch(module, "load_checkpoint_and_dispatch", _LOADER, target=TARGET)


@contained("accelerate.begin")
def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    if loads.current() is not None:
        return None
    call = accelerate_facts.read_call(original, args, kwargs)
    if call is None:
        return None
    return loads.begin(
        "accelerate",
        call.entry_point,
        call.path,
        observe=lambda load: load.keep(call),
    )


@contained("accelerate.before")
def _before(load: Load) -> Callable[[], Any] | None:
    return accelerate_judge.before(load)


@contained("accelerate.after")
def _after(load: Load, _result: Any) -> None:
    look(load, accelerate_judge.after)


@contained("accelerate.end")
def _end(load: Load, error: BaseException | None) -> None:
    end(load, error, functools.partial(accelerate_judge.explain, load))


def _call() -> tuple[Load, Call] | None:
    load = loads.current()
    call = None if load is None else load.state(accelerate_facts.Call)
    return None if load is None or call is None else (load, call)


def _reader(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    opened, aligned = _opened, _aligned

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        if patch.active:
            opened(args, kwargs)
        result = original(*args, **kwargs)
        return (aligned(result) or result) if patch.active else result

    return load_state_dict


@contained("accelerate.opened")
def _opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (found := _call()) is not None:
        load, call = found
        call.opened.append(os.fsdecode(args[0] if args else kwargs["checkpoint_file"]))
        load.enter(READ)


@contained("accelerate.read")
def _read(phase: PhaseName) -> None:
    if (found := _call()) is not None:
        found[0].enter(phase)


@contained("accelerate.aligned")
def _aligned(state_dict: Any) -> Any:
    """
    The state dict under the names that the load's rename gives; None where there is no rename.
    """
    found = _call()
    if found is None:
        return None
    load, call = found
    load.enter(FILL)
    if call.aligned is None or not isinstance(state_dict, dict):
        return None
    unified = unify.align(state_dict, call.aligned, config.settings().min_coverage)
    return None if unified is None else unified.state_dict


def _dispatcher(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    before, after, entered = _before_dispatch, _after_dispatch, _read

    @functools.wraps(original)
    def dispatch_model(*args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(*args, **kwargs)
        entered(DISPATCH)
        state = before(original, args, kwargs)
        result = original(*args, **kwargs)
        if state is not None:
            after(*state)
        return result

    return dispatch_model


@contained("accelerate.before_dispatch")
def _before_dispatch(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, tuple[float, ...]], str] | None:
    if loads.current() is not None:
        return None
    arguments = accelerate_facts.arguments_of(original, args, kwargs)
    if arguments is None:
        return None
    held = offload.before_dispatch(arguments["model"], arguments)
    return (arguments["model"], held, str(arguments["offload_dir"])) if held else None


@contained("accelerate.after_dispatch")
def _after_dispatch(model: Any, held: dict[str, tuple[float, ...]], folder: str) -> None:
    stale = offload.stale_after_dispatch(model, held)
    if not stale:
        return
    load = loads.begin("accelerate", "dispatch_model", folder)
    if load is None:
        return
    error = accelerate_judge.stale_dispatch(load, stale, len(held), folder)
    end(load, error)
    if error is not None:
        raise error


_LOADER = judging(_begin, _before, _after, _end)
