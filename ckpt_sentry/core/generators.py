"""
The text of an exception without generators, iterators, dict views and addresses: each is replaced by what it holds.

`<generator object f.<locals>.<genexpr> at 0x7f…>` names nothing. The object itself still stands in the arguments of the
exception or in a frame of its traceback, and is found there by its address. It is never advanced: an iterator is
rebuilt from what it says of itself (`__reduce__`), a generator is run a second time, from its start, on the values in
its frame. So a generator that was partly used is told whole. At most `MOST_ITEMS` are taken; what has no end, cannot
be had twice, or might have an effect (`core.harmless`) is only named.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ckpt_sentry.core.escape import cut
from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.harmless import is_harmless, is_harmless_function
from ckpt_sentry.patching.guard import let_through

MOST_ITEMS: Final = 10_000
LONGEST_LIST: Final = 1_500
"""Characters of one expanded list."""

LONGEST_TEXT: Final = 100_000
"""Characters of a text beyond which it is left as it is: searching it would take the time of the job."""

_SECONDS: Final = 0.2
_DEPTH: Final = 8
_SHOWN_OBJECTS: Final = 100
_MOST_CHAIN: Final = 20
_MOST_LOCALS: Final = 5_000
_ADDRESS: Final = re.compile(r" at 0x([0-9a-fA-F]{1,16})>")
_LONGEST_NAME: Final = 300
_VIEW: Final = re.compile(r"\b(?:o?dict)_(?:keys|values|items)\(")
_GENERATORS: Final = ("generator ", "async_generator ")
_ENDLESS: Final = (itertools.count, itertools.cycle)
_VIEWS: Final[tuple[type, ...]] = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
_COPIED: Final[tuple[type, ...]] = (list, tuple, dict, set, frozenset, str, bytes, range, *_VIEWS)
_STARRED: Final = 0x04 | 0x08
"""CO_VARARGS and CO_VARKEYWORDS."""


class _NoCopyError(Exception):
    """
    There is no second copy of this iterator, or it may have no end.
    """


def is_opaque(text: str) -> bool:
    """
    Whether a text shows a generator, an iterator, a dict view or an address.
    """
    return " at 0x" in text or _VIEW.search(text) is not None


def readable(text: str, error: BaseException | None) -> str:
    """
    The text with every display of a generator, iterator or view replaced by its items, and without addresses.

    `error` is the exception that the text is of: its arguments, its causes and the frames of their tracebacks are
    searched. What is not found there is named by its kind. No frame is kept.
    """
    if len(text) > LONGEST_TEXT or not is_opaque(text):
        return text
    displays = list(_displays(text))
    found = _objects(error, {display.address for display in displays}) if displays else {}
    parts, place = [], 0
    for display in displays:
        parts += [text[place : display.start], _as_text(display, found)]
        place = display.end
    return _without_views("".join(parts) + text[place:])


def items_of(iterable: object, limit: int = MOST_ITEMS) -> tuple[list[object], bool] | None:
    """
    The items of an iterator, generator or view from its very start, and whether there are more than `limit`.

    None where they cannot be had without taking them away from somebody, or where they may never end.
    """
    try:
        with _Budget(_SECONDS):
            taken = list(itertools.islice(_again(iterable, _DEPTH), limit + 1))
    except Exception as failure:
        let_through(failure)
        return None
    return taken[:limit], len(taken) > limit


class _Display(NamedTuple):
    """
    Where a text shows an object by its address, `<NAME at 0x…>`.
    """

    start: int
    end: int
    name: str
    address: int


def _displays(text: str) -> Iterator[_Display]:
    place = 0
    for match in _ADDRESS.finditer(text):
        start, depth = match.start(), 1
        # Names hold brackets of their own: <generator object f.<locals>.<genexpr> at 0x…>
        while depth and start > max(place, match.start() - _LONGEST_NAME):
            start -= 1
            depth += {"<": -1, ">": 1}.get(text[start], 0)
        if depth == 0:
            yield _Display(start, match.end(), text[start + 1 : match.start()], int(match[1], 16))
            place = match.end()


class _Budget:
    """
    Stops Python code that runs too long, at its next instruction, by an exception. The tracer set before comes back.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._look)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _look(self, frame: types.FrameType, _event: str, _arg: Any) -> Any:
        # `while True: pass` on one line is no event for Python 3.11: ask for every instruction.
        frame.f_trace_opcodes = True
        if time.perf_counter() > self._end:
            raise _NoCopyError
        return self._look


def _again(iterable: Any, depth: int) -> Iterator[object]:
    """
    A second iterator over the same items, from the first one on. Raises `_NoCopyError`.
    """
    if type(iterable) in _COPIED:
        return iter(tuple(iterable))
    if depth == 0 or isinstance(iterable, _ENDLESS):
        raise _NoCopyError
    if isinstance(iterable, types.GeneratorType):
        return _rerun(iterable, depth - 1)
    if type(iterable) in (map, filter, zip):
        # Asked first: their `__reduce__` is gone from some versions, and warns in others.
        parts = iterable.__reduce__()[1]
        function = () if type(iterable) is zip else parts[:1]
        if not all(map(is_harmless_function, function)):
            raise _NoCopyError
        return iter(type(iterable)(*function, *(_again(part, depth - 1) for part in parts[len(function) :])))
    if type(iterable) is enumerate:
        parts = iterable.__reduce__()[1]
        return iter(enumerate(_again(parts[0], depth - 1)))
    return _from_reduced(iterable)


