from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core import generators
from ckpt_sentry.core.fold import expand
from ckpt_sentry.core.generators import MOST_ITEMS, is_opaque, items_of, listed, readable


def text_of(raising: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        raising()
    return readable(str(raised.value), raised.value)


def naturals() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def silent_for_ever() -> Iterator[int]:
    while True:
        pass
    yield 1


def each(items: Any) -> Iterator[Any]:
    yield from items


def test_a_generator_that_was_partly_used_is_told_whole() -> None:
    def load() -> None:
        keys = [f"model.adapter{i}" for i in range(800)]
        known: set[str] = set()
        missing = (key for key in keys if key not in known)
        if any(missing):
            raise KeyError(f"missing: {missing}")

    assert text_of(load) == "'missing: [model.adapter{0-799}]'"


def test_the_generator_is_not_advanced_for_whoever_needs_it() -> None:
    source = each(iter(["a", "b", "c"]))
    assert next(source) == "a"

    assert items_of(source) == (["a", "b", "c"], False)
    assert list(source) == ["b", "c"]


def test_generators_in_generators_are_copied_as_well() -> None:
    inner = (name.upper() for name in ["a", "b"])
    outer = (name * 2 for name in inner)

    assert items_of(outer) == (["AA", "BB"], False)
    assert list(outer) == ["AA", "BB"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(["a", "b"]),
        lambda: iter(("a", "b")),
        lambda: iter({"a": 1, "b": 2}),
        {"a": 1, "b": 2}.keys,
        lambda: map(str.lower, iter(["A", "B"])),
        lambda: filter(None, ["a", "", "b"]),
        lambda: each(["a", "b"]),
        lambda: (x for x in "ab"),
    ],
)
def test_iterators_and_views(make: Callable[[], Any]) -> None:
    value = make()

    assert items_of(value) == (["a", "b"], False)
    assert list(value) == ["a", "b"]


def test_pairs() -> None:
    assert items_of(zip([1], ["x"], strict=False)) == ([(1, "x")], False)
    assert items_of(enumerate(["x"])) == ([(0, "x")], False)


@pytest.mark.parametrize(
    "make", [itertools.count, lambda: itertools.cycle("a"), lambda: (x for x in itertools.count())]
)
def test_what_has_no_end_is_not_followed(make: Callable[[], Any]) -> None:
    assert items_of(make()) is None


def test_a_generator_without_an_end_is_cut() -> None:
    found = items_of(naturals())

    assert found == (list(range(MOST_ITEMS)), True)
    assert listed(*found).endswith("… 9,900 more, … more than 10,000]")


def test_one_that_never_yields_is_given_up() -> None:
    assert items_of(silent_for_ever()) is None


def test_what_cannot_be_had_twice_is_left_alone(tmp_path: Any) -> None:
    (tmp_path / "lines").write_text("a\nb\n")
    with (tmp_path / "lines").open() as file:
        generator = (line for line in file)
        assert items_of(generator) is None
        assert list(generator) == ["a\n", "b\n"]


def test_a_used_up_generator_is_named() -> None:
    def load() -> None:
        absent = (key for key in "ab")
        list(absent)
        raise ValueError(f"absent: {absent}")

    text = text_of(load)

    assert text == ("absent: <not expanded: generator object test_a_used_up_generator_is_named.load.genexpr>")


def test_an_asynchronous_generator_is_named() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1

    def load() -> None:
        raise ValueError(f"{items()}")

    assert text_of(load).startswith("<not expanded: async_generator object ")


def test_the_arguments_of_the_exception_are_searched() -> None:
    def load() -> None:
        raise KeyError("absent", (key for key in ["x", "y"]))

    assert text_of(load) == "('absent', [{x,y}])"


def test_views_and_addresses_go() -> None:
    def load() -> None:
        known = {"a)": 1, "b": (2, "'")}
        raise RuntimeError(f"{known.keys()} {known.items()} {object()} {{}}.values()")

    assert text_of(load) == "['a)', 'b'] [('a)', 1), ('b', (2, \"'\"))] <object object> {}.values()"


def test_causes_are_searched() -> None:
    def load() -> None:
        absent = (key for key in ["k0", "k1"])
        try:
            raise ValueError(f"absent: {absent}")  # noqa: TRY301
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    assert text_of(load) == "absent: [k{0-1}]"


def test_an_exception_in_the_generator_is_no_error() -> None:
    def load() -> None:
        broken = (1 / number for number in [0])
        raise ValueError(f"{broken}")

    assert text_of(load).startswith("<not expanded: ")


@given(st.text())
def test_plain_texts_stay(text: str) -> None:
    if not is_opaque(text):
        assert readable(text, None) == text


@given(st.text())
def test_no_text_raises(text: str) -> None:
    assert "dict_keys(" not in readable(f"dict_keys([{text!r}]) <a at 0x12> {text}", None).replace(text, "")


@given(st.lists(st.text(alphabet="abc.01", min_size=1, max_size=6), min_size=1, max_size=20, unique=True))
def test_names_are_folded_exactly(names: list[str]) -> None:
    # A pause of the machine is none of the generator.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators, "_SECONDS", 60.0)
        found = items_of(name for name in names)

    assert found == (names, False)
    assert sorted(expand(listed(*found)[1:-1].split(", "))) == sorted(names)
