"""
Reads a pickle as data: nothing is imported, nothing is called but the stand-ins that the reader allows.

This is an interpreter of its own for the opcodes that `torch.save` (protocol 2) and `pickle.dump` (protocols 4 and 5)
write (opcodes: `pickletools` of CPython). The interpreter of the standard library would do for honest files, but a
hostile one can make it fill tens of gigabytes with one memo index, or hash a nested tuple for years, before
`find_class` is ever asked. Here every length is checked against the bytes that are there, the memo grows by one
entry for each opcode at most, and only flat keys are ever hashed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

Allowed = Mapping[tuple[str, str], object]
"""(module, name) to what stands in for it: a callable that builds plain data, or a value such as a dtype's name."""

MAX_BYTES: Final = 256 * 2**20
MAX_CONTAINERS: Final = 16_000_000

_SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})
_MAX_KEY_PARTS: Final = 64
_MAX_INT_KEY: Final = 2**60
"""Below this, two integers never share a hash, so that no file can make a dict quadratic."""

_PROTO, _STOP, _HIGHEST_PROTOCOL = 0x80, 0x2E, 5


class UnreadablePickle(ValueError):
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


class Loaded(NamedTuple):
    """
    What a pickle held: the value, the globals that were not allowed (sorted), and the index after its last byte.
    """

    value: object
    unknown: tuple[str, ...]
    end: int


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
        made[_flat(key)] = value
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
        raise UnreadablePickle(f"is larger than {max_bytes} bytes")
    if len(data) == start:
        raise UnreadablePickle("is empty")
    machine = _Machine(data, allowed, persistent, start)
    try:
        return machine.run()
    except UnreadablePickle:
        raise
    except MemoryError:
        raise UnreadablePickle("needs more memory than there is", machine.at) from None
    except Exception as error:
        reason = "ends before its end" if machine.at >= len(data) else f"is corrupt at byte {machine.at}"
        raise UnreadablePickle(reason, min(machine.at, len(data))) from error


def _flat(key: object) -> object:
    kind = type(key)
    if kind is str or kind is Opaque:
        return key
    if kind is tuple:
        if len(key) <= _MAX_KEY_PARTS and all(type(part) in _SCALARS for part in key):  # type: ignore[arg-type,attr-defined]
            return key
    elif kind is int:
        if -_MAX_INT_KEY < key < _MAX_INT_KEY:  # type: ignore[operator]
            return key
    elif kind in _SCALARS:
        return key
    raise UnreadablePickle(f"has a key of an unexpected kind ({kind.__name__})")


class _Machine:
    """
    The stack machine of one pickle: a stack, stacks that marks have set aside, and the memo.
    """

    __slots__ = ("allowed", "at", "data", "made", "memo", "persistent", "set_aside", "stack", "unknown")

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
        self.unknown: set[str] = set()
        self.made = 0

    def run(self) -> Loaded:
        data, memo = self.data, self.memo
        while True:
            code = data[self.at]
            self.at += 1
            if code == _MEMOIZE:
                memo[len(memo)] = self.stack[-1]
            elif code == _STOP:
                return Loaded(self.stack.pop(), tuple(sorted(self.unknown)), self.at)
            else:
                step = _STEPS[code]
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
        if self.made > MAX_CONTAINERS:
            raise UnreadablePickle(f"holds more than {MAX_CONTAINERS} objects", self.at)

    def find(self, module: object, name: object) -> object:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnreadablePickle("names a global by something that is no text", self.at)
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
        return target(*args)


# One function for each opcode. A stack underflow is an IndexError, which `load` turns into UnreadablePickle.


def _proto(m: _Machine) -> None:
    version = m.number(1)
    if version > _HIGHEST_PROTOCOL:
        raise UnreadablePickle(f"is of the unknown pickle protocol {version}", m.at)


def _frame(m: _Machine) -> None:
    m.take(8)


def _mark(m: _Machine) -> None:
    m.count_container()
    m.set_aside.append(m.stack)
    m.stack = []


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.since_mark()


def _pop_mark(m: _Machine) -> None:
    m.since_mark()


def _dup(m: _Machine) -> None:
    m.stack.append(m.stack[-1])


def _constant(value: object) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(value)

    return step


