"""
transformers: `load_sharded_checkpoint`, by which Trainer resumes from shards.

It loads each shard by `load_state_dict(strict=False)`, and compares with the index alone (transformers 5.24.0,
trainer_utils.py:1057; 4: modeling_utils.py). What each of these calls leaves out is the next one's: here they are one
load, judged by what all of them have left out. With `strict=True` it raises by the index before it reads a shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import end, look

if TYPE_CHECKING:
    from ckpt_sentry.integrations.transformers import shards_judge
    from ckpt_sentry.session.loads import Load
else:
    shards_judge = later("ckpt_sentry.integrations.transformers.shards_judge")

TARGET: Final = "transformers"
NAME: Final = "load_sharded_checkpoint"
_PARAMETERS: Final = ("model", "folder", "strict", "prefer_safe")


def instrument(module: ModuleType) -> None:
    """
    Patch the module that defines it: `transformers.trainer_utils`, or `transformers.modeling_utils` before 5.
    """
    if NAME in vars(module):
        ledger.patch(module, NAME, judging(_begin, _before, _after, _end), target=TARGET)


@contained("transformers_shards.begin")
def _begin(_original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    given = dict(zip(_PARAMETERS, args, strict=False), **kwargs)
    if loads.current() is not None or not {"model", "folder"} <= given.keys():
        return None
    series = shards_judge.Series.of(given)
    return loads.begin(
        "transformers",
        NAME,
        series.path,
        observe=lambda load: _observe(load, series),
    )


def _observe(load: Load, series: shards_judge.Series) -> None:
    load.keep(series)
    load.on_filled = series.take


@contained("transformers_shards.before")
def _before(load: Load) -> None:
    load.facts = shards_judge.located(load.facts, _series(load))


@contained("transformers_shards.after")
def _after(load: Load, _result: Any) -> None:
    look(load, lambda load: shards_judge.judge(load, _series(load)))


@contained("transformers_shards.end")
def _end(load: Load, error: BaseException | None) -> None:
    end(load, error, functools.partial(shards_judge.explain, load, _series(load)))


def _series(load: Load) -> shards_judge.Series:
    series = load.state(shards_judge.Series)
    if series is None:
        raise LookupError("the load has ended")
    return series
