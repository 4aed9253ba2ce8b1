"""
Frozen dataclasses to plain data and back, by their type hints.

Plain data is what JSON has: dict, list, str, int, float, bool. What is None, empty or at its default is left out; what
a newer writer added is ignored. Understood hints: str, int, float, bool, Literal, X | None, tuple[X, ...],
tuple[X, Y] and dataclasses of these.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpt_sentry.dataclasses_ import MISSING, is_dataclass, parts

T = TypeVar("T")
_Decode = Callable[[object, str], Any]

_PLAIN = frozenset({str, int, float, bool})
_ALWAYS = "schema"
"""A field that is written even at its default, so that a later reader knows which schema the data follows."""


class CodecError(ValueError):
    """
    Data that does not fit the class. The text begins with the path of the field, such as `report.phases[2].seconds`.
    """


class _Field(NamedTuple):
    """
    One field, as `restore` takes it. `absent` is what it holds where it is not there, `MISSING` where it must be.
    """

    name: str
    decode: _Decode
    absent: object


def dump(obj: object) -> dict[str, Any]:
    """
    Turn a dataclass into a dict of plain data. Raises `CodecError` for a value that is not plain.
    """
    data: dict[str, Any] = {}
    cls: Any = type(obj)
    for name, default in _defaults(cls):
        value = getattr(obj, name)
        if value is None or value == () or (value == default and name != _ALWAYS):
            # A default that is not empty must not come back in place of an empty value.
            if value == default or not _has_content(default):
                continue
            data[name] = None if value is None else []
        else:
            data[name] = _plain(value, name)
    return data


def _has_content(default: object) -> bool:
    return default is not MISSING and default is not None and default != ()


def _plain(value: object, path: str) -> object:
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item, path) for item in value]
    if is_dataclass(type(value)):
        return dump(value)
    raise CodecError(f"{path}: a {type(value).__name__} is not plain data")


def restore(cls: type[T], data: object) -> T:
    """
    Build a `cls` from what `dump` gave, or from what JSON or OTLP made of it. Raises `CodecError`.

    Whole numbers do for floats, and floats for integers where nothing is lost.
    """
    made: T = _decode_dataclass(cls)(data, "")
    return made


@cache
def _defaults(cls: Any) -> tuple[tuple[str, object], ...]:
    """
    Each field with what `dump` leaves out of it, `MISSING` where nothing but None and () is left out.
    """
    # Apart from what `restore` needs: to evaluate the type hints takes longer than a small load.
    if not is_dataclass(cls):
        raise CodecError(f"{cls.__name__} is no dataclass")
    return tuple((part.name, part.default if part.make is None else part.make()) for part in parts(cls))


@cache
def _fields(cls: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(cls)
    return tuple(_field(name, default, hints[name]) for name, default in _defaults(cls))


def _field(name: str, default: object, hint: object) -> _Field:
    absent = default
    if default is MISSING and _is_optional(hint):
        absent = None
    elif default is MISSING and get_origin(hint) is tuple:
        absent = ()
    return _Field(name, _decoder(hint), absent)


def _is_optional(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


@cache
def _decoder(hint: Any) -> _Decode:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _DECODERS:
        return _DECODERS[hint]
    if origin is Literal:
        return _decode_literal(args)
    if _is_optional(hint) and len(args) == 2:  # noqa: PLR2004 - X and None
        return _decode_optional(_decoder(next(arg for arg in args if arg is not type(None))))
    if origin is tuple and args[-1:] == (Ellipsis,):
        return _decode_sequence(_decoder(args[0]))
    if origin is tuple:
        return _decode_fixed(tuple(_decoder(arg) for arg in args))
    if is_dataclass(hint):
        return _decode_dataclass(hint)
    raise CodecError(f"no codec for the type {hint!r}")


def _refuse(path: str, wanted: str, value: object) -> CodecError:
    return CodecError(f"{path or 'the data'}: {wanted} is wanted, not {type(value).__name__}")


def _decode_str(value: object, path: str) -> str:
    if isinstance(value, str):
        return value
    raise _refuse(path, "a string", value)


def _decode_bool(value: object, path: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _refuse(path, "true or false", value)


def _decode_int(value: object, path: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise _refuse(path, "a whole number", value)


def _decode_float(value: object, path: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise _refuse(path, "a number that fits a float", value) from error
    raise _refuse(path, "a number", value)


def _decode_literal(allowed: tuple[object, ...]) -> _Decode:
    def decode(value: object, path: str) -> object:
        for item in allowed:
            if item == value and type(item) is type(value):
                return item
        raise _refuse(path, "one of " + ", ".join(map(repr, allowed)), value)

    return decode


def _decode_optional(inner: _Decode) -> _Decode:
    def decode(value: object, path: str) -> object:
        return None if value is None else inner(value, path)

    return decode


def _decode_sequence(inner: _Decode) -> _Decode:
    def decode(value: object, path: str) -> tuple[object, ...]:
        if not isinstance(value, (list, tuple)):
            raise _refuse(path, "a list", value)
        return tuple(inner(item, f"{path}[{index}]") for index, item in enumerate(value))

    return decode


def _decode_fixed(inner: tuple[_Decode, ...]) -> _Decode:
    def decode(value: object, path: str) -> tuple[object, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(inner):
            raise _refuse(path, f"a list of {len(inner)}", value)
        return tuple(one(item, f"{path}[{index}]") for index, (one, item) in enumerate(zip(inner, value, strict=True)))

    return decode


def _decode_dataclass(cls: Any) -> _Decode:
    def decode(value: object, path: str) -> object:
        if not isinstance(value, Mapping):
            raise _refuse(path, f"an object ({cls.__name__})", value)
        found: dict[str, object] = {}
        for name, decode_field, absent in _fields(cls):
            where = f"{path}.{name}" if path else name
            if name in value:
                found[name] = decode_field(value[name], where)
            elif absent is MISSING:
                raise CodecError(f"{where}: not there")
            else:
                found[name] = absent
        return cls(**found)

    return decode


_DECODERS: dict[object, _Decode] = {
    str: _decode_str,
    bool: _decode_bool,
    int: _decode_int,
    float: _decode_float,
}
