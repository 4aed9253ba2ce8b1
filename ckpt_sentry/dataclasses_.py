"""
The `dataclass` of this package: to type checkers that of the standard library, to the interpreter a cheap one.

The standard one writes the source of six methods for each class and has it compiled, about a millisecond a class:
with seventy classes that was half of what the agent added to `import torch`. The classes made here share one set of
methods, which go by the names of the fields. What is understood is what this package uses: `frozen`, `slots` (always),
`eq`, `kw_only`, `field` with a default, a factory, `compare` and `repr`, `ClassVar` and inheritance.
`dataclasses.fields`, `replace`, `asdict` and `is_dataclass` take these classes too.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import MISSING, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import dataclass, replace

__all__ = ["MISSING", "Part", "dataclass", "field", "is_dataclass", "parts", "replace"]

_set = object.__setattr__


class Part(NamedTuple):
    """
    One field. Where it has to be given, `default` is `MISSING` and `make` None. `compared` and `shown` are `compare`
    and `repr` of `dataclasses.field`.
    """

    name: str
    default: Any
    make: Callable[[], Any] | None
    positional: bool
    compared: bool = True
    shown: bool = True


def parts(cls: Any) -> tuple[Part, ...]:
    """
    The fields of a class made here, inherited ones first. Raises `AttributeError` for any other class.
    """
    found: tuple[Part, ...] = cls.__parts__
    return found


def is_dataclass(cls: object) -> bool:
    """
    Whether this is a class made here.
    """
    return isinstance(cls, type) and hasattr(cls, "__parts__")


if not TYPE_CHECKING:

    def dataclass(cls=None, /, **options):
        """
        As `dataclasses.dataclass`.
        """
        return (lambda cls: _made(cls, **options)) if cls is None else _made(cls, **options)

    def replace(obj, /, **changes):
        """
        As `dataclasses.replace`.
        """
        cls = type(obj)
        made = object.__new__(cls)
        for name in cls.__names__:
            _set(made, name, changes.pop(name) if name in changes else getattr(obj, name))
        if changes:
            raise TypeError(f"{cls.__name__} got unexpected arguments: {', '.join(changes)}")
        return made


def _made(cls: Any, *, frozen: bool = False, slots: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
    """
    The class once more, with slots for its fields and with the methods below.
    """
    if not slots:
        raise TypeError(f"{cls.__name__}: slots=True is wanted")
    body = dict(cls.__dict__)
    own = tuple(name for name, hint in cls.__annotations__.items() if not str(hint).startswith("ClassVar"))
    known = {part.name: part for base in cls.__mro__[:0:-1] for part in getattr(base, "__parts__", ())}
    known |= {name: _part(name, body.pop(name, MISSING), positional=not kw_only) for name in own}
    for name in ("__dict__", "__weakref__"):
        body.pop(name, None)
    body |= {
        "__slots__": own,
        "__parts__": tuple(known.values()),
        "__names__": frozenset(known),
        "__given__": {name: part.default for name, part in known.items() if part.default is not MISSING},
        "__makers__": tuple((name, part.make) for name, part in known.items() if part.make is not None),
        "__values__": attrgetter(*(part.name for part in known.values() if part.compared)),
        "__match_args__": tuple(part.name for part in known.values() if part.positional),
        "__dataclass_fields__": _FIELDS,
        "__signature__": _SIGNATURE,
    }
    methods = _METHODS | (_EQUAL if eq else {}) | (_FROZEN if frozen else {})
    if eq:
        methods["__hash__"] = _hash if frozen else None
    return type(cls)(cls.__name__, cls.__bases__, methods | body)


def _part(name: str, given: Any, *, positional: bool) -> Part:
    if isinstance(given, dataclasses.Field):
        make = None if given.default_factory is MISSING else given.default_factory
        return Part(name, given.default, make, positional, compared=given.compare, shown=given.repr)
    return Part(name, given, None, positional)


def _init(self: Any, /, *args: Any, **given: Any) -> None:
    if args:
        names = self.__match_args__[: len(args)]
        if len(names) < len(args) or not given.keys().isdisjoint(names):
            raise TypeError(f"{type(self).__name__} got too many arguments")
        given.update(zip(names, args, strict=True))
    for name, make in self.__makers__:
        if name not in given:
            given[name] = make()
    values = self.__given__ | given
    if values.keys() != self.__names__:
        _refuse(self, values)
    for name, value in values.items():
        _set(self, name, value)


def _refuse(self: Any, values: Mapping[str, Any]) -> None:
    if lacking := [part.name for part in self.__parts__ if part.name not in values]:
        raise TypeError(f"{type(self).__name__} misses the argument {lacking[0]!r}")
    more = [name for name in values if name not in self.__names__]
    raise TypeError(f"{type(self).__name__} got unexpected arguments: {', '.join(more)}")


def _repr(self: Any) -> str:
    fields = ", ".join(f"{part.name}={getattr(self, part.name)!r}" for part in self.__parts__ if part.shown)
    return f"{type(self).__qualname__}({fields})"


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self is other or self.__values__(self) == other.__values__(other)


def _hash(self: Any) -> int:
    return hash(self.__values__(self))


def _refuse_assignment(self: Any, name: str, value: object) -> None:  # noqa: ARG001 - the signature is Python's
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: Any, name: str) -> None:  # noqa: ARG001
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, part.name) for part in self.__parts__]


def _setstate(self: Any, state: list[Any]) -> None:
    for part, value in zip(self.__parts__, state, strict=True):
        _set(self, part.name, value)


class _Signature:
    """
    What `inspect.signature` looks for, made when it does.
    """

    def __get__(self, obj: object, cls: Any) -> inspect.Signature:
        hints = get_type_hints(cls)
        keyword, either = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        found = [
            inspect.Parameter(
                name,
                either if positional else keyword,
                default=inspect.Parameter.empty if default is MISSING and make is None else default,
                annotation=hints[name],
            )
            for name, default, make, positional, *_ in cls.__parts__
        ]
        return inspect.Signature(sorted(found, key=lambda one: one.kind))


class _Fields:
    """
    What `dataclasses.fields` and its like look for, made when they do: nothing of this package asks them.
    """

    def __get__(self, obj: object, cls: Any) -> dict[str, dataclasses.Field[Any]]:
        options = [
            (name, object, field(default=default) if make is None else field(default_factory=make))
            for name, default, make, *_ in cls.__parts__
        ]
        made: Any = dataclasses.make_dataclass(cls.__name__, options, kw_only=True)
        fields: dict[str, dataclasses.Field[Any]] = made.__dataclass_fields__
        return fields


_FIELDS = _Fields()
_SIGNATURE = _Signature()
_METHODS: dict[str, Any] = {
    "__init__": _init,
    "__repr__": _repr,
    "__getstate__": _getstate,
    "__setstate__": _setstate,
}
_EQUAL: dict[str, Any] = {"__eq__": _eq}
_FROZEN: dict[str, Any] = {"__setattr__": _refuse_assignment, "__delattr__": _refuse_deletion}
