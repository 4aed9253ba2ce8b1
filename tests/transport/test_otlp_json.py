from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry import names
from ckpt_sentry.core.report import Coverage, Finding, Identity, KeyList, LoadError, LoadReport, Phase, ShapeMismatch
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import (
    Event,
    LoadFailing,
    LoadFinished,
    LoadStalled,
    LoadStarted,
    PhaseEntered,
    RankEnded,
    RunEnded,
)

LOAD = "0af7651916cd43dd8448eb211c80319c"
RANK_2 = Identity("run7-a1b2", 2, 2, 4, 4, "n1", 4711)
RANK_3 = Identity("run7-a1b2", 3, 3, 4, 4, "n1", 4712)
REPORT = LoadReport(
    load_id=LOAD,
    ordinal=0,
    identity=RANK_2,
    framework="dcp",
    entry_point="dcp.load",
    verdict="failed",
    started_at=1.0,
    ended_at=1.5,
    path="/data/step-1200",
    step=1200,
    missing=KeyList(2, ("model.adapter{0-1}",)),
    mismatched=(ShapeMismatch("scale", 3, "", (), (1,)),),
    coverage=Coverage(0.986, 1.0),
    findings=(Finding("shape_mismatch", "error", "text"), Finding("missing_keys", "error", "text", "do")),
    phases=(Phase("plan", 0.25),),
    error=LoadError("builtins.ValueError", "no", "plan"),
)
EVENTS: list[Event] = [
    LoadStarted(
        identity=RANK_2, at=1.25, load_id=LOAD, ordinal=0, framework="dcp", entry_point="dcp.load", path="/data"
    ),
    PhaseEntered(identity=RANK_2, at=1.5, load_id=LOAD, phase="plan"),
    LoadFailing(identity=RANK_3, at=2.0, load_id=LOAD, error=LoadError("builtins.OSError", "gone")),
    LoadFinished(identity=RANK_2, at=2.5, report=REPORT),
    LoadStalled(identity=RANK_2, at=3.0, load_id=LOAD, phase=None, since=2.0, stack="File x\n"),
    RankEnded(identity=RANK_2, at=4.0, how="killed", signal="SIGKILL"),
    RunEnded(identity=RANK_2, at=5.0, ok=False),
]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def through_json(request: object) -> object:
    return json.loads(json.dumps(request))


@given(values)
def test_a_value_survives_the_way_through_json(value: object) -> None:
    back = otlp_json.plain_value(through_json(otlp_json.any_value(value)))
    assert back == value
    assert repr(back) == repr(value)


def test_values_have_the_forms_of_the_specification() -> None:
    value = {"i": 7, "d": 1.5, "b": True, "s": "", "y": b"\x00\xff", "n": None, "l": [], "m": {}, "t": (1,)}
    assert otlp_json.key_values(value) == [
        {"key": "i", "value": {"intValue": "7"}},
        {"key": "d", "value": {"doubleValue": 1.5}},
        {"key": "b", "value": {"boolValue": True}},
        {"key": "s", "value": {"stringValue": ""}},
        {"key": "y", "value": {"bytesValue": "AP8="}},
        {"key": "n", "value": {}},
        {"key": "l", "value": {"arrayValue": {"values": []}}},
        {"key": "m", "value": {"kvlistValue": {"values": []}}},
        {"key": "t", "value": {"arrayValue": {"values": [{"intValue": "1"}]}}},
    ]


