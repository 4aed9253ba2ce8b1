"""
Reads a pickle as data: nothing is imported, nothing is called but the stand-ins that the reader allows.

This is an interpreter of its own for the opcodes that `torch.save` (protocol 2) and `pickle.dump` (protocols 4 and 5)
write (opcodes: `pickletools` of CPython). The interpreter of the standard library would do for honest files, but a
hostile one can make it fill tens of gigabytes with one memo index, or hash a nested tuple for years, before
`find_class` is ever asked. Here every length is checked against the bytes that are there, the memo grows by one
entry for each opcode at most, only flat keys are ever hashed, and what is copied or walked through once more is
counted against the bytes of the pickle (`Machine.charge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ckpt_sentry.formats.torch_save.machine import Allowed, CostlyPickle, Machine, Opaque, UnreadablePickle, flat
from ckpt_sentry.formats.torch_save.opcodes import STEPS
from ckpt_sentry.patching.guard import let_through

__all__ = ["Allowed", "CostlyPickle", "Loaded", "Opaque", "UnreadablePickle", "load", "mapping", "record"]

MAX_BYTES: Final = 256 * 2**20


class Loaded(NamedTuple):
    """
    What a pickle held: the value, the globals that were not allowed (sorted), and the index after its last byte.

    `charge` goes on counting for whoever walks through the value: see `Machine.charge`.
    """

    value: object
    unknown: tuple[str, ...]
    end: int
    charge: Callable[[int], None]


def record(module: str, name: str) -> Callable[..., Opaque]:
    """
    A stand-in that keeps an allowed class as an `Opaque`: its fields are data, and it is not among the unknown.
    """

    def build(*args: object) -> Opaque:
        return Opaque(module, name, args)

    return build


def mapping(pairs: object = ()) -> dict[object, object]:
    """
    A stand-in for `dict`, `OrderedDict` and their like that hashes flat keys only.
    """
    made: dict[object, object] = {}
    items = pairs.items() if isinstance(pairs, dict) else pairs
    if not isinstance(items, Iterable):
        raise TypeError("a mapping of something that has no items")
    for key, value in items:
        made[flat(key)] = value
    return made


def load(
    data: bytes,
    allowed: Allowed,
    *,
    persistent: Callable[[object], object] | None = None,
    start: int = 0,
    max_bytes: int = MAX_BYTES,
) -> Loaded:
    """
    Read the pickle that begins at `start`; `persistent` turns a persistent id (`torch.save`'s storages) into a value.

    :raises UnreadablePickle: whatever is wrong with the bytes; no other exception leaves this function.
    """
    if len(data) - start > max_bytes:
        raise CostlyPickle(f"is larger than {max_bytes} bytes")
    if len(data) == start:
        raise UnreadablePickle("is empty")
    machine = Machine(data, allowed, persistent, start)
    try:
        value = machine.run(STEPS)
    except UnreadablePickle:
        raise
    except MemoryError:
        raise CostlyPickle("needs more memory than there is", machine.at) from None
    except Exception as error:
        let_through(error)
        reason = "ends before its end" if machine.at >= len(data) else f"is corrupt at byte {machine.at}"
        raise UnreadablePickle(reason, min(machine.at, len(data))) from error
    return Loaded(value, tuple(sorted(machine.unknown)), machine.at, machine.charge)
