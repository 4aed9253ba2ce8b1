"""
Makes the functions of the agent raise, one after another.

A point is a function or method of a module of `ckpt_sentry` that is loaded. Broken, it raises wherever it is called
from: its name is replaced in every module of the agent, and inside of `guard.contained` the function itself is.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_sentry.patching import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

PACKAGE = "ckpt_sentry"
_WRAPPING = f"{PACKAGE}.patching.wrapping_importlib_bootstrap"
NOT_CALLED_LATER = {
    f"{PACKAGE}.patching.guard.contained",
    *(f"{_WRAPPING}.{name}" for name in ("around", "judging", "reading", "repeating")),
}
"""Decorators: they have done their work when the agent is loaded."""


class ChaosError(RuntimeError):
    """
    What a broken point raises.
    """


@dataclass(frozen=True)
class Point:
    """
    A function of the agent: where it is kept, under which name.
    """

    owner: Any
    name: str
    function: Any

    def __str__(self) -> str:
        where = (
            self.owner.__name__ if inspect.ismodule(self.owner) else f"{self.owner.__module__}.{self.owner.__name__}"
        )
        return f"{where}.{self.name}"


def points() -> list[Point]:
    """
    Every function and method that the loaded modules of the agent define; sorted.
    """
    found = {str(point): point for module in _modules() for point in _defined_in(module)}
    return [found[name] for name in sorted(found) if name not in NOT_CALLED_LATER]


@contextlib.contextmanager
def broken(point: Point) -> Iterator[None]:
    """
    For the length of the block, the point raises `ChaosError`.
    """
    with contextlib.ExitStack() as undo:
        if cell := _contained_cell(point.function):
            undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = _raiser(point.function)
            yield
            return
        replacement = _like(point.function, _raiser(point.function))
        for owner, name in _places(point):
            undo.callback(setattr, owner, name, point.function)
            setattr(owner, name, replacement)
        yield


def run(outcomes: Callable[[], object], wanted: object, is_meant: Callable[[Point], bool]) -> None:
    """
    Break each point that is meant in turn, and print what came of it as JSON: {"points": N, "reached": N, "different":
    [...]}. `reached` counts those whose breaking was felt inside the agent, `different` names those with which
    `outcomes` gave anything but `wanted`.
    """
    different = [] if outcomes() == wanted else ["(nothing broken)"]
    felt = _Felt()
    logger = logging.getLogger(PACKAGE)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(felt)
    found, reached = [point for point in points() if is_meant(point)], 0
    for point in found:
        felt.seen = False
        guard._said.clear()
        with broken(point):
            if outcomes() != wanted:
                different.append(str(point))
        reached += felt.seen
    print(json.dumps({"points": len(found), "reached": reached, "different": different}))


class _Felt(logging.Handler):
    """
    Notes whether the guard had something to swallow.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen = False

    def emit(self, _record: logging.LogRecord) -> None:
        self.seen = True


def _defined_in(module: ModuleType) -> Iterator[Point]:
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield Point(module, name, value)
        elif inspect.isclass(value):
            yield from _methods(value)


def _methods(owner: type) -> Iterator[Point]:
    for name, value in vars(owner).items():
        plain = not (name.startswith("__") and name != "__init__")
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if plain and inspect.isfunction(inner) and inner.__module__ == owner.__module__:
            yield Point(owner, name, value)


def _modules() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name == PACKAGE or name.startswith(f"{PACKAGE}.")]


def _places(point: Point) -> list[tuple[Any, str]]:
    if inspect.isclass(point.owner):
        return [(point.owner, point.name)]
    return [(m, name) for m in _modules() for name, value in list(vars(m).items()) if value is point.function]


def _contained_cell(function: Any) -> Any:
    code = getattr(function, "__code__", None)
    if code is None or not code.co_filename.endswith("guard.py") or "function" not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index("function")]


def _raiser(function: Any) -> Callable[..., Any]:
    def raise_chaos(*_: Any, **__: Any) -> Any:
        raise ChaosError(getattr(function, "__qualname__", str(function)))

    return raise_chaos


def _like(function: Any, raiser: Callable[..., Any]) -> Any:
    kind = type(function)
    return kind(raiser) if kind in (property, staticmethod, classmethod) else raiser