@pytest.mark.parametrize(("number", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_numbers_that_json_does_not_have_are_words(number: float, text: str) -> None:
    assert otlp_json.any_value(number) == {"doubleValue": text}
    assert repr(otlp_json.plain_value({"doubleValue": text})) == repr(number)


def test_an_integer_of_more_than_64_bits_is_a_string() -> None:
    assert otlp_json.any_value(2**63) == {"stringValue": "9223372036854775808"}
    assert otlp_json.any_value(-(2**63)) == {"intValue": "-9223372036854775808"}


def test_a_type_that_otlp_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="OTLP has no value for complex"):
        otlp_json.any_value(1j)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({"intValue": 7}, 7),
        ({"doubleValue": 3}, 3.0),
        ({"doubleValue": "1e3"}, 1000.0),
        ({"arrayValue": {}}, []),
        ({"kvlistValue": {}}, {}),
        ({"kvlistValue": {"values": [{"key": "a"}]}}, {"a": None}),
        (None, None),
    ],
)
def test_forms_that_other_writers_use_are_read(value: object, plain: object) -> None:
    assert repr(otlp_json.plain_value(value)) == repr(plain)


@pytest.mark.parametrize(
    "value",
    [
        7,
        {"intValue": "x"},
        {"intValue": True},
        {"intValue": "9" * 40},
        {"doubleValue": []},
        {"stringValue": 1},
        {"boolValue": "true"},
        {"bytesValue": "%"},
        {"otherValue": 1},
        {"intValue": 1, "stringValue": "1"},
        {"arrayValue": 3},
        {"kvlistValue": {"values": [{}]}},
    ],
)
def test_other_forms_raise(value: object) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, LookupError)):
        otlp_json.plain_value(value)


def test_a_deep_value_is_refused() -> None:
    value: object = {"intValue": "1"}
    for _ in range(100):
        value = {"arrayValue": {"values": [value]}}
    with pytest.raises(ValueError, match="nested in more than 64 levels"):
        otlp_json.plain_value(value)


def test_events_survive_in_their_order() -> None:
    request = through_json(otlp_json.encode(EVENTS))
    assert isinstance(request, dict)
    assert otlp_json.decode(request) == (EVENTS, 0)
    ranks = [
        otlp_json.plain_mapping(part["resource"]["attributes"])[names.ATTR_RANK] for part in request["resourceLogs"]
    ]
    assert ranks == [2, 3, 2]


def test_a_record_as_a_whole() -> None:
    request = otlp_json.encode([EVENTS[1]])
    (resource_logs,) = request["resourceLogs"]
    assert otlp_json.plain_mapping(resource_logs["resource"]["attributes"]) == {
        "service.name": "ckpt_sentry",
        "host.name": "n1",
        "process.pid": 4711,
        "ckpt_sentry.run_id": "run7-a1b2",
        "nv.dl.rank": 2,
        "nv.dl.local_rank": 2,
        "nv.dl.world_size": 4,
    }
    (scope_logs,) = resource_logs["scopeLogs"]
    assert scope_logs["scope"]["name"] == "ckpt_sentry"
    (record,) = scope_logs["logRecords"]
    assert record.pop("body") == otlp_json.any_value(
        {
            "identity": {
                "run_id": "run7-a1b2",
                "rank": 2,
                "local_rank": 2,
                "world_size": 4,
                "local_world_size": 4,
                "node": "n1",
                "pid": 4711,
            },
            "at": 1.5,
            "load_id": LOAD,
            "phase": "plan",
        }
    )
    assert otlp_json.plain_mapping(record.pop("attributes")) == {
        "ckpt_sentry.run_id": "run7-a1b2",
        "ckpt_sentry.attempt": 0,
        "nv.dl.rank": 2,
        "nv.dl.world_size": 4,
        "host.name": "n1",
        "ckpt_sentry.load_id": LOAD,
        "ckpt_sentry.phase": "plan",
    }
    assert record == {
        "timeUnixNano": "1500000000",
        "severityNumber": 9,
        "severityText": "INFO",
        "eventName": "ckpt_sentry.load.phase",
        "traceId": LOAD,
    }


