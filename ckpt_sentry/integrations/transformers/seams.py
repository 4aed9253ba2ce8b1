"""
transformers: `PreTrainedModel.from_pretrained`, joined with the loading info that transformers itself keeps.

What is patched, and why there (transformers 5.24.0, `modeling_utils.py`):

* `PreTrainedModel.from_pretrained`: the load as a whole, and what it raises.
* `_get_resolved_checkpoint_files`: the files that are read.
* `PreTrainedModel._move_missing_keys_from_meta_to_device` (4842): buffers get memory, which somebody has to fill.
* `PreTrainedModel.load_adapter` (integrations/peft.py:80): an adapter is a checkpoint of its own. Before transformers 5
  it goes through `load_state_dict`.
* `PreTrainedModel._finalize_model_loading` (4605): the loading info, after ties and ignore lists, before the model is
  returned; a size mismatch is raised from within. transformers 4: see `v4`.
* `load_sharded_checkpoint`, by which Trainer resumes from shards (trainer_utils.py:1057; 4: modeling_utils.py). It
  loads each shard by `load_state_dict(strict=False)`, and compares with the index alone. What each of these calls
  leaves out is the next one's: here they are one load, judged by what all of them have left out. With `strict=True` it
  raises by the index before it reads a shard.

`from_pretrained` returns a model also where not one key of the checkpoint is one of its own: that is refused here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.integrations.transformers import v4 as transformers_v4
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import end, look

if TYPE_CHECKING:
    from ckpt_sentry.integrations.transformers import shards
    from ckpt_sentry.patching.ledger import Patch
    from ckpt_sentry.session.loads import Load

else:
    shards = later("ckpt_sentry.integrations.transformers.shards")

TARGET = "transformers"
_SHARDED: Final = "load_sharded_checkpoint"
_PARAMETERS: Final = ("model", "folder", "strict", "prefer_safe")
_FINALIZERS = ("_finalize_model_loading", "_finalize_load_state_dict")
"""The second in 5.0, which returns a new loading info, without what may be missing."""


def instrument(module: ModuleType) -> None:
    """
    Patch `transformers.modeling_utils`.
    """
    model = getattr(module, "PreTrainedModel", None)
    ledger.patch(module, "_get_resolved_checkpoint_files", _resolve, target=TARGET)
    finalizer = next((name for name in _FINALIZERS if hasattr(model, name)), None)
    if finalizer is not None:
        ledger.patch(model, finalizer, _finalize, target=TARGET)
        ledger.patch(model, "_move_missing_keys_from_meta_to_device", _mover, target=TARGET)
        ledger.patch(model, "load_adapter", _ADAPTER, target=TARGET)
    elif hasattr(model, transformers_v4.SEAM):
        ledger.patch(model, transformers_v4.SEAM, transformers_v4.loading, target=TARGET)
    else:
        ledger.gate(model, "from_pretrained", "its loading info is not where transformers 4 or 5 has it", target=TARGET)
        return
    ledger.patch(model, "from_pretrained", judging(_begin, _before, _after, _end), target=TARGET)


def instrument_shards(module: ModuleType) -> None:
    """
    Patch `load_sharded_checkpoint` in `transformers.trainer_utils`, or in `transformers.modeling_utils` before 5.
    """
    if _SHARDED in vars(module):
        ledger.patch(module, _SHARDED, _SHARDS, target=TARGET)


@contained("transformers.begin")
def _begin(_original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    if loads.current() is not None:
        return None
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    name = args[1] if len(args) > 1 else kwargs.get("pretrained_model_name_or_path")
    return transformers_judge.begin(args[0], name, kwargs.get("key_mapping"), kwargs.get("variant"))


@contained("transformers.before")
def _before(_load: Load) -> None:
    """
    Nothing is known yet: transformers makes the model itself.
    """


@contained("transformers.after")
def _after(load: Load, _result: Any) -> None:
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    transformers_v4.note(load)
    look(load, transformers_judge.refuse)


@contained("transformers.end")
def _end(load: Load, error: BaseException | None) -> None:
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    end(load, error, functools.partial(transformers_judge.explain, load))


def _resolve(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    current, note = loads.current, _resolved

    @functools.wraps(original)
    def resolve(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        load = current() if patch.active else None
        if load is not None:
            note(load, result)
        return result

    return resolve


@contained("transformers.resolved")
def _resolved(load: Load, result: Any) -> None:
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    transformers_judge.note_files(load, result)


def _finalize(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    current, note = loads.current, _loaded

    @functools.wraps(original)
    def finalize(model: Any, load_config: Any, loading_info: Any) -> Any:
        info = loading_info
        try:
            info = original(model, load_config, loading_info)
            return info
        finally:
            load = current() if patch.active else None
            if load is not None:
                note(load, model, load_config, info)

    return finalize


@contained("transformers.loaded")
def _loaded(load: Load, model: Any, load_config: Any, loading_info: Any) -> None:
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    transformers_judge.note_info(load, model, load_config, loading_info)


def _mover(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    current, look = loads.current, _look_at_buffers

    @functools.wraps(original)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        load = current() if patch.active else None
        if load is None:
            return original(self, *args, **kwargs)
        look(load, self, was_moved=False)
        result = original(self, *args, **kwargs)
        look(load, self, was_moved=True)
        return result

    return move


@contained("transformers.buffers")
def _look_at_buffers(load: Load, model: Any, *, was_moved: bool) -> None:
    from ckpt_sentry.integrations.transformers import buffers as transformers_buffers

    (transformers_buffers.moved if was_moved else transformers_buffers.before)(load, model)


@contained("transformers.begin_adapter")
def _begin_adapter(_original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    from ckpt_sentry.integrations.transformers import adapter as transformers_adapter

    return transformers_adapter.begin(args[0], args[1:], kwargs)


@contained("transformers.after_adapter")
def _after_adapter(load: Load, info: Any) -> None:
    from ckpt_sentry.integrations.transformers import adapter as transformers_adapter

    look(load, functools.partial(transformers_adapter.judge, info))


@contained("transformers.begin_shards")
def _begin_shards(_original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    given = dict(zip(_PARAMETERS, args, strict=False), **kwargs)
    if loads.current() is not None or not {"model", "folder"} <= given.keys():
        return None
    series = shards.Series.of(given)

    def observe(load: Load) -> None:
        load.keep(series)
        load.on_filled = series.take
        load.facts = shards.located(load.facts, series)

    return loads.begin("transformers", _SHARDED, series.path, observe=observe)


@contained("transformers.after_shards")
def _after_shards(load: Load, _result: Any) -> None:
    look(load, shards.judge)


@contained("transformers.end_shards")
def _end_shards(load: Load, error: BaseException | None) -> None:
    end(load, error, functools.partial(shards.explain, load))


_SHARDS = judging(_begin_shards, _before, _after_shards, _end_shards)
_ADAPTER = judging(_begin_adapter, _before, _after_adapter, _end)
