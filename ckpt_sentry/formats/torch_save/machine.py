"""
The stack machine that reads one pickle: its values, its limits and its main loop. The opcodes are in `pickle_opcodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

Allowed = Mapping[tuple[str, str], object]
"""(module, name) to what stands in for it: a callable that builds plain data, or a value such as a dtype's name."""

MAX_CONTAINERS: Final = 16_000_000
MAX_ARGUMENTS: Final = 256
"""Arguments of one call; what is called gets a copy of them."""

_FREE: Final = 2**16
"""Containers that any pickle may hold and elements that it may copy, whatever its size."""
_BYTES_OF_A_CONTAINER: Final = 2
"""What a container takes in a pickle at least: its opcode, and one that puts it into the memo."""

_SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})
_SIZED: Final = (list, tuple, dict)
_MAX_KEY_PARTS: Final = 64
_MAX_TUPLE_KEY: Final = 4_096
_MAX_NAME: Final = 4_096
_LONG: Final = 256
_MAX_INT_KEY: Final = 2**60
"""Below this, two integers never share a hash, so that no file can make a dict quadratic."""

_MEMOIZE, _STOP = 0x94, 0x2E


class UnreadablePickle(ValueError):  # noqa: N818 the pickle is unreadable, which is no fault of ours
    """
    The bytes are no pickle that can be read here: truncated, corrupt, hostile or of an unknown kind.

    `position` is the byte at which reading stopped.
    """

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position

    def __reduce__(self) -> tuple[type[UnreadablePickle], tuple[str, int]]:
        return type(self), (self.reason, self.position)


class CostlyPickle(UnreadablePickle):
    """
    The bytes may be a pickle, but reading it would cost more than a checkpoint of its size explains: it is left alone.
    """


class Opaque:
    """
    A global that was not allowed, or an object that would have been built with one: named, never run.

    `args` is None for the global itself; for an object, what its constructor would have got. `state`, `entries` and
    `elements` hold what the pickle would have set on it afterwards. Equality and hash go by identity, so that nothing
    nested in it is ever hashed.
    """

    __slots__ = ("args", "elements", "entries", "module", "name", "state")

    def __init__(self, module: str, name: str, args: tuple[object, ...] | None = None) -> None:
        self.module = module
        self.name = name
        self.args = args
        self.state: object = None
        self.entries: dict[object, object] | None = None
        self.elements: list[object] | None = None

    @property
    def qualified(self) -> str:
        return f"{self.module}.{self.name}"

    def field(self, name: str, default: object = None) -> object:
        """
        One attribute of the object, as its pickled `__dict__` has it.
        """
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"Opaque({self.qualified!r})"


def flat(key: object) -> object:
    """
    The key itself, if hashing it is cheap whatever the file intends; a tuple as text, whose hash nobody can foresee.

    :raises UnreadablePickle: it is nested, long or of another kind.
    """
    kind = type(key)
    if kind is str or kind is Opaque:
        return key
    if kind is tuple:
        if len(key) <= _MAX_KEY_PARTS and sum(map(_weight, key)) <= _MAX_TUPLE_KEY:  # type: ignore[arg-type,call-overload]
            return str(key)
    elif kind is int:
        if -_MAX_INT_KEY < key < _MAX_INT_KEY:  # type: ignore[operator]
            return key
    elif kind in _SCALARS and _weight(key) <= _MAX_TUPLE_KEY:
        return key
    raise CostlyPickle(f"has a key of an unexpected kind ({kind.__name__})")


def _weight(part: object) -> int:
    """
    How long a part of a key is, in characters or bytes; beyond all measure where its hash may cost anything.
    """
    kind = type(part)
    if kind is str or kind is bytes:
        return len(part)  # type: ignore[arg-type]
    if kind is int:
        return 1 if -_MAX_INT_KEY < part < _MAX_INT_KEY else _MAX_TUPLE_KEY + 1  # type: ignore[operator]
    return 1 if kind in _SCALARS else _MAX_TUPLE_KEY + 1


class Machine:
    """
    The stack machine of one pickle: a stack, stacks that marks have set aside, and the memo.

    An opcode may refer by two bytes to what has a million elements: whatever copies or walks such a thing asks
    `charge` first, so that all work and memory is bounded by the bytes of the pickle.
    """

    __slots__ = (
        "allowed",
        "at",
        "copies_left",
        "data",
        "made",
        "memo",
        "most",
        "persistent",
        "set_aside",
        "stack",
        "texts",
        "unknown",
    )

    def __init__(
        self, data: bytes, allowed: Allowed, persistent: Callable[[object], object] | None, start: int
    ) -> None:
        self.data = data
        self.at = start
        self.allowed = allowed
        self.persistent = persistent
        self.stack: list[object] = []
        self.set_aside: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.texts: dict[str, str] = {}
        self.unknown: set[str] = set()
        self.made = 0
        size = len(data) - start
        self.most = min(MAX_CONTAINERS, _FREE + size // _BYTES_OF_A_CONTAINER)
        self.copies_left = _FREE + size

    def run(self, steps: Sequence[Callable[[Machine], None] | None]) -> object:
        """
        Run to the end of the pickle, with one function for each opcode, and return the value that it leaves.
        """
        data, memo = self.data, self.memo
        while True:
            code = data[self.at]
            self.at += 1
            if code == _MEMOIZE:
                memo[len(memo)] = self.stack[-1]
            elif code == _STOP:
                return self.stack.pop()
            else:
                step = steps[code]
                if step is None:
                    raise UnreadablePickle(f"is no pickle: unexpected byte 0x{code:02x} at {self.at - 1}", self.at - 1)
                step(self)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            at, self.at = self.at, len(self.data)
            raise UnreadablePickle("ends before its end", at)
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            at, self.at = self.at, len(self.data)
            raise UnreadablePickle("ends before its end", at)
        text = self.data[self.at : end].decode("utf-8", "surrogateescape")
        self.at = end + 1
        return text

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def since_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.set_aside.pop()
        return items

    def count_container(self) -> None:
        self.made += 1
        if self.made > self.most:
            raise CostlyPickle(f"holds more than {self.most:,} objects", self.at)

    def charge(self, elements: int) -> None:
        """
        Account for so many elements that are copied or walked through once more.

        :raises UnreadablePickle: they are more than the size of the pickle explains.
        """
        self.copies_left -= elements
        if self.copies_left < 0:
            raise CostlyPickle("refers to the same data again and again, as no checkpoint does", self.at)

    def text(self, text: str) -> str:
        """
        One object for equal long texts: where both are the same object, a dict need not compare them.
        """
        return text if len(text) <= _LONG else self.texts.setdefault(text, text)

    def find(self, module: object, name: object) -> object:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnreadablePickle("names a global by something that is no text", self.at)
        if len(module) + len(name) > _MAX_NAME:
            raise CostlyPickle("names a global by a text that is no name", self.at)
        found = self.allowed.get((module, name), self)
        if found is self:
            self.unknown.add(f"{module}.{name}")
            return Opaque(module, name)
        return found

    def call(self, target: object, args: object) -> object:
        self.count_container()
        if not isinstance(args, tuple):
            raise UnreadablePickle("calls with arguments that are no tuple", self.at)
        if type(target) is Opaque:
            return Opaque(target.module, target.name, args)
        if not callable(target):
            raise UnreadablePickle("calls a value", self.at)
        if len(args) > MAX_ARGUMENTS:
            raise CostlyPickle(f"calls with {len(args):,} arguments", self.at)
        self.charge(sum(len(argument) for argument in args if isinstance(argument, _SIZED)))
        return target(*args)
