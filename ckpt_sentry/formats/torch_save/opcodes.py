"""
The opcodes of pickles up to protocol 5, one function for each (`pickletools` of CPython describes them).

Left out: persistent ids in text form, old-style instances, extension codes and out-of-band buffers. A stack underflow
is an IndexError, which `unpickle.load` turns into an UnreadablePickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from ckpt_sentry.formats.torch_save.machine import Machine, Opaque, UnreadablePickle, flat

Step = Callable[[Machine], None]

_HIGHEST_PROTOCOL: Final = 5
_MEMO: Final = range(2**32)
"""Places of the memo; a larger number could share its hash with others."""


def _proto(m: Machine) -> None:
    version = m.number(1)
    if version > _HIGHEST_PROTOCOL:
        raise UnreadablePickle(f"is of the unknown pickle protocol {version}", m.at)


def _frame(m: Machine) -> None:
    m.take(8)


def _mark(m: Machine) -> None:
    m.count_container()
    m.set_aside.append(m.stack)
    m.stack = []


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.since_mark()


def _pop_mark(m: Machine) -> None:
    m.since_mark()


def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


def _constant(value: object) -> Step:
    def step(m: Machine) -> None:
        m.stack.append(value)

    return step


def _unsigned(size: int) -> Step:
    def step(m: Machine) -> None:
        m.stack.append(int.from_bytes(m.take(size), "little"))

    return step


def _binint1(m: Machine) -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _binint(m: Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


def _int(m: Machine) -> None:
    text = m.line()
    m.stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _long(m: Machine) -> None:
    m.stack.append(int(m.line().removesuffix("L")))


def _long_of(size: int) -> Step:
    def step(m: Machine) -> None:
        m.stack.append(int.from_bytes(m.take(m.number(size)), "little", signed=True))

    return step


def _float(m: Machine) -> None:
    m.stack.append(float(m.line()))


def _binfloat(m: Machine) -> None:
    m.stack.append(struct.unpack(">d", m.take(8))[0])


def _text_of(size: int) -> Step:
    def step(m: Machine) -> None:
        m.stack.append(m.text(m.take(m.number(size)).decode("utf-8", "surrogatepass")))

    return step


def _latin_of(size: int) -> Step:
    def step(m: Machine) -> None:
        m.stack.append(m.text(m.take(m.number(size)).decode("latin-1")))

    return step


def _bytes_of(size: int) -> Step:
    def step(m: Machine) -> None:
        m.stack.append(m.take(m.number(size)))

    return step


def _unicode(m: Machine) -> None:
    m.stack.append(m.text(m.line()))


def _empty(kind: type[list[object] | dict[object, object]]) -> Step:
    def step(m: Machine) -> None:
        m.count_container()
        m.stack.append(kind())

    return step


def _tuple_of(count: int) -> Step:
    def step(m: Machine) -> None:
        m.count_container()
        stack = m.stack
        if len(stack) < count:
            raise UnreadablePickle(f"is corrupt at byte {m.at}", m.at)
        stack[-count:] = [tuple(stack[-count:])]

    return step


def _tuple(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(tuple(items))


def _list(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(items)


def _dict(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append({})
    _set_pairs(m, items)


def _frozenset(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(tuple(items))


def _add_elements(m: Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif type(target) is Opaque:
        target.elements = [] if target.elements is None else target.elements
        target.elements.extend(items)
    else:
        raise UnreadablePickle("appends to something that is no list", m.at)


def _append(m: Machine) -> None:
    item = m.stack.pop()
    _add_elements(m, [item])


def _appends(m: Machine) -> None:
    items = m.since_mark()
    _add_elements(m, items)


def _set_pairs(m: Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if type(target) is Opaque:
        target.entries = {} if target.entries is None else target.entries
        target = target.entries
    if type(target) is not dict or len(items) % 2:
        raise UnreadablePickle("sets items of something that is no dict", m.at)
    for index in range(0, len(items), 2):
        key = items[index]
        target[key if type(key) is str else flat(key)] = items[index + 1]


def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_pairs(m, [key, value])


def _setitems(m: Machine) -> None:
    items = m.since_mark()
    _set_pairs(m, items)


def _additems(m: Machine) -> None:
    items = m.since_mark()
    target = m.stack[-1]
    if not isinstance(target, list):
        raise UnreadablePickle("adds to something that is no set", m.at)
    target.extend(items)


def _get_of(size: int) -> Step:
    def step(m: Machine) -> None:
        m.stack.append(m.memo[m.number(size)])

    return step


def _binget(m: Machine) -> None:
    m.stack.append(m.memo[m.data[m.at]])
    m.at += 1


def _get(m: Machine) -> None:
    m.stack.append(m.memo[int(m.line())])


def _put_of(size: int) -> Step:
    def step(m: Machine) -> None:
        m.memo[m.number(size)] = m.stack[-1]

    return step


def _put(m: Machine) -> None:
    place = int(m.line())
    if place not in _MEMO:
        raise UnreadablePickle("has a memo that no pickler writes", m.at)
    m.memo[place] = m.stack[-1]


def _global(m: Machine) -> None:
    module = m.line()
    m.stack.append(m.find(module, m.line()))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.find(module, name))


def _reduce(m: Machine) -> None:
    args, target = m.stack.pop(), m.stack.pop()
    m.stack.append(m.call(target, args))


def _newobj_ex(m: Machine) -> None:
    m.stack.pop()  # keyword arguments: no stand-in takes any
    _reduce(m)


def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Opaque:
        # (__dict__ or None, slots), as copyreg writes it for a class with __slots__.
        match state:
            case (None, dict() as slots):
                target.state = slots
            case (dict() as attributes, dict() as slots):
                m.charge(len(attributes) + len(slots))
                target.state = attributes | slots
            case _:
                target.state = state


def _binpersid(m: Machine) -> None:
    if m.persistent is None:
        raise UnreadablePickle("refers to data outside of itself", m.at)
    m.count_container()
    m.stack.append(m.persistent(m.stack.pop()))


_BY_CODE: Final[dict[int, Step]] = {
    0x80: _proto,
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
    0x8F: _empty(list),  # Nobody asks what a set holds, so nothing in it is ever hashed.
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
}
STEPS: Final[tuple[Step | None, ...]] = tuple(_BY_CODE.get(code) for code in range(256))
"""By opcode; MEMOIZE and STOP are the machine's own."""
