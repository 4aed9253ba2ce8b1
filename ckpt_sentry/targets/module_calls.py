"""
The life of one call that fills a module: what it was given, how it ended, and what is said of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from ckpt_sentry import config, loads
from ckpt_sentry.audit.findings import keys
from ckpt_sentry.audit.report import Finding
from ckpt_sentry.guard import contained
from ckpt_sentry.targets import module_judge, module_report, provenance, torch_load
from ckpt_sentry.targets.module import FILE
from ckpt_sentry.targets.module_judge import Lists
from ckpt_sentry.unify import Unified, align

if TYPE_CHECKING:
    from torch import nn

    from ckpt_sentry.targets.module import Entry

OBSERVER: Final = "module_observer"
"""The note of a load whose target wants to hear of each module filled within it: `Callable[[Call], object]`."""

_TORCH_TEXT: Final = "Error(s) in loading state_dict for"
_inside: ContextVar[bool] = ContextVar("ckpt_sentry_module", default=False)
_file: ContextVar[File | None] = ContextVar("ckpt_sentry_file", default=None)


@dataclass(slots=True)
class Call:
    """
    One call, and how it ended: torch's lists. Never the exception, whose traceback leads back here.
    """

    entry: Entry
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module
    state_dict: Any
    is_strict: bool
    is_assigning: bool
    token: Token[bool]
    observer: Callable[[Call], object] | None
    offered: tuple[Any, ...] | None = None
    """The dict's keys before the call, where it is known to change the dict."""
    began: float = field(default_factory=time.perf_counter)
    lists: Lists | None = None
    aligned: Finding | None = None
    """What `CKPT_SENTRY_ALIGN=auto` has done to the keys."""

    @property
    def module_class(self) -> str:
        kind = type(self.module)
        return f"{kind.__module__}.{kind.__qualname__}"

    @property
    def meta_words(self) -> module_judge.MetaWords:
        """
        How it is said that tensors have no values after this call.
        """
        return module_judge.ASSIGNED if self.is_assigning else module_judge.COPIED

    def remedy(self) -> str:
        """
        The call by which keys under other names are loaded, as strictly as this one.
        """
        return self.entry.remedy.format(loosely="" if self.is_strict else ", strict=False")


