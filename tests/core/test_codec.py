"""Dataclasses to plain data and back."""

from __future__ import annotations

import json
from typing import ClassVar, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_sentry.core import report
from ckpt_sentry.core.codec import CodecError, dump, restore
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.transport import events


@dataclass(frozen=True, slots=True)
class Inner:
    size: int
    part: float = 0.5


@dataclass(frozen=True, slots=True)
class Outer:
    kind: ClassVar[str] = "outer"
    name: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[str, int] = ("a", 1)
    mode: Literal["on", "off"] = "on"
    yes: bool = False
    note: str | None = "there"
    schema: str = "1"


def test_defaults_and_nothing_are_left_out():
    assert dump(Outer("x")) == {"name": "x", "schema": "1"}
    assert dump(Outer("x", Inner(3), (Inner(4, 1.0),), mode="off", yes=True)) == {
        "name": "x",
        "inner": {"size": 3},
        "many": [{"size": 4, "part": 1.0}],
        "mode": "off",
        "yes": True,
        "schema": "1",
    }


def test_none_in_place_of_a_default_survives():
    value = Outer("x", note=None)
    assert restore(Outer, dump(value)) == value


def test_required_fields_that_may_be_nothing_are_left_out_too():
    stalled = events.LoadStalled(identity=report.Identity("r"), at=1.0, load_id="l", phase=None, since=0.0, stack="")
    assert "phase" not in dump(stalled)
    assert restore(events.LoadStalled, dump(stalled)) == stalled


def test_unknown_fields_are_ignored():
    assert restore(Outer, {"name": "x", "color": "red", "inner": {"size": 1, "depth": []}}) == Outer("x", Inner(1))


def test_numbers():
    assert restore(Inner, {"size": 3.0, "part": 1}) == Inner(3, 1.0)
    assert type(restore(Inner, {"size": 3.0}).size) is int
    assert type(restore(Inner, {"size": 1, "part": 1}).part) is float


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ([], "the data: an object"),
        ({}, "name: not there"),
        ({"name": 1}, "name: a string"),
        ({"name": "x", "inner": {"size": 1.5}}, "inner.size: a whole number"),
        ({"name": "x", "inner": {"size": True}}, "inner.size: a whole number"),
        ({"name": "x", "inner": {"size": 1, "part": "1"}}, "inner.part: a number"),
        ({"name": "x", "inner": {"size": 1, "part": 10**400}}, "inner.part: a number that fits"),
        ({"name": "x", "inner": {"size": float("inf")}}, "inner.size: a whole number"),
        ({"name": "x", "many": [{"size": 1}, {}]}, r"many\[1\].size: not there"),
        ({"name": "x", "many": "ab"}, "many: a list"),
        ({"name": "x", "pair": ["a"]}, "pair: a list of 2"),
        ({"name": "x", "mode": "auto"}, "mode: one of 'on', 'off'"),
        ({"name": "x", "mode": []}, "mode: one of"),
        ({"name": "x", "yes": 1}, "yes: true or false"),
    ],
)
def test_wrong_data_is_refused_with_its_place(data, where):
    with pytest.raises(CodecError, match="^" + where):
        restore(Outer, data)


def test_what_is_not_plain_is_refused():
    with pytest.raises(CodecError, match=r"^name: a object is not plain data$"):
        dump(Outer(object()))
    with pytest.raises(CodecError, match="int is no dataclass"):
        dump(1)


FINITE = st.floats(allow_nan=False)
st.register_type_strategy(float, FINITE)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(report.LoadReport))
def test_reports_round_trip(value):
    assert restore(report.LoadReport, dump(value)) == value
    assert restore(report.LoadReport, json.loads(json.dumps(dump(value)))) == value


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(*map(st.builds, events.EVENT_TYPES)))
def test_events_round_trip(value):
    assert restore(type(value), json.loads(json.dumps(dump(value)))) == value