def _unsigned(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(int.from_bytes(m.take(size), "little"))

    return step


def _binint1(m: _Machine) -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _binint(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


def _int(m: _Machine) -> None:
    text = m.line()
    m.stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _long(m: _Machine) -> None:
    m.stack.append(int(m.line().removesuffix("L")))


def _long_of(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(int.from_bytes(m.take(m.number(size)), "little", signed=True))

    return step


def _float(m: _Machine) -> None:
    m.stack.append(float(m.line()))


def _binfloat(m: _Machine) -> None:
    m.stack.append(struct.unpack(">d", m.take(8))[0])


def _text_of(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(m.take(m.number(size)).decode("utf-8", "surrogatepass"))

    return step


def _latin_of(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(m.take(m.number(size)).decode("latin-1"))

    return step


def _bytes_of(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(m.take(m.number(size)))

    return step


def _unicode(m: _Machine) -> None:
    m.stack.append(m.line())


def _empty(kind: type[list[object]] | type[dict[object, object]] | type[set[object]]) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.count_container()
        m.stack.append(kind())

    return step


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.count_container()
        stack = m.stack
        if len(stack) < count:
            raise UnreadablePickle(f"is corrupt at byte {m.at}", m.at)
        stack[-count:] = [tuple(stack[-count:])]

    return step


def _tuple(m: _Machine) -> None:
    items = m.since_mark()
    m.stack.append(tuple(items))


def _list(m: _Machine) -> None:
    items = m.since_mark()
    m.stack.append(items)


def _dict(m: _Machine) -> None:
    items = m.since_mark()
    m.stack.append({})
    _set_pairs(m, items)


def _frozenset(m: _Machine) -> None:
    items = m.since_mark()
    m.stack.append(frozenset(_flat(item) for item in items))


def _add_elements(m: _Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif type(target) is Opaque:
        target.elements = [] if target.elements is None else target.elements
        target.elements.extend(items)
    else:
        raise UnreadablePickle("appends to something that is no list", m.at)


def _append(m: _Machine) -> None:
    item = m.stack.pop()
    _add_elements(m, [item])


def _appends(m: _Machine) -> None:
    items = m.since_mark()
    _add_elements(m, items)


def _set_pairs(m: _Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if type(target) is Opaque:
        target.entries = {} if target.entries is None else target.entries
        target = target.entries
    if type(target) is not dict or len(items) % 2:
        raise UnreadablePickle("sets items of something that is no dict", m.at)
    for index in range(0, len(items), 2):
        key = items[index]
        target[key if type(key) is str else _flat(key)] = items[index + 1]


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_pairs(m, [key, value])


def _setitems(m: _Machine) -> None:
    items = m.since_mark()
    _set_pairs(m, items)


def _additems(m: _Machine) -> None:
    items = m.since_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise UnreadablePickle("adds to something that is no set", m.at)
    target.update(_flat(item) for item in items)


def _get_of(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(m.memo[m.number(size)])

    return step


def _binget(m: _Machine) -> None:
    m.stack.append(m.memo[m.data[m.at]])
    m.at += 1


def _get(m: _Machine) -> None:
    m.stack.append(m.memo[int(m.line())])


def _put_of(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.memo[m.number(size)] = m.stack[-1]

    return step


def _put(m: _Machine) -> None:
    m.memo[int(m.line())] = m.stack[-1]


def _global(m: _Machine) -> None:
    module = m.line()
    m.stack.append(m.find(module, m.line()))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.find(module, name))


def _reduce(m: _Machine) -> None:
    args, target = m.stack.pop(), m.stack.pop()
    m.stack.append(m.call(target, args))


def _newobj_ex(m: _Machine) -> None:
    m.stack.pop()  # keyword arguments: no stand-in takes any
    _reduce(m)


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Opaque:
        # (__dict__ or None, slots), as copyreg writes it for a class with __slots__.
        match state:
            case (None, dict() as slots):
                target.state = slots
            case (dict() as attributes, dict() as slots):
                target.state = attributes | slots
            case _:
                target.state = state


def _binpersid(m: _Machine) -> None:
    if m.persistent is None:
        raise UnreadablePickle("refers to data outside of itself", m.at)
    m.stack.append(m.persistent(m.stack.pop()))


_MEMOIZE: Final = 0x94
_STEPS: Final[list[Callable[[_Machine], None] | None]] = [None] * 256
for _code, _step in {
    _PROTO: _proto,
    0x95: _frame,
    ord("("): _mark,
    ord("0"): _pop,
    ord("1"): _pop_mark,
    ord("2"): _dup,
    ord("N"): _constant(None),
    0x88: _constant(value=True),
    0x89: _constant(value=False),
    ord("I"): _int,
    ord("J"): _binint,
    ord("K"): _binint1,
    ord("M"): _unsigned(2),
    ord("L"): _long,
    0x8A: _long_of(1),
    0x8B: _long_of(4),
    ord("F"): _float,
    ord("G"): _binfloat,
    ord("U"): _latin_of(1),
    ord("T"): _latin_of(4),
    ord("V"): _unicode,
    0x8C: _text_of(1),
    ord("X"): _text_of(4),
    0x8D: _text_of(8),
    ord("C"): _bytes_of(1),
    ord("B"): _bytes_of(4),
    0x8E: _bytes_of(8),
    0x96: _bytes_of(8),
    ord("]"): _empty(list),
    ord("}"): _empty(dict),
    0x8F: _empty(set),
    ord(")"): _constant(()),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("t"): _tuple,
    ord("l"): _list,
    ord("d"): _dict,
    0x91: _frozenset,
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _setitem,
    ord("u"): _setitems,
    0x90: _additems,
    ord("h"): _binget,
    ord("j"): _get_of(4),
    ord("g"): _get,
    ord("q"): _put_of(1),
    ord("r"): _put_of(4),
    ord("p"): _put,
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _reduce,
    0x92: _newobj_ex,
    ord("b"): _build,
    ord("Q"): _binpersid,
}.items():
    _STEPS[_code] = _step
