"""
What a gap in a checkpoint leaves whole: the model, where only the state of the training is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.fold import folds
from ckpt_sentry.core.optimizer import state_of
from ckpt_sentry.core.report import Finding

_TRAINING: Final = re.compile(
    r"(?:\w+_)?(?:optim|optimizers?|optimizer_states?|(?:lr_?)?schedulers?|(?:data_?)?loaders?(?:_state)?|samplers?"
    r"|rngs?|rng_states?|random_states?|(?:grad_?)?scalers?|train_state|trainer(?:_state)?)",
    re.IGNORECASE,
)
"""The names under which programs keep what is no model: those of torchtitan, accelerate, Megatron, NeMo."""
_SHOWN: Final = 3


def findings(model: Collection[str], checkpoint: Collection[str], missing: Collection[str]) -> Iterator[Finding]:
    """
    Say that the model is whole, or that nothing but the state of parameters is missing that had none.

    Args:
        model: the keys that are asked for.
        checkpoint: the keys that the checkpoint has.
        missing: those of the model's that the checkpoint lacks.
    """
    if not missing:
        return
    yield from _whole(model, missing)
    yield from _unstepped(checkpoint, missing)


def _whole(model: Collection[str], missing: Collection[str]) -> Iterator[Finding]:
    parts = [key.split(".") for key in model]
    # What all have in common the first and the last in order have in common.
    place = next((at for at, (one, other) in enumerate(zip(min(parts), max(parts), strict=False)) if one != other), 0)
    tops = [part[place] for part in parts]
    gone = {key.split(".")[place] for key in missing}
    kept = sorted({top for top in tops if top not in gone and not _TRAINING.fullmatch(top)})
    if not kept or not all(map(_TRAINING.fullmatch, gone)):
        return
    count = sum(top in kept for top in tops)
    text = (
        f"All {count:,} keys under {_named(kept)} are there: what is missing lies under {_named(sorted(gone))} alone."
    )
    yield Finding("model_whole", "info", text)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f'"{shown(name)}"' for name in names[:_SHOWN]) + more


def _unstepped(checkpoint: Iterable[str], missing: Iterable[str]) -> Iterator[Finding]:
    """
    An optimizer has no state for a parameter that never had a gradient, and saves none.
    """
    lost = [state_of(key) for key in missing]
    if not all(lost):
        return
    owners = {owner for owner in lost if owner is not None}
    held = {owner for key in checkpoint if (owner := state_of(key)) is not None}
    if owners & held or not {root for root, _ in owners} <= {root for root, _ in held}:
        return
    names = tuple(folds({of for _, of in owners}))
    which = ", ".join(fold.text for fold in names[:_SHOWN])
    more = sum(fold.count for fold in names[_SHOWN:])
    which += f" and {more:,} more" if more else ""
    some = "1 parameter" if len(owners) == 1 else f"{len(owners):,} parameters"
    text = f"The optimizer had no state for {some} when it was saved, as before a first gradient: {which}."
    yield Finding("optimizer_state_none", "info", text)