def _from_reduced(iterable: Any) -> Iterator[object]:
    """
    What a built-in iterator walks over: `iter(sequence)` at an index (Objects/listobject.c, `listiter_reduce_general`).

    Those of dicts and sets tell what is left of them.
    """
    if not type(iterable).__name__.endswith("iterator") or type(iterable).__module__ != "builtins":
        raise _NoCopyError
    reduced = iterable.__reduce__()
    if reduced[0] not in (iter, reversed) or not reduced[1] or type(reduced[1][0]) not in _COPIED:
        raise _NoCopyError
    return iter(reduced[0](reduced[1][0]))


def _rerun(generator: types.GeneratorType[Any, Any, Any], depth: int) -> Iterator[object]:
    """
    The generator once more, with the arguments and free variables in its frame.

    A generator expression has one argument, the iterator `.0`. Arguments that its code assigns anew are lost.
    """
    frame = generator.gi_frame
    code = generator.gi_code
    if frame is None:
        raise _NoCopyError
    values: Mapping[str, Any] = frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if code.co_flags & _STARRED or _assigned(code) & set(names) or not all(name in values for name in names):
        raise _NoCopyError
    used = [values[name] for name in (*names, *code.co_freevars) if name in values]
    if not is_harmless(code, frame.f_globals, [_some(value, depth) for value in used]):
        raise _NoCopyError
    arguments = {name: _own(values[name], depth) for name in names}
    # A variable of an outer function that has no value yet is an empty cell.
    free = [(values[name],) if name in values else () for name in code.co_freevars]
    cells = tuple(types.CellType(*(_own(value, depth) for value in known)) for known in free)
    function = types.FunctionType(code, frame.f_globals, code.co_name, None, cells)
    positional = [arguments[name] for name in names[: code.co_argcount]]
    keywords = {name: arguments[name] for name in names[code.co_argcount :]}
    made: Iterator[object] = function(*positional, **keywords)
    return made


def _own(value: Any, depth: int) -> Any:
    """
    A value that a second run may use up: iterators get a copy, everything else is shared.
    """
    return _again(value, depth) if _is_iterator(value) else value


def _some(value: Any, depth: int) -> Any:
    """
    What a second run walks over: of an iterator the first items.
    """
    return list(itertools.islice(_again(value, depth), _SHOWN_OBJECTS)) if _is_iterator(value) else value


def _is_iterator(value: object) -> bool:
    return hasattr(type(value), "__next__")


def _assigned(code: types.CodeType) -> set[str]:
    import dis

    stores = ("STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF")
    found: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname.startswith(stores):
            argval = step.argval
            found.update(argval if isinstance(argval, tuple) else (str(argval),))
    return found


def _objects(error: BaseException | None, wanted: set[int]) -> dict[int, object]:
    """
    The objects at these addresses, as far as the exception and the frames of its traceback hold them.
    """
    found: dict[int, object] = {}
    for value in itertools.islice(_held(error), _MOST_LOCALS):
        if id(value) in wanted:
            found.setdefault(id(value), value)
    return found


def _held(error: BaseException | None) -> Iterator[object]:
    for one in _chain(error):
        for value in one.args:
            yield value
            if type(value) in (list, tuple):
                yield from value
        traceback = one.__traceback__
        while traceback is not None:
            for value in tuple(traceback.tb_frame.f_locals.values()):
                yield value
                if type(value) in (list, tuple) and len(value) < _DEPTH:
                    yield from value
                elif type(getattr(value, "__dict__", None)) is dict:
                    yield from tuple(vars(value).values())
            traceback = traceback.tb_next


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MOST_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _as_text(display: _Display, found: Mapping[int, object]) -> str:
    name = display.name.replace("<locals>.", "").replace("<", "").replace(">", "")
    value = found.get(display.address)
    if not hasattr(type(value), "__next__"):
        return f"<not expanded: {name}>" if name.startswith(_GENERATORS) else f"<{name}>"
    items = items_of(value)
    # Not `<generator …`: a text that ends in such a display has told nothing.
    return f"<not expanded: {name}>" if items is None else listed(*items)


def listed(items: Iterable[object], more: bool = False) -> str:  # noqa: FBT001, FBT002 - the answer of `items_of`
    """
    Items in brackets: names folded, anything else by its `repr`, cut.
    """
    items = list(items)
    rest = f", … more than {MOST_ITEMS:,}" if more else ""
    if items and all(type(item) is str for item in items):
        keys = key_list(map(str, items), LONGEST_LIST)
        left_out = f", … {keys.omitted:,} more" if keys.omitted else ""
        return f"[{', '.join(keys.keys)}{left_out}{rest}]"
    text = ", ".join(_shown(item) for item in items[:_SHOWN_OBJECTS])
    left_out = f", … {len(items) - _SHOWN_OBJECTS:,} more" if len(items) > _SHOWN_OBJECTS else ""
    return f"[{cut(text, LONGEST_LIST)}{left_out}{rest}]"


def _shown(item: object) -> str:
    try:
        return cut(_ADDRESS.sub(">", repr(item)))
    except Exception as failure:
        let_through(failure)
        return f"<{type(item).__name__}>"


def _without_views(text: str) -> str:
    """
    `dict_keys([…])` as `[…]`: what stands between the parentheses.
    """
    place = 0
    while (match := _VIEW.search(text, place)) is not None:
        end = _closing(text, match.end())
        text = text[: match.start()] + text[match.end() : end] + text[end + 1 :]
        place = match.start()
    return text


def _closing(text: str, start: int) -> int:
    """
    Where the parenthesis that is open at `start` closes; parentheses inside of quotes do not count.
    """
    depth, quote, place = 1, "", start
    while place < len(text):
        char = text[place]
        if quote:
            if char == "\\":
                place += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return len(text)
