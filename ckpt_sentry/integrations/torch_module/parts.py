"""
Loads that come in parts: shards that are loaded one after the other, and parameters that are passed one at a time.

Shards are told when the first one has left something out: what follows into the same module and brings in nothing but
what was still lacking belongs to it. Where the name of its file says how many there are ("model-00001-of-00004"),
nothing is said before all have come, or none can come any more.

One parameter alone says nothing about the rest; Lightning passes each in a call of its own with the same
`StateDictOptions`. Such calls are judged as the whole that they make, once nobody holds those options any more: then no
call can follow.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.model import inventories, model_state
from ckpt_sentry.patching.guard import contained

if TYPE_CHECKING:
    import torch

    from ckpt_sentry.core.report import Finding
    from ckpt_sentry.integrations.torch_module.call import Call
    from ckpt_sentry.integrations.torch_module.judge import Offer

MOST_SERIES: Final = 64
"""Series that are followed at a time."""
_NUMBERED: Final = re.compile(r"-\d{3,}-of-(\d{3,})\.\w+$")
"""How transformers and accelerate name a shard."""


class Subject(NamedTuple):
    """
    Which call a report is about. Holds nothing of the host's.
    """

    entry_point: str
    module_class: str
    model: str
    began: float
    aligned: Finding | None = None
    members: str | None = None
    """The ranks that know of it, where it is not all."""

    @classmethod
    def of(cls, call: Call) -> Subject:
        members = "0" if call.broadcasts else None
        return cls(call.entry.name, call.module_class, type(call.module).__name__, call.began, call.aligned, members)


class _Place(NamedTuple):
    """
    One tensor of a module: the number of the module that holds it, and its name there.
    """

    owner: int
    name: str


class _Wanted(NamedTuple):
    name: str
    entry: Entry
    seen_from: int
    """How many tensors the module holds in whose names this one is."""


@dataclass(slots=True)
class Singles:
    """
    Calls that each brought in one parameter, so far.
    """

    subject: Subject
    path: str | None
    wanted: dict[_Place, _Wanted] = field(default_factory=dict)
    came: set[_Place] = field(default_factory=set)
    unexpected: dict[str, Entry] = field(default_factory=dict)
    modules: int = 0
    numbered: int = 0
    owners: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = field(default_factory=dict)
    """By identity, which another module may have later: a reference that keeps nothing alive, and a number."""

    def number(self, module: torch.nn.Module) -> int:
        """
        The number of a module, the same for the same one. It is not asked for its hash: that is the host's.
        """
        known = self.owners.get(id(module))
        if known is None or known[0]() is not module:
            self.numbered += 1
            known = self.owners[id(module)] = weakref.ref(module), self.numbered
        return known[1]

    def add(self, call: Call, offer: Offer) -> None:
        """
        Take in one more call.
        """
        parts = list(self._places(call.module))
        if any(place not in self.wanted for place, _, _ in parts):
            self.modules += 1
        names = {}
        for place, name, entry in parts:
            known = self.wanted.get(place)
            if known is None or known.seen_from < len(parts):
                label = name if self.modules == 1 else f"{type(call.module).__name__}-{self.modules}.{name}"
                self.wanted[place] = _Wanted(label, entry, len(parts))
            names[name] = place
        for key, entry in offer.entries.items():
            if key in names:
                self.came.add(names[key])
            else:
                self.unexpected[key] = entry

    def _places(self, module: torch.nn.Module) -> Iterator[tuple[_Place, str, Entry]]:
        wanted = model_state.inventory(module).entries
        for path, part in inventories.parts_of(module):
            number = self.number(part)
            for name, _ in inventories.tensors_in([("", part)]):
                full = model_state.bare(f"{path}.{name}" if path else name)
                if (entry := wanted.get(full)) is not None:
                    yield _Place(number, name), full, entry


_singles: dict[int, Singles] = {}
"""By the identity of the options that the calls share; taken out when those are gone."""


def postpone(call: Call, conclude: Callable[[Singles], object]) -> bool:
    """
    Whether a call is one of many that pass one parameter each: then `conclude` is called later, for all of them.
    """
    options, offer = call.kwargs.get("options"), call.offer
    if offer is None or len(offer.entries) != 1 or call.is_strict or options is None:
        return False
    found = _singles.get(id(options))
    if found is None:
        if len(_singles) >= MOST_SERIES:
            return False
        try:
            weakref.finalize(options, _conclude, id(options), conclude)
        except TypeError:
            return False
        found = _singles[id(options)] = Singles(Subject.of(call), offer.path)
    found.add(call, offer)
    return True


def abandon(call: Call) -> None:
    """
    Forget a series of which one call has failed: that was said.
    """
    _singles.pop(id(call.kwargs.get("options")), None)


@contained("module_parts.conclude")
def _conclude(options: int, conclude: Callable[[Singles], object]) -> None:
    if (found := _singles.pop(options, None)) is not None:
        conclude(found)


@dataclass(slots=True)
class Waiting:
    """
    Shards of which more are to come: what is to be said if they do not. Holds nothing of the host's.
    """

    subject: Subject
    wanted: Inventory
    lacking: frozenset[str]
    files: set[str]
    of: int

    @property
    def path(self) -> str:
        return min(self.files)

    @property
    def came(self) -> Inventory:
        return Inventory({key: entry for key, entry in self.wanted.entries.items() if key not in self.lacking})


def shards_of(path: str | None) -> int:
    """
    How many shards there are, by the name of one; 0 where it does not say.
    """
    found = None if path is None else _NUMBERED.search(path)
    return 0 if found is None else int(found[1])


class Shards:
    """
    What modules still lack into which parts are loaded one after the other.
    """

    def __init__(self) -> None:
        self._lacking: dict[int, tuple[weakref.ref[torch.nn.Module], frozenset[str]]] = {}
        self._waiting: dict[int, tuple[weakref.finalize[..., torch.nn.Module], Waiting]] = {}

    def lacking_after(self, module: torch.nn.Module, came: Collection[str], missing: Collection[str]) -> frozenset[str]:
        """
        What the module lacks after a part; all that this part lacks, where it does not go on with the ones before.
        """
        place = id(module)
        known = self._lacking.pop(place, None)
        lacking = frozenset(missing)
        # Counters that are lacking are added by torch, and in no list.
        new = [key for key in came if not model_state.is_counter(key)]
        if known is not None and known[0]() is module and known[1].issuperset(new) and came:
            lacking = known[1].difference(new)
        if lacking or known is not None:
            if len(self._lacking) >= MOST_SERIES:
                self._lacking.pop(next(iter(self._lacking)), None)
            self._lacking[place] = weakref.ref(module), lacking
        return lacking

    def wait(self, module: torch.nn.Module, waiting: Waiting, conclude: Callable[[Waiting], object]) -> bool:
        """
        Keep what is to be said of a module until it is taken back; said when the module, or the process, ends.
        """
        if len(self._waiting) >= MOST_SERIES:
            return False
        final = weakref.finalize(module, self._conclude, id(module), conclude)
        self._waiting[id(module)] = final, waiting
        return True

    def waiting_for(self, module: torch.nn.Module) -> Waiting | None:
        """
        What is to be said of a module if nothing more comes.
        """
        known = self._waiting.get(id(module)) if self._waiting else None
        return None if known is None else known[1]

    def take_back(self, module: torch.nn.Module) -> Waiting | None:
        """
        The same, and it is not kept any more.
        """
        known = self._waiting.pop(id(module), None) if self._waiting else None
        if known is None:
            return None
        known[0].detach()
        return known[1]

    @contained("module_parts.conclude_shards")
    def _conclude(self, place: int, conclude: Callable[[Waiting], object]) -> None:
        if (known := self._waiting.pop(place, None)) is not None:
            conclude(known[1])

    def forget(self) -> None:
        self._lacking.clear()
        for final, _ in self._waiting.values():
            final.detach()
        self._waiting.clear()
