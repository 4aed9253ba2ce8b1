"""
A rule that turns checkpoint keys into model keys: what it does, in code and in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from ckpt_sentry.core.escape import shown
from ckpt_sentry.dataclasses_ import dataclass

WRAPPERS: Final = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
"""Components that DistributedDataParallel, torch.compile, FSDP, activation checkpointing and peft put into paths."""

_SHORT_NAMES: Final = (("gamma", "weight"), ("beta", "bias"), ("w", "weight"), ("b", "bias"))
KNOWN: Final = frozenset({*_SHORT_NAMES, *((new, old) for old, new in _SHORT_NAMES)})
"""Pairs that need no other evidence: the names of TensorFlow, and the short ones."""

Kind = Literal["prefix", "wrapper", "component", "combined"]


class Swap(NamedTuple):
    """
    A component that has another name: `last` where only the last component of a key is meant.
    """

    old: str
    new: str
    last: bool


class Form(NamedTuple):
    """
    One of two ways in which torch itself names the same tensors: how a key is written anew, and that in words.

    `endings` are patterns of the end of a key, with what takes their place; `sign` is the end of some key in the other
    form.
    """

    words: str
    endings: tuple[tuple[str, str], ...]
    sign: str

    def rewrite(self, key: str) -> str:
        """
        Give the key in the other form, or as it is where it is in none.
        """
        for pattern, text in self.endings:
            changed, count = re.subn(pattern, text, key)
            if count:
                return changed
        return key


_NAMED: Final = r"(^|\.)parametrizations\.([^.]+)\."
_START: Final = r"(^|\.)([^.]+)"
FORMS: Final = (
    Form(
        '".parametrizations.*.original0" becomes ".*_g", ".parametrizations.*.original1" becomes ".*_v" '
        "(the two forms of torch's weight_norm)",
        ((_NAMED + r"original0$", r"\1\2_g"), (_NAMED + r"original1$", r"\1\2_v")),
        r"[^.]_g$",
    ),
    Form(
        '".*_g" becomes ".parametrizations.*.original0", ".*_v" becomes ".parametrizations.*.original1" '
        "(the two forms of torch's weight_norm)",
        ((_START + r"_g$", r"\1parametrizations.\2.original0"), (_START + r"_v$", r"\1parametrizations.\2.original1")),
        r"(^|\.)parametrizations\.[^.]+\.original0$",
    ),
    Form(
        '".parametrizations.*.original" becomes ".*_orig", ".parametrizations.*.0._u" becomes ".*_u" and so on '
        "(the two forms of torch's spectral_norm)",
        ((_NAMED + r"original$", r"\1\2_orig"), (_NAMED + r"0\._([uv])$", r"\1\2_\3")),
        r"[^.]_orig$",
    ),
    Form(
        '".*_orig" becomes ".parametrizations.*.original", ".*_u" becomes ".parametrizations.*.0._u" and so on '
        "(the two forms of torch's spectral_norm)",
        (
            (_START + r"_orig$", r"\1parametrizations.\2.original"),
            (_START + r"_([uv])$", r"\1parametrizations.\2.0._\3"),
        ),
        r"(^|\.)parametrizations\.[^.]+\.original$",
    ),
)
"""torch.nn.utils.weight_norm and spectral_norm, and those of torch.nn.utils.parametrizations."""


@dataclass(frozen=True, slots=True)
class Rule:
    """
    Steps from a checkpoint key to a model key, in this order.

    Components `dropped` are removed from checkpoint keys and `inserted` where the model has them; keys in one of the
    `forms` are written in the other; then the prefix `remove` becomes the prefix `add` (each ends with a dot, or is
    empty); then components are swapped.
    """

    dropped: tuple[str, ...] = ()
    inserted: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    remove: str = ""
    add: str = ""
    swaps: tuple[Swap, ...] = ()

    @property
    def steps(self) -> int:
        """
        The number of things that a person has to be told.
        """
        wrappers, prefixes = len(self.dropped) + len(self.inserted), bool(self.remove) + bool(self.add)
        return wrappers + len(self.forms) + prefixes + len(self.swaps)

    @property
    def guesses(self) -> tuple[tuple[str, str], ...]:
        """
        The names, old and new, of which the new one is not known to stand for the old one.
        """
        swaps = tuple((old, new) for old, new, _ in self.swaps if (old, new) not in KNOWN)
        return ((self.remove, self.add), *swaps) if self.remove and self.add else swaps

    @property
    def kind(self) -> Kind:
        kinds: list[Kind] = []
        if self.dropped or self.inserted:
            kinds.append("wrapper")
        if self.remove or self.add:
            kinds.append("prefix")
        if self.swaps or self.forms:
            kinds.append("component")
        return kinds[0] if len(kinds) == 1 else "combined"

    def words(self) -> str:
        """
        Say the rule. Each literal stands with the dots that set it off in the key.
        """
        parts = [f'strip "{shown(name)}." wherever it stands' for name in self.dropped]
        parts += [f'insert "{shown(name)}." where the model has it' for name in self.inserted]
        parts += [form.words for form in self.forms]
        if self.remove and self.add:
            parts.append(f'the prefix "{shown(self.remove)}" becomes "{shown(self.add)}"')
        elif self.remove:
            parts.append(f'strip the prefix "{shown(self.remove)}"')
        elif self.add:
            parts.append(f'add the prefix "{shown(self.add)}"')
        for old, new, last in self.swaps:
            before, after = (f".{old}", f".{new}") if last else (f"{old}.", f"{new}.")
            parts.append(f'"{shown(before)}" becomes "{shown(after)}"')
        return ", ".join(parts)

    def targets(self, model_keys: Iterable[str]) -> dict[str, str | None]:
        """
        Map each model key without its inserted components to itself; to None where two come out the same.
        """
        if not self.inserted:
            return {key: key for key in model_keys}
        drop = without(self.inserted)
        found: dict[str, str | None] = {}
        for key in model_keys:
            bare = drop(key)
            found[bare] = None if bare in found else key
        return found

    def bared(self) -> Callable[[str], str]:
        """
        Give the function that takes the wrappers out of a checkpoint key and writes it in the other form.
        """
        drop, forms = without(self.dropped), self.forms
        if not forms:
            return drop

        def bare(key: str) -> str:
            key = drop(key)
            for form in forms:
                if (other := form.rewrite(key)) != key:
                    return other
            return key

        return bare

    def apply(self, keys: Iterable[str], targets: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
        """
        Yield (checkpoint key, model key) for each key that the rule leads to a target.

        A key without the prefix is tried as it is, and one with it also without the change of prefix: a prefix may
        stand before a part of the keys only.
        """
        bared, swap = self.bared(), _swapper(self.swaps)
        for key in keys:
            bare = bared(key)
            changed = self.add + bare[len(self.remove) :] if bare.startswith(self.remove) else bare
            target = targets.get(swap(changed))
            if target is None and self.swaps and changed is not bare:
                target = targets.get(swap(bare))
            if target is not None:
                yield key, target


def _same(key: str) -> str:
    return key


def without(names: tuple[str, ...]) -> Callable[[str], str]:
    """
    Give the function that takes components out of a key, wherever they stand before the last one.
    """
    if not names:
        return _same
    inner = tuple(f".{name}." for name in names)

    def drop(key: str) -> str:
        text = "." + key
        for part in inner:
            while part in text:  # two that stand side by side share a dot
                text = text.replace(part, ".")
        return text[1:]

    return drop


def _swapper(swaps: tuple[Swap, ...]) -> Callable[[str], str]:
    if not swaps:
        return _same
    anywhere = {old: new for old, new, last in swaps if not last}
    at_end = {old: new for old, new, last in swaps if last}

    def swap(key: str) -> str:
        parts = key.split(".")
        if anywhere:
            parts = [anywhere.get(part, part) for part in parts]
        parts[-1] = at_end.get(parts[-1], parts[-1])
        return ".".join(parts)

    return swap