def test_attributes_of_a_report() -> None:
    found = otlp_json.attributes(EVENTS[3])
    assert found == {
        "ckpt_sentry.run_id": "run7-a1b2",
        "ckpt_sentry.attempt": 0,
        "nv.dl.rank": 2,
        "nv.dl.world_size": 4,
        "host.name": "n1",
        "ckpt_sentry.load_id": LOAD,
        "ckpt_sentry.ordinal": 0,
        "ckpt_sentry.framework": "dcp",
        "ckpt_sentry.entry_point": "dcp.load",
        "ckpt_sentry.verdict": "failed",
        "ckpt_sentry.checkpoint.path": "/data/step-1200",
        "ckpt_sentry.checkpoint.step": 1200,
        "ckpt_sentry.coverage.keys": 0.986,
        "ckpt_sentry.coverage.elements": 1.0,
        "ckpt_sentry.keys.missing": 2,
        "ckpt_sentry.keys.unexpected": 0,
        "ckpt_sentry.keys.mismatched": 3,
        "ckpt_sentry.findings": ["missing_keys", "shape_mismatch"],
        "ckpt_sentry.bytes_read": 0,
        "ckpt_sentry.phase": "plan",
        "error.type": "builtins.ValueError",
        "exception.type": "builtins.ValueError",
        "exception.message": "no",
    }


def test_severities() -> None:
    assert [otlp_json.severity(event) for event in EVENTS] == [9, 9, 17, 17, 13, 17, 17]
    assert otlp_json.severity(RankEnded(identity=RANK_2, at=0.0, how="exited", exit_code=0)) == otlp_json.INFO
    assert otlp_json.severity(RankEnded(identity=RANK_2, at=0.0, how="exited", exit_code=1)) == otlp_json.ERROR
    assert otlp_json.severity(RunEnded(identity=RANK_2, at=0.0, ok=True)) == otlp_json.INFO


def test_records_of_others_are_passed_over_and_bad_ones_of_ours_counted() -> None:
    request = otlp_json.encode([EVENTS[1]])
    records = request["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    records[:0] = [
        {"body": {"stringValue": "hello"}},
        {"eventName": "other.event"},
        {"eventName": ["ckpt_sentry.load.phase"]},
        {"eventName": "ckpt_sentry.load.phase"},
        {"eventName": "ckpt_sentry.load.phase", "body": {"stringValue": "no mapping"}},
        {"eventName": "ckpt_sentry.load.phase", "body": {"kvlistValue": {"values": [{"key": "at"}]}}},
        "no record",
    ]
    assert otlp_json.decode(request) == ([EVENTS[1]], 4)


@pytest.mark.parametrize(
    ("request_", "refused"),
    [
        ({}, 0),
        ({"resourceSpans": [{}]}, 0),
        ({"resourceLogs": None}, 0),
        ({"resourceLogs": 3}, 1),
        ({"resourceLogs": [3, {"scopeLogs": "x"}, {"scopeLogs": [None]}, {"scopeLogs": [{"logRecords": {}}]}]}, 4),
    ],
)
def test_a_request_without_form_is_counted(request_: dict[str, object], refused: int) -> None:
    assert otlp_json.decode(request_) == ([], refused)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["key", "value", "values", "kvlistValue", "arrayValue", "intValue", "doubleValue", "at"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


@given(json_values, st.sampled_from([event.name for event in EVENTS]))
def test_nothing_in_a_record_raises(body: object, name: str) -> None:
    record = {"eventName": name, "body": body}
    events, refused = otlp_json.decode({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]})
    assert (events, refused) == ([], 1)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("path", [None, "", "/a/step-7", 's3://key:secret@b/"x" ünd', "/any ckpt_sentry path"])
@pytest.mark.parametrize("at", [0.0, 5, 1_700_000_000.123456, 123_456_789.125])
def test_the_line_of_an_event_is_its_request(event: Event, path: str | None, at: float) -> None:
    changed = replace(event, at=at)
    if isinstance(changed, LoadStarted):
        changed = replace(changed, path=path, ordinal=3)
    for _ in range(2):
        assert json.loads(otlp_json.line(changed)) == otlp_json.encode((changed,))