@contained("module.enter")
def enter(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """
    Begin to watch a call; None where it is part of another load, or is no call that could work.
    """
    if _inside.get():
        return None
    outer = loads.current()
    file = _file.get()
    observer = outer.notes.get(OBSERVER) if outer is not None else file.take if file is not None else None
    if outer is not None and observer is None:
        return None
    given = dict(zip(entry.parameters, args, strict=False), **kwargs)
    module, state_dict = (given.get(name) for name in entry.parameters[:2])
    if module is None or not isinstance(state_dict, Mapping | Tensor):
        return None
    if isinstance(state_dict, Unified):
        state_dict = state_dict.state_dict
    if entry.fills_gaps and not _is_by_name(state_dict):
        return None
    options = given.get("options")
    if getattr(options, "broadcast_from_rank0", False):  # ranks other than the first have an empty dict, rightly
        return None
    return Call(
        entry,
        args,
        kwargs,
        module,
        state_dict,
        is_strict=bool(given.get("strict", getattr(options, "strict", True))),
        is_assigning=bool(given.get("assign", False)),
        token=_inside.set(True),
        observer=observer,
        offered=tuple(state_dict) if entry.fills_gaps else None,
    )


def _is_by_name(state_dict: Any) -> bool:
    """
    Whether the keys are names. By module, as `set_model_state_dict` takes it too, is deprecated by torch.
    """
    return isinstance(state_dict, Mapping) and all(isinstance(key, str) for key in state_dict)


@contained("module.end", default=False)
def end(call: Call, result: Any, error: BaseException | None) -> bool:
    """
    Say how the call ended, where that is worth a word. Returns True if it is to be made once more, with `call.args`.

    Raises:
        LowCoverageError: the settings refuse what came in (or did not).
    """
    again = False
    try:
        call.lists = lists = _lists(result, error)
        again = lists is not None and bool(lists.missing or lists.unexpected) and _mended(call, lists)
    finally:
        if not again:
            _inside.reset(call.token)
    if again:
        return True
    if lists is None:
        if error is not None:
            _raised(call, error)
        return False
    if call.offered is not None:
        call.lists = lists = module_judge.compared(call.module, call.offered)
        if lists is None:
            return False
    if call.observer is not None:
        call.observer(call)
    else:
        module_report.say(call, lists, error)
    return False


def _raised(call: Call, error: BaseException) -> None:
    """
    Say of a call that it has raised for something other than keys. What `torch.load` makes of a shard of a distributed
    checkpoint is its first tensor, which is no dict.
    """
    if not isinstance(call.state_dict, Tensor):
        if call.observer is None:
            module_report.say_raised(call, error)
    else:
        path = provenance.origin(call.state_dict)
        if path is not None:
            torch_load.explain(error, path)


@dataclass(slots=True)
class File:
    """
    A strict call of `safetensors.torch.load_model`, and the call of `load_state_dict` within.
    """

    token: Token[File | None] | None = None
    call: Call | None = None

    def take(self, call: Call) -> None:
        self.call = call


@contained("module.enter_file")
def enter_file(args: tuple[Any, ...], kwargs: dict[str, Any]) -> File | None:
    """
    Begin to watch a strict call of `load_model`; one that is not strict is what `load_state_dict` says within.
    """
    given = dict(zip(FILE.parameters, args, strict=False), **kwargs)
    if loads.current() is not None or _inside.get() or not given.get("strict", True):
        return None
    file = File()
    file.token = _file.set(file)
    return file


@contained("module.end_file")
def end_file(file: File, error: BaseException | None) -> None:
    """
    Say how the call ended: as a strict one, whatever it asked of `load_state_dict`.
    """
    if file.token is not None:
        _file.reset(file.token)
    call = file.call
    if call is None or call.lists is None:
        return
    call.entry, call.is_strict = FILE, True
    if error is None:
        module_report.say(call, call.lists, None)
    elif isinstance(error, RuntimeError) and str(error).startswith(_TORCH_TEXT):
        module_report.say(call, call.lists, error)


def _mended(call: Call, lists: Lists) -> bool:
    """
    Mend the keys for a second attempt, where `CKPT_SENTRY_ALIGN=auto` allows it and one rule alone explains the first.
    """
    settings = config.settings()
    if settings.align != "auto" or call.entry.fills_gaps or settings.mode in ("off", "observe"):
        return False
    if call.aligned is not None or not lists.missing or not lists.unexpected:
        return False
    found = module_judge.judged(call.module, call.state_dict, lists)
    unified = align(call.state_dict, found.examination, settings.min_coverage)
    if unified is None:
        return False
    call.state_dict = unified.state_dict
    call.args, call.kwargs = _with(call, unified.state_dict)
    text = f"{keys(unified.count)} {'was' if unified.count == 1 else 'were'} aligned: {unified.rule}."
    call.aligned = Finding("renamed_keys", "info", text)
    return True


def _lists(result: Any, error: BaseException | None) -> Lists | None:
    if error is None:
        missing, unexpected = getattr(result, "missing_keys", None), getattr(result, "unexpected_keys", None)
        return None if missing is None or unexpected is None else Lists(missing, unexpected)
    # Whatever else is raised, by a hook or for a bad argument, says nothing about keys.
    if isinstance(error, RuntimeError) and str(error).startswith(_TORCH_TEXT):
        return module_judge.lists_of(error)
    return None


def _with(call: Call, state_dict: Mapping[Any, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    The arguments of the call with another dict.
    """
    name = call.entry.parameters[1]
    if name in call.kwargs:
        return call.args, {**call.kwargs, name: state_dict}
    return (call.args[0], state_dict, *call.args[2:]), call.kwargs
