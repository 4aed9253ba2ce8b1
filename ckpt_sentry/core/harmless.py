"""
Whether Python code can be run a second time without anybody noticing: it writes to nothing but its own variables, and
calls nothing but functions that are known to do the same.

What is not known to be harmless is not: a generator may take items from a queue, write to a file or start processes.
"""

from __future__ import annotations

import builtins
import dis
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

_MOST_LOOKED_AT: Final = 32
_DEPTH: Final = 3

_FUNCTIONS: Final = frozenset(
    {
        "abs",
        "all",
        "any",
        "bool",
        "bytes",
        "dict",
        "enumerate",
        "float",
        "format",
        "frozenset",
        "hasattr",
        "hash",
        "id",
        "int",
        "isinstance",
        "issubclass",
        "len",
        "list",
        "max",
        "min",
        "ord",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "type",
        "zip",
    }
)
_METHODS: Final = frozenset(
    {
        "buffers",
        "capitalize",
        "casefold",
        "children",
        "count",
        "dim",
        "element_size",
        "endswith",
        "find",
        "format",
        "index",
        "is_contiguous",
        "isdigit",
        "items",
        "join",
        "keys",
        "lower",
        "lstrip",
        "modules",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "ndimension",
        "numel",
        "parameters",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rpartition",
        "rsplit",
        "rstrip",
        "size",
        "split",
        "splitlines",
        "startswith",
        "stride",
        "strip",
        "title",
        "upper",
        "values",
    }
)
_CALLS: Final = ("CALL", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_KW", "CALL_METHOD")
_LOOPS: Final = ("GET_ITER", "GET_YIELD_FROM_ITER")
_EFFECTS: Final = (
    *("BEFORE_ASYNC_WITH", "BEFORE_WITH", "CALL_FUNCTION_EX", "DELETE_ATTR", "DELETE_DEREF", "DELETE_GLOBAL"),
    *("DELETE_NAME", "DELETE_SUBSCR", "GET_AITER", "GET_ANEXT", "GET_AWAITABLE", "IMPORT_FROM", "IMPORT_NAME"),
    *("IMPORT_STAR", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_SPECIAL", "LOAD_SUPER_ATTR", "RAISE_VARARGS", "SETUP_WITH"),
    *("SETUP_ASYNC_WITH", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_SLICE", "STORE_SUBSCR"),
)
_PLAIN: Final[tuple[type, ...]] = (
    *(bool, bytes, complex, float, int, str, type(None), type, range, slice, Counter, OrderedDict, deque),
    *(dict, frozenset, list, set, tuple, type({}.keys()), type({}.values()), type({}.items()), types.MappingProxyType),
)
_TRUSTED: Final = "torch.nn.modules.module"
"""Where `named_parameters` and its kin are: they walk over modules and remember nothing."""


def is_harmless(code: types.CodeType, names: Mapping[str, Any], values: Iterable[Any]) -> bool:
    """
    Whether the code may be run again.

    Args:
        names: the global variables that it sees.
        values: its arguments and free variables, iterators as lists of their first items.
    """
    if names.get("__name__") == _TRUSTED:
        return True
    loops = sum(step.opname in _LOOPS for step in _steps(code))
    # A generator expression is given the iterator of its first loop.
    is_nested = loops > (code.co_name != "<genexpr>")
    depth = _DEPTH if is_nested else 1
    return all(_is_plain(value, depth) for value in values) and _is_pure(code, names)


def is_harmless_function(function: Any) -> bool:
    """
    The same for a function that is given to `map` or `filter`.
    """
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return is_harmless(function.__code__, function.__globals__, (*cells, *(function.__defaults__ or ())))
    if isinstance(function, (types.MethodDescriptorType, types.BuiltinMethodType)):
        owner = getattr(function, "__objclass__", None)
        return function.__name__ in _METHODS if owner in _PLAIN else _is_known(function)
    return function is None or _is_known(function)


def _is_known(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name in _FUNCTIONS and getattr(builtins, name) is function


def _is_plain(value: Any, depth: int) -> bool:
    """
    Whether looking at a value, and walking over it to this depth, does nothing.
    """
    kind = type(value)
    if kind in _PLAIN:
        if depth <= 1 or not isinstance(value, Iterable) or kind in (str, bytes, range):
            return True
        inner = value.values() if isinstance(value, Mapping) else value
        return all(_is_plain(one, depth - 1) for one in islice(inner, _MOST_LOOKED_AT))
    return kind.__module__ == "torch" or any(base.__module__ in (_TRUSTED, "torch._C") for base in kind.__mro__)


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _steps(inner)


def _is_pure(code: types.CodeType, names: Mapping[str, Any]) -> bool:
    """
    Whether it has no effects and each of its calls can be one of a known function.
    """
    calls = known = 0
    for step in _steps(code):
        if step.opname in _EFFECTS:
            return False
        calls += step.opname in _CALLS
        known += step.opname == "MAKE_FUNCTION"
        if step.opname == "LOAD_GLOBAL":
            name = step.argval
            if name not in names and name in _FUNCTIONS:
                known += 1
            elif not _is_plain(names.get(name, code), 1):
                return False
        elif _is_method(step):
            if step.argval not in _METHODS:
                return False
            known += 1
    return calls <= known


def _is_method(step: dis.Instruction) -> bool:
    """
    Whether an attribute is taken in order to be called (from Python 3.12 on, the low bit of LOAD_ATTR says so).
    """
    if step.opname == "LOAD_ATTR" and sys.version_info >= (3, 12):
        return bool((step.arg or 0) & 1)
    return step.opname == "LOAD_METHOD"
