"""
The difference between what a model asks for and what a checkpoint holds, both ways at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.dataclasses_ import dataclass


class Pair(NamedTuple):
    """
    One key that both sides have, and what each holds under it.
    """

    key: str
    model: Entry
    checkpoint: Entry


@dataclass(frozen=True, slots=True)
class Diff:
    """
    What differs, each in the order of the names.

    `mismatched` are tensors of different global shapes, `casts` tensors of one shape and two dtypes, `retyped` a tensor
    on one side and something else on the other. `matched` counts the keys whose values can enter (casts included).
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Pair, ...] = ()
    casts: tuple[Pair, ...] = ()
    retyped: tuple[Pair, ...] = ()
    matched: int = 0


def diff(model: Mapping[str, Entry], checkpoint: Mapping[str, Entry]) -> Diff:
    """
    Compare both sides. Swapping the arguments swaps missing with unexpected and the two sides of every pair.

    Good loads are the common case, so equal inventories are recognised first; entries that are interned make that a
    comparison of identities.
    """
    if model is checkpoint or model == checkpoint:
        return Diff(matched=len(model))
    missing: list[str] = []
    changed: list[Pair] = []
    theirs = checkpoint.get
    for key, mine in model.items():
        other = theirs(key)
        if other is mine:
            continue
        if other is None:
            missing.append(key)
        elif other != mine:
            changed.append(Pair(key, mine, other))
    common = len(model) - len(missing)
    unexpected = [key for key in checkpoint if key not in model] if len(checkpoint) > common else []
    changed.sort(key=_by_key)
    retyped = tuple(pair for pair in changed if _is_retyped(pair))
    mismatched = tuple(pair for pair in changed if _is_mismatched(pair))
    return Diff(
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        mismatched=mismatched,
        casts=tuple(pair for pair in changed if _is_cast(pair)),
        retyped=retyped,
        matched=common - len(retyped) - len(mismatched),
    )


def _by_key(pair: Pair) -> str:
    return pair.key


def _is_retyped(pair: Pair) -> bool:
    return (pair.model.shape is None) is not (pair.checkpoint.shape is None)


def _is_mismatched(pair: Pair) -> bool:
    mine, other = pair.model.shape, pair.checkpoint.shape
    return mine is not None and other is not None and mine != other


def _is_cast(pair: Pair) -> bool:
    mine, other = pair.model, pair.checkpoint
    return mine.shape is not None and mine.shape == other.shape and None not in (mine.dtype, other.dtype)
