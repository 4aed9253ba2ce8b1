"""
The life of one call that fills a module: what it was given, how it ended, and what is said of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, distributed

from ckpt_sentry import config
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.integrations.torch_module import report as module_report
from ckpt_sentry.integrations.torch_module.call import Call
from ckpt_sentry.integrations.torch_module.entry_points import FILE
from ckpt_sentry.integrations.torch_module.judge import Lists, Offer
from ckpt_sentry.model import inventories, model_state, provenance
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.session import loads

if TYPE_CHECKING:
    from ckpt_sentry.core.findings import keys
    from ckpt_sentry.integrations.torch_module import judge as module_judge
    from ckpt_sentry.integrations.torch_module import parts as module_parts
    from ckpt_sentry.integrations.torch_module import torch_load
    from ckpt_sentry.integrations.torch_module.entry_points import EntryPoint
    from ckpt_sentry.model import unify
else:
    keys = later("ckpt_sentry.core.findings:keys")
    unify = later("ckpt_sentry.model.unify")
    module_judge = later("ckpt_sentry.integrations.torch_module.judge")
    module_parts = later("ckpt_sentry.integrations.torch_module.parts")
    torch_load = later("ckpt_sentry.integrations.torch_module.torch_load")

_TORCH_TEXT: Final = "Error(s) in loading state_dict for"
_MISSING_TEXT: Final = "Missing key: "
"""What `set_model_state_dict` itself says of a wrapped model (torch/distributed/checkpoint/state_dict.py:596)."""
_inside: ContextVar[bool] = ContextVar("ckpt_sentry_module", default=False)
_file: ContextVar[File | None] = ContextVar("ckpt_sentry_file", default=None)


@contained("module.enter")
def enter(entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """
    Begin to watch a call; None where it is part of another load, or is no call that could work.
    """
    if _inside.get():
        return None
    outer = loads.current()
    file = _file.get()
    observer = outer.on_filled if outer is not None else file.take if file is not None else None
    if outer is not None and observer is None:
        return None
    given = dict(zip(entry.parameters, args, strict=False), **kwargs)
    module, state_dict = (given.get(name) for name in entry.parameters[:2])
    if module is None or not isinstance(state_dict, Mapping | Tensor):
        return None
    # Nothing else than a dict is looked at twice: most are, and `unify` is much.
    if not isinstance(state_dict, dict) and isinstance(state_dict, unify.Unified):
        state_dict = state_dict.state_dict
    if entry.fills_gaps and not _is_by_name(state_dict):
        return None
    options = given.get("options")
    broadcasts = bool(getattr(options, "broadcast_from_rank0", False))
    if broadcasts and observer is not None:
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
        offer=_offer(state_dict) if entry.fills_gaps else None,
        broadcasts=broadcasts,
        is_listening=broadcasts and _rank() > 0,
        own=inventories.own_tensors(module, state_dict),
    )


def _offer(state_dict: Mapping[str, Any]) -> Offer:
    return Offer(inventories.state_inventory(state_dict).entries, provenance.origin(state_dict))


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


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
    if call.is_listening:
        return False
    if call.offer is not None:
        _end_filling(call, call.offer, error)
    elif lists is None:
        if error is not None:
            _raised(call, error)
    elif not model_state.fills_prompt(call.module, call.state_dict):
        _record(call, lists, error)
    return False


def _record(call: Call, lists: Lists, error: BaseException | None) -> None:
    if call.observer is not None:
        call.observer(call)
    else:
        module_report.record(call, lists, error)


def _end_filling(call: Call, offer: Offer, error: BaseException | None) -> None:
    """
    Judge by the names and shapes that were offered: torch has filled what was lacking with the module's own values.
    """
    call.lists, call.offer = lists, _ = module_judge.compared(call.module, offer)
    if error is None and call.observer is None and module_parts.postpone(call, module_report.record_singles):
        return
    module_parts.abandon(call)
    if error is None or _is_about(error, call):
        _record(call, lists, error)
    else:
        _raised(call, error)


def _is_about(error: BaseException, call: Call) -> bool:
    """
    Whether what was raised is about keys or shapes, and not about the options or the group of ranks.
    """
    if not isinstance(error, RuntimeError):
        return False
    if str(error).startswith((_TORCH_TEXT, _MISSING_TEXT)):
        return True
    wanted = model_state.inventory(call.module).entries
    offered = call.offer.entries if call.offer is not None else {}
    return any(key in wanted and wanted[key].shape != entry.shape for key, entry in offered.items())


def _raised(call: Call, error: BaseException) -> None:
    """
    Say of a call that it has raised for something other than keys. What `torch.load` makes of a shard of a distributed
    checkpoint is its first tensor, which is no dict.
    """
    if not isinstance(call.state_dict, Tensor):
        if call.observer is None:
            module_report.record_raised(call, error)
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
        module_report.record(call, call.lists, None)
    elif isinstance(error, RuntimeError) and str(error).startswith(_TORCH_TEXT):
        module_report.record(call, call.lists, error)


def _mended(call: Call, lists: Lists) -> bool:
    """
    Mend the keys for a second attempt, where `CKPT_SENTRY_ALIGN=auto` allows it and one rule alone explains the first.
    """
    settings = config.settings()
    if settings.align != "auto" or call.entry.fills_gaps or settings.mode in ("off", "observe"):
        return False
    if call.aligned is not None or not lists.missing or not lists.unexpected:
        return False
    found = module_judge.judged(call.module, call.state_dict, lists, None)
    unified = unify.align(call.state_dict, found.examination, settings.min_coverage)
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
