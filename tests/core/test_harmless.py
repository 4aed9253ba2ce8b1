from __future__ import annotations

import queue
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_sentry.core.generators import items_of
from ckpt_sentry.core.harmless import is_harmless_function

KNOWN = {"b"}
SEEN: list[str] = []
COUNT = 0


def emptying(names: list[str]) -> Iterator[str]:
    while names:
        yield names.pop()


def taking(source: queue.Queue[str]) -> Iterator[str]:
    yield source.get()


def writing(path: Path) -> Iterator[str]:
    path.write_text("x")
    yield "a"


def noting() -> Iterator[str]:
    SEEN.append("a")
    yield "a"


def counting() -> Iterator[int]:
    global COUNT  # noqa: PLW0603 - that is what is tested
    COUNT += 1
    yield COUNT


def setting(table: dict[str, int]) -> Iterator[str]:
    table["a"] = 1
    yield "a"


def calling(function: Callable[[], str]) -> Iterator[str]:
    yield function()


def sleeping() -> Iterator[str]:
    time.sleep(60)
    yield "a"


def leaving() -> Iterator[str]:
    yield "a"
    raise SystemExit(7)


def importing() -> Iterator[str]:
    import antigravity

    yield antigravity.__name__


def walking(loader: object) -> Iterator[object]:
    yield from loader  # type: ignore[misc]


def walking_all(loaders: list[Any]) -> Iterator[object]:
    for loader in loaders:
        yield from loader


def closing(path: Path) -> Iterator[str]:
    with path.open("w") as file:
        yield file.name


def noted(key: str) -> str:
    SEEN.append(key)
    return key


def upper(key: str) -> str:
    return key.upper()


class Loader:
    """
    Starts something when it is walked over.
    """

    def __iter__(self) -> Iterator[int]:
        SEEN.append("started")
        return iter((1, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: emptying(["a"]),
        lambda: taking(queue.Queue()),
        lambda: writing(Path("/nowhere/x")),
        noting,
        counting,
        lambda: setting({}),
        lambda: calling(lambda: "a"),
        sleeping,
        leaving,
        importing,
        lambda: walking(Loader()),
        lambda: walking_all([Loader()]),
        lambda: (item for loader in [Loader()] for item in loader),
        lambda: closing(Path("/nowhere/x")),
        lambda: (noted(key) for key in "ab"),
        lambda: (SEEN.pop() for _ in "ab"),
        lambda: map(SEEN.append, "ab"),
        lambda: map(noted, "ab"),
        lambda: filter(Path.unlink, [Path("/nowhere/x")]),
    ],
)
def test_what_may_have_an_effect_is_not_run_again(make: Callable[[], Iterator[Any]]) -> None:
    generator = make()
    assert items_of(generator) is None
    assert (SEEN, COUNT, "antigravity" in sys.modules) == ([], 0, False)


@pytest.mark.parametrize(
    ("make", "items"),
    [
        (lambda: (f"model.{key}" for key in ["a", "b"] if key not in KNOWN), ["model.a"]),
        (lambda: (key.removeprefix("a.") for key in ("a.x", "b") if len(key) > 1), ["x"]),
        (lambda: (key for key, value in {"a": torch.ones(2), "b": 1}.items() if isinstance(value, int)), ["b"]),
        (lambda: (key for part in [{"a": 1}, {"b": 2}] for key in part), ["a", "b"]),
        (lambda: (sorted(x + "." for x in keys) for keys in [{"a"}]), [["a."]]),
        (lambda: (key for key in OrderedDict(a=1)), ["a"]),
        (lambda: map(upper, ["a"]), ["A"]),
        (lambda: map(len, ["a", "bc"]), [1, 2]),
        (lambda: (tuple(value.shape) for value in [torch.ones(2, 3)]), [(2, 3)]),
        (lambda: (name for name, _ in torch.nn.Linear(2, 1).named_parameters()), ["weight", "bias"]),
    ],
)
def test_what_only_looks_is_run_again(make: Callable[[], Iterator[Any]], items: list[Any]) -> None:
    assert items_of(make()) == (items, False)


def test_functions() -> None:
    assert all(map(is_harmless_function, (None, str, len, str.upper, lambda key: key[0])))
    assert not any(map(is_harmless_function, (print, [].append, list.append, Path.unlink, Loader(), time.sleep)))
