from __future__ import annotations

import math

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Exemplar, HistogramDataPoint
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from ckpt_sentry.collector import otlp_proto
from ckpt_sentry.telemetry import otlp_json

TRACE = bytes(range(16))
SPAN = bytes(range(8))


def any_value(value: object) -> AnyValue:
    """The message for a plain value."""
    if value is None:
        return AnyValue()
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
    if isinstance(value, dict):
        pairs = [KeyValue(key=key, value=any_value(item)) for key, item in value.items()]
        return AnyValue(kvlist_value=KeyValueList(values=pairs))
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value", bytes: "bytes_value"}
    return AnyValue(**{kinds[type(value)]: value})  # type: ignore[arg-type]


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


@given(values)
def test_values_have_the_same_form_as_ours(value: object) -> None:
    message = AnyValue.FromString(any_value(value).SerializeToString())
    assert otlp_proto.to_json(message) == otlp_json.any_value(value)
    assert repr(otlp_json.plain_value(otlp_proto.to_json(message))) == repr(value)


def test_nan() -> None:
    assert otlp_proto.to_json(AnyValue(double_value=math.nan)) == {"doubleValue": "NaN"}
    assert otlp_proto.to_json(AnyValue(double_value=-math.inf)) == {"doubleValue": "-Infinity"}


def test_a_span_with_hexadecimal_ids_and_numeric_enums() -> None:
    span = Span(
        trace_id=TRACE,
        span_id=SPAN,
        parent_span_id=SPAN,
        name="checkpoint.load",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=2**63,
        links=[Span.Link(trace_id=TRACE, span_id=SPAN)],
        status=SpanStatus(code=SpanStatus.STATUS_CODE_ERROR),
        attributes=[KeyValue(key="nv.dl.rank", value=AnyValue(int_value=0))],
    )
    assert otlp_proto.to_json(span) == {
        "traceId": "000102030405060708090a0b0c0d0e0f",
        "spanId": "0001020304050607",
        "parentSpanId": "0001020304050607",
        "name": "checkpoint.load",
        "kind": 1,
        "startTimeUnixNano": "9223372036854775808",
        "links": [{"traceId": "000102030405060708090a0b0c0d0e0f", "spanId": "0001020304050607"}],
        "status": {"code": 2},
        "attributes": [{"key": "nv.dl.rank", "value": {"intValue": "0"}}],
    }


def test_exemplars_have_hexadecimal_ids_too() -> None:
    point = HistogramDataPoint(
        count=3,
        sum=1.5,
        bucket_counts=[1, 2],
        explicit_bounds=[0.5],
        exemplars=[Exemplar(trace_id=TRACE, span_id=SPAN, as_double=0.0)],
    )
    assert otlp_proto.to_json(point) == {
        "count": "3",
        "sum": 1.5,
        "bucketCounts": ["1", "2"],
        "explicitBounds": [0.5],
        "exemplars": [{"traceId": "000102030405060708090a0b0c0d0e0f", "spanId": "0001020304050607", "asDouble": 0.0}],
    }


def test_a_log_record() -> None:
    record = LogRecord(time_unix_nano=5, severity_number=9, event_name="e", trace_id=TRACE, body=AnyValue(), flags=1)
    assert otlp_proto.to_json(record) == {
        "timeUnixNano": "5",
        "severityNumber": 9,
        "eventName": "e",
        "traceId": "000102030405060708090a0b0c0d0e0f",
        "body": {},
        "flags": 1,
    }


@pytest.mark.parametrize(
    ("signal", "request_type"), [("traces", ExportTraceServiceRequest), ("metrics", ExportMetricsServiceRequest)]
)
@given(data=st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(signal: otlp_proto.Signal, request_type: type, data: bytes) -> None:
    try:
        message = request_type.FromString(data)
    except DecodeError:
        with pytest.raises(ValueError, match=f"not an OTLP request for {signal}: "):
            otlp_proto.parse(signal, data)
        return
    assert sorted(otlp_proto.parse(signal, data)) == sorted(MessageToDict(message))


@given(st.integers(0, 2**63 - 1), st.text())
def test_answers_are_the_messages_of_the_specification(rejected: int, text: str) -> None:
    answer = ExportLogsServiceResponse.FromString(otlp_proto.response(rejected, text))
    assert answer.partial_success.rejected_log_records == rejected
    assert answer.partial_success.error_message == text
    status = Status.FromString(otlp_proto.status(rejected % 17, text))
    assert (status.code, status.message) == (rejected % 17, text)


def test_a_good_answer_is_empty() -> None:
    assert otlp_proto.response(0, "") == b""
