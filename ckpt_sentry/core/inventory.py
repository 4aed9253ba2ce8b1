"""
What a model or a checkpoint holds: names, shapes and dtypes, and which names share one storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple

from ckpt_sentry.core.report import Shape
from ckpt_sentry.dataclasses_ import dataclass, field

# Bytes for one element, by the dtype's name without "torch.". Types that pack several elements into a byte round up.
_ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "qint8": 1,
        "quint8": 1,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
        "int16": 2,
        "uint16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "uint32": 4,
        "qint32": 4,
        "float32": 4,
        "complex32": 4,
        "int64": 8,
        "uint64": 8,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)


class Entry(NamedTuple):
    """
    One value: its global shape (None where it is no tensor) and its dtype by name, such as "bfloat16".
    """

    shape: Shape | None
    dtype: str | None

    @property
    def elements(self) -> int:
        """
        Elements of the global tensor; 1 for a scalar, 0 for what is no tensor.
        """
        return 0 if self.shape is None else prod(self.shape)

    @property
    def nbytes(self) -> int:
        """
        Bytes of the global tensor; 0 where the dtype is unknown.
        """
        return self.elements * _ITEM_BYTES.get((self.dtype or "").removeprefix("torch."), 0)


@dataclass(frozen=True, slots=True)
class Inventory:
    """
    Names and what they hold. `ties` maps a name to the name that it shares its storage with, as an `lm_head.weight`
    to its `embed.weight`: such a group is one storage, counted once.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)

    def storage(self, name: str) -> str:
        """
        Name the storage that `name` lies in: itself, or the end of its chain of ties.
        """
        seen = [name]
        while (owner := self.ties.get(name, name)) != name:
            if owner in seen:  # names that are tied in a circle: any of them does, but always the same
                return min(seen[seen.index(owner) :])
            seen.append(owner)
            name = owner
        return name

    def storages(self) -> Mapping[str, Entry]:
        """
        Give each storage once: its name and its largest entry.
        """
        if not self.ties:
            return self.entries
        unique: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            owner = self.storage(name)
            known = unique.get(owner)
            if known is None or known.elements < entry.elements:
                unique[owner] = entry
        return unique

    def once(self, names: Iterable[str]) -> list[str]:
        """
        Of some names those that count: the first one of each storage, in the order given.
        """
        if not self.ties:
            return list(names)
        first: dict[str, str] = {}
        for name in names:
            first.setdefault(self.storage(name), name)
        return list(first.values())

    @property
    def keys(self) -> int:
        """
        Storages, so tied names once.
        """
        return len(self.storages())

    @property
    def elements(self) -> int:
        """
        Elements in all storages, tied tensors once.
        """
        return sum(entry.elements for entry in self.storages().values())

    @property
    def nbytes(self) -> int:
        """
        Bytes in all storages, tied tensors once.
        """
        return sum(entry.nbytes for entry in self.storages().values())


def outer_name(saved: Iterable[str], wanted: Collection[str]) -> str:
    """
    The outer name, with its dot, that most keys of a model have in a saved state; empty where some are there as they
    are, or none under any name.
    """
    saved = tuple(saved)
    if any(key in wanted for key in saved):
        return ""
    counts = Counter(outer for outer, _, inner in (key.partition(".") for key in saved) if inner in wanted)
    return f"{min(counts, key=lambda one: (-counts[one], one))}." if counts else ""


def under(outer: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """
    The entries whose keys begin with `outer`, without it.
    """
    return {key.removeprefix(outer): entry for key, entry in entries.items() if key.startswith(outer)}
