"""
The cheap dataclass, held against the one of the standard library.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckpt_sentry import dataclasses_
from ckpt_sentry.dataclasses_ import MISSING, dataclass, field, is_dataclass, parts, replace

PACKAGE = Path(dataclasses_.__file__).parent


@dataclass(frozen=True, slots=True)
class Point:
    """
    Of the plane.
    """

    x: int
    y: int = 2
    tags: tuple[str, ...] = ()

    @property
    def sum(self) -> int:
        return self.x + self.y


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    kind: ClassVar[str] = "base"
    a: int
    b: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Base):
    b: int = 5
    c: str = "c"


@dataclass(slots=True)
class Bag:
    name: str
    items: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    x: int


@dataclasses.dataclass(frozen=True, slots=True)
class StandardPoint:
    x: int
    y: int = 2
    tags: tuple[str, ...] = ()


def test_is_as_the_standard_one() -> None:
    ours: Any = Point
    for make in (lambda cls: cls(1), lambda cls: cls(1, 3, ("t",)), lambda cls: cls(y=1, x=4)):
        assert repr(make(ours)) == repr(make(StandardPoint)).replace("StandardPoint", "Point")
        assert dataclasses.astuple(make(ours)) == dataclasses.astuple(make(StandardPoint))
    assert ours.__match_args__ == StandardPoint.__match_args__  # type: ignore[attr-defined]
    assert ours.__slots__ == StandardPoint.__slots__  # type: ignore[attr-defined]
    assert ours.__doc__.strip() == "Of the plane."
    assert (ours.__name__, ours.__qualname__, ours.__module__) == ("Point", "Point", __name__)
    assert not hasattr(Point(1), "__dict__")
    assert Point(1).sum == 3


@pytest.mark.parametrize(
    "arguments", [((), {}), ((1, 2, (), 4), {}), ((1,), {"x": 2}), ((1,), {"z": 2}), ((), {"y": 2})]
)
def test_wrong_arguments_are_refused_as_there(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    for cls in (Point, StandardPoint):
        with pytest.raises(TypeError):
            cls(*arguments[0], **arguments[1])


def test_frozen_ones_stay_and_may_be_keys() -> None:
    point: Any = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    assert {Point(1): "here"}[Point(1, 2)] == "here"
    assert Point(1) != Point(2)
    assert Point(1) != StandardPoint(1)


def test_others_can_be_changed_and_are_no_keys() -> None:
    bag, other = Bag("a"), Bag("a")
    assert bag == other
    bag.items["x"] = 1
    bag.name = "b"
    assert (bag, other) == (Bag("b", {"x": 1}), Bag("a"))
    with pytest.raises(TypeError, match="unhashable"):
        hash(bag)
    with pytest.raises(AttributeError):
        bag.more = 1  # type: ignore[attr-defined]


def test_identity_where_that_is_asked_for() -> None:
    one, other = Alone(1), Alone(1)
    assert one != other
    assert len({one, other}) == 2


def test_a_field_may_be_left_out_of_comparison_and_of_its_text() -> None:
    @dataclass(frozen=True, slots=True)
    class File:
        name: str
        size: int = 0
        error: list[str] = field(default_factory=list, compare=False, repr=False)

    one, other = File("a", 1, ["x"]), File("a", 1)
    assert one == other
    assert hash(one) == hash(other)
    assert one != File("a", 2)
    assert repr(one).endswith("File(name='a', size=1)")


def test_inheritance_class_variables_and_keywords() -> None:
    derived = Derived(a=1)
    assert (derived.a, derived.b, derived.c, derived.kind, Base(a=1).b) == (1, 5, "c", "base", 1)
    assert [part.name for part in parts(Derived)] == ["a", "b", "c"]
    assert Derived.__match_args__ == ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        Derived(1)  # type: ignore[misc]


def test_is_copied_and_pickled() -> None:
    for one in (Point(1, tags=("t",)), Derived(a=1, c="d"), Bag("a", {"x": 1})):
        for made in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert (type(made), made) == (type(one), one)


def test_the_functions_of_the_standard_library_take_it() -> None:
    assert [one.name for one in dataclasses.fields(Derived)] == ["a", "b", "c"]
    assert [one.default for one in dataclasses.fields(Point)] == [MISSING, 2, ()]
    assert dataclasses.replace(Point(1), y=7) == replace(Point(1), y=7) == Point(1, 7)
    assert dataclasses.asdict(Bag("a", {"x": 1})) == {"name": "a", "items": {"x": 1}}
    assert inspect.signature(Point) == inspect.signature(StandardPoint, eval_str=True).replace(
        return_annotation=inspect.Signature.empty
    )
    assert dataclasses.is_dataclass(Point)
    assert is_dataclass(Point)
    assert not is_dataclass(Point(1))
    assert not is_dataclass(StandardPoint)


def test_dataclasses_without_slots_are_not_made() -> None:
    with pytest.raises(TypeError, match="slots=True is wanted"):

        @dataclass(frozen=True)
        class Other:
            x: int


def test_the_package_makes_no_other_dataclass() -> None:
    made = {
        str(path.relative_to(PACKAGE)): alias.name
        for path in PACKAGE.rglob("*.py")
        if path != Path(dataclasses_.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        for alias in node.names
        if alias.name in {"dataclass", "replace", "field"}
    }
    assert made == {}
