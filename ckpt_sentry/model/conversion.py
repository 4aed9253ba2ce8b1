"""
Under which names `from_pretrained` looks for a model's keys in a checkpoint.

A checkpoint's key is renamed by what transformers knows of the architecture and by the caller's `key_mapping`; then
`base_model_prefix` is taken from it or put before it, where that gives a key of the model (transformers 5.24.0,
`core_model_loading.rename_source_key`). So two keys of a checkpoint may come to be one of the model: `norm.weight` of
the head and `base.norm.weight`; the first in the order of their names is taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

_PURE: Final = "WeightTransform.rename_source_key"
"""The rename that writes to nothing but the mark that it was used; a class with another may remember more."""


class Source(NamedTuple):
    """
    The keys of a checkpoint from which a key of the model may be filled: the one that is meant for it, and others that
    transformers gives the same name.
    """

    meant: str
    others: tuple[str, ...] = ()


def sources(
    model: Any, saved: Iterable[str], wanted: Collection[str], key_mapping: Iterable[str] = ()
) -> Mapping[str, Source]:
    """
    Map keys in `wanted` to the keys of the checkpoint that may have filled them as they are, by a name alone.

    Keys whose tensors are converted on the way are left out, and so is all where a rename is not understood: nothing
    can be said about their values. `key_mapping` are the caller's patterns.
    """
    used = getattr(model, "_weight_conversions", None)
    if used is None:
        used = [*map(_Unknown, (*key_mapping, *(getattr(model, "_checkpoint_conversion_mapping", None) or ())))]
    if not all(map(_is_understood, used)):
        return {}
    renamed = {key: name for key in saved if (name := _renamed(key, used)) is not None}
    prefix = f"{model.base_model_prefix}."
    offered: dict[str, list[str]] = {}
    for key, name in renamed.items():
        # A rename that leads nowhere is not done where the key is one of the model's as it is.
        for target in _with_prefix(name, prefix, wanted) or _with_prefix(key, prefix, wanted):
            offered.setdefault(target, []).append(key)
    strips, adds = _direction(prefix, renamed.values(), wanted)
    found = {}
    for target, keys in offered.items():
        exact = f"{prefix}{target}" if strips else target.removeprefix(prefix) if adds else target
        meant = next((key for key in keys if renamed[key] == exact), keys[0] if len(keys) == 1 else None)
        if meant is not None:
            found[target] = Source(meant, tuple(key for key in keys if key != meant))
    return found


def targets(model: Any, transforms: Iterable[Any], saved: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
    """
    Yield keys of a checkpoint with those that transformers makes of them by fresh `transforms`, the first of several.
    """
    prefix, ordered = f"{model.base_model_prefix}.", sorted(transforms, key=_converts)
    for key in saved:
        name, is_done = key, False
        for transform in ordered:
            if not (is_done and _converts(transform)):
                name, pattern = transform.rename_source_key(name)
                is_done = is_done or (pattern is not None and _converts(transform))
        if name != key:
            yield key, {name, name.removeprefix(prefix), f"{prefix}{name}"}


def _direction(prefix: str, saved: Iterable[str], wanted: Iterable[str]) -> tuple[bool, bool]:
    """
    Whether a base model is loaded from a checkpoint with a head, and the other way round.
    """
    in_saved = any(name.startswith(prefix) for name in saved)
    in_wanted = any(name.startswith(prefix) for name in wanted)
    return in_saved and not in_wanted, in_wanted and not in_saved


class _Unknown:
    """
    A pattern of which nothing is known but that the keys it matches go elsewhere (transformers before 5).
    """

    operations = ()

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def rename_source_key(self, key: str) -> tuple[str, str | None]:
        return key, self._pattern.pattern if self._pattern.search(key) else None


def _is_understood(transform: Any) -> bool:
    rename = type(transform).rename_source_key
    return isinstance(transform, _Unknown) or getattr(rename, "__qualname__", "") == _PURE


def _renamed(key: str, used: Sequence[Any]) -> str | None:
    """
    What a key is called after all renames; None where its tensor is converted.
    """
    name = key
    for transform in sorted(used, key=_converts):  # all renames come before the first conversion
        renamed, pattern = transform.rename_source_key(name)
        if pattern is not None and _converts(transform):
            return None
        name = renamed
    return name


def _converts(transform: Any) -> bool:
    return hasattr(transform, "operations")


def _with_prefix(name: str, prefix: str, wanted: Collection[str]) -> tuple[str, ...]:
    """
    The keys of the model that a name may stand for: itself, or with the prefix put on or taken off.
    """
    stripped = name.removeprefix(prefix)
    return tuple({one: None for one in (stripped, f"{prefix}{name}", name) if one in wanted})
