"""
torch.distributed.checkpoint: every load that goes through `_load_state_dict`.

What is patched, and why there (torch 2.13.0, `torch/distributed/checkpoint/`):

* `state_dict_loader.load`, `load_state_dict`, `_load_state_dict_from_keys` and `_load_state_dict` (also the binding of
  its own that `format_utils` has): the load as a whole, and what raises outside the collectives, as a `Stateful` does.
* `utils._DistWrapper.reduce_scatter` and `all_gather` (utils.py:178, 262): the phases. What the planner, the plan and
  the metadata say is read from the step that torch passes in (`step.Step`); no collective is added.
* `default_planner._create_read_items`: both sides of each key, while they are at hand (`planning`).
* `filesystem.FileSystemReader.read_data`, `hf_storage.HuggingFaceStorageReader.read_data`: the plan as it is read: a
  planner's `finish_plan` or the rank that gathers the plans may have changed it.
* `utils._wrap_exception` (api.py:10): runs on the failing rank alone, before its exception crosses to the others.
* `api.CheckpointException.__str__` and `__reduce__`: identical failures of many ranks are printed and sent once.

* `utils._DistWrapper.barrier`: a rank that cannot read the common `.metadata` and finds `__RANK.metadata` goes on
  alone (state_dict_loader.py:294, 313): it skips the gathering of plans and waits here, while the others wait for its
  plan. So it says what it did before it enters that barrier, which is the only one in a load.

A load that goes well costs one look at each key. Exceptions stay the objects they are.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.integrations.dcp import errors as dcp_errors
from ckpt_sentry.integrations.dcp import exceptions as dcp_exceptions
from ckpt_sentry.integrations.dcp import facts as dcp_facts
from ckpt_sentry.integrations.dcp import participants
from ckpt_sentry.integrations.dcp.stock import shows_plan
from ckpt_sentry.integrations.torch_module import torch_load
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import around, contained, trim
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import end, look, note_raised

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ckpt_sentry.formats.dcp import diagnosis as files
    from ckpt_sentry.patching.ledger import Patch
    from ckpt_sentry.session.loads import Load
else:
    files = later("ckpt_sentry.formats.dcp.diagnosis")

TARGET = "dcp"
ENTRY_POINTS = ("load", "load_state_dict", "_load_state_dict_from_keys", "_load_state_dict")
PLAN: Final = "plan"
READ: Final = "read"
BARRIER: Final = "barrier"
RESTORE: Final = "restore"


def instrument_utils(module: ModuleType) -> None:
    """
    Patch `torch.distributed.checkpoint.utils` and the exception class that it shares with `api`.
    """
    ledger.patch(module, "_wrap_exception", _wrap_exception, target=TARGET)
    wrapper = getattr(module, "_DistWrapper", None)
    ledger.patch(wrapper, "reduce_scatter", _collective, target=TARGET)
    ledger.patch(wrapper, "all_gather", _collective, target=TARGET)
    ledger.patch(wrapper, "barrier", around(_waits, _waited), target=TARGET)
    exception = getattr(module, "CheckpointException", None)
    ledger.patch(exception, "__str__", dcp_exceptions.readable, target=TARGET)
    ledger.patch(exception, "__reduce__", dcp_exceptions.reducing, target=TARGET)


def instrument_loader(module: ModuleType) -> None:
    """
    Patch `torch.distributed.checkpoint.state_dict_loader`.
    """
    for name in ENTRY_POINTS:
        ledger.patch(module, name, _LOAD, target=TARGET)


def instrument_filesystem(module: ModuleType) -> None:
    """
    Patch the reader of `torch.distributed.checkpoint.filesystem`.
    """
    ledger.patch(getattr(module, "FileSystemReader", None), "read_data", _reader, target=TARGET)


def instrument_hf_storage(module: ModuleType) -> None:
    """
    Patch the reader of `torch.distributed.checkpoint.hf_storage`.
    """
    ledger.patch(getattr(module, "HuggingFaceStorageReader", None), "read_data", _reader, target=TARGET)


def instrument_format_utils(module: ModuleType) -> None:
    """
    Patch the binding of `_load_state_dict` in `format_utils`, where it was made before ours.
    """
    ledger.patch(module, "_load_state_dict", _LOAD, target=TARGET)


@contained("dcp.begin")
def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    outer = loads.current()
    if outer is not None and not _is_within(original, outer):
        _observed(original, outer, args, kwargs)
        return None
    kind, members = participants.together(args, kwargs)
    return loads.begin(
        "dcp",
        f"dcp.{original.__name__}",
        dcp_facts.path_of(args, kwargs),
        kind=kind,
        members=members,
        observe=lambda load: _observed(original, load, args, kwargs),
    )


def _observed(original: Callable[..., Any], load: Load, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dcp_facts.note_arguments(load, args, kwargs)
    if original.__name__ == "_load_state_dict" and load.framework == "dcp":
        dcp_facts.note_values(load, args, kwargs)


def _is_within(original: Callable[..., Any], outer: Load) -> bool:
    """
    Whether this is a load of its own amid one of DCP: by a planner, a reader, a `Stateful` or a thread of theirs. Torch
    itself comes here twice at most, by `_load_state_dict`, before it plans.
    """
    if outer.framework != "dcp":
        return False
    is_torchs = original.__name__ == "_load_state_dict" and outer.phase == loads.SETUP
    return not is_torchs or outer.thread_id != threading.get_ident()


@contained("dcp.before")
def _before(_load: Load) -> None:
    """
    Nothing is known yet: torch reads the metadata itself.
    """


@contained("dcp.after")
def _after(load: Load, _result: Any) -> None:
    look(load, dcp_errors.judge)


@contained("dcp.end")
def _end(load: Load, error: BaseException | None) -> None:
    end(load, error, functools.partial(dcp_errors.explain, load))


def _observed_plan(load: Load, map_fun: Callable[[], Any]) -> Callable[[], Any]:
    """
    The step in which this rank makes its plan, watched, and followed by a look at the plan.

    Wrapped, as the next one, without touching its name or closure: other code reads both.
    """
    planning, made, planned = _planning, _made, _planned

    @functools.wraps(map_fun)
    def local() -> Any:
        planning(load)
        try:
            plan = map_fun()
        finally:
            made(load)
        planned(load, plan)
        return plan

    return local


def _observed_read(load: Load, map_fun: Callable[[], Any]) -> Callable[[], Any]:
    """
    The step in which this rank reads, between a look at what the plan has become and the word that it is done.
    """
    reading, read, step_aside = _reading, _read, torch_load.step_aside

    @functools.wraps(map_fun)
    def local() -> Any:
        reading(load, map_fun)
        step_back = step_aside()
        try:
            result = map_fun()
        finally:
            if step_back is not None:
                step_back()
        read(load)
        return result

    return local


@contained("dcp.enter")
def _enter(load: Load, step: str, function: Callable[[], Any], wrapper: Any) -> None:
    dcp_facts.note_step_function(load, function, wrapper)
    load.enter(PLAN if step == PLAN else READ)


@contained("dcp.planning")
def _planning(load: Load) -> None:
    dcp_facts.note_planning(load)


@contained("dcp.made")
def _made(load: Load) -> None:
    dcp_facts.note_planned(load)


@contained("dcp.planned")
def _planned(load: Load, plan: Any) -> None:
    dcp_facts.note_plan(load, plan)


@contained("dcp.reading")
def _reading(load: Load, function: Callable[[], Any]) -> None:
    dcp_facts.note_reading(load, function)


@contained("dcp.shown")
def _shown(load: Load, reader: Any, plan: Any) -> None:
    if load.phase == READ and shows_plan(reader):
        dcp_facts.note_final_plan(load, plan)


@contained("dcp.read")
def _read(load: Load) -> None:
    load.enter(BARRIER)


@contained("dcp.left")
def _left(load: Load, step: str) -> None:
    if step == READ:
        load.enter(RESTORE)


def _wrap_exception(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    current, raised, portable, sendable, shorten = loads.current, _raised, _portable, _sendable, trim

    @functools.wraps(original)
    def wrap_exception(exc: BaseException) -> Any:
        load = current() if patch.active else None
        if load is None:
            return original(exc)
        raised(load, exc)
        # torch prints the frames that it finds here.
        shorten(exc)
        wrapped = original(portable(load, exc) or exc)
        sendable(wrapped)
        return wrapped

    return wrap_exception


@contained("dcp.raised")
def _raised(load: Load, exc: BaseException) -> None:
    note_raised(load, exc, functools.partial(dcp_errors.explain, load))


@contained("dcp.sendable")
def _sendable(wrapped: Any) -> None:
    dcp_exceptions.without_code(wrapped)


@contained("dcp.portable")
def _portable(load: Load, exc: BaseException) -> BaseException | None:
    # In a load of one process nothing travels: the caller gets the very object that was raised.
    return dcp_exceptions.portable(exc) if dcp_facts.observed(load).gathers else exc


def _collective(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    current, enter, left = loads.current, _enter, _left
    observed = {PLAN: _observed_plan, READ: _observed_read}

    @functools.wraps(original)
    def collective(self: Any, step: str, map_fun: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        load = current() if patch.active else None
        if load is None or step not in observed:
            return original(self, step, map_fun, *args, **kwargs)
        enter(load, step, map_fun, self)
        result = original(self, step, observed[step](load, map_fun), *args, **kwargs)
        left(load, step)
        return result

    return collective


def _reader(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    current, shown = loads.current, _shown

    @functools.wraps(original)
    def read_data(self: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        if patch.active and (load := current()) is not None:
            shown(load, self, plan)
        return original(self, plan, *args, **kwargs)

    return read_data


@contained("dcp.waits")
def _waits(_: Callable[..., Any], args: tuple[Any, ...], __: dict[str, Any]) -> Load | None:
    load = loads.current()
    path = dcp_facts.observed(load).path if load is not None else None
    if load is None or path is None or load.phase == BARRIER or not args:
        return None
    found = files.rank_local(path, getattr(args[0], "rank", None))
    load.enter(BARRIER, () if found is None else (found,))
    return load


@contained("dcp.waited")
def _waited(_: Load, __: BaseException | None) -> None:
    """
    The load goes on to its end.
    """


_LOAD = judging(_begin, _before, _after, _end)
