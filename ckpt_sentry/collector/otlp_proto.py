"""
OTLP requests in Protobuf form as OTLP/JSON dictionaries, and answers in Protobuf form.

`google.protobuf.json_format` is not used: it writes ids as base64 where OTLP/JSON wants hexadecimal digits, enums as
names where it wants numbers, and takes ten times as long.
"""

from __future__ import annotations

import base64
import math
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Signal = Literal["logs", "traces", "metrics"]
Json = dict[str, Any]
Message = Any
Descriptor = Any
FieldDescriptor = Any
"""Classes of protobuf, which has no types of its own."""

_HEX_FIELDS: Final = frozenset({"trace_id", "span_id", "parent_span_id"})
_KEY_VALUE: Final = "opentelemetry.proto.common.v1.KeyValue"
_ANY_VALUE: Final = "opentelemetry.proto.common.v1.AnyValue"
_LENGTH_DELIMITED: Final = 2


def parse(signal: Signal, body: bytes) -> Json:
    """
    The Export…ServiceRequest in `body`, in OTLP/JSON form. Fields at their default are left out.

    Raises ValueError for a body that is not such a message.
    """
    # The generated classes are slow to import and not needed where everybody speaks JSON.
    from google.protobuf.message import DecodeError

    request = _request_type(signal)()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        message = f"not an OTLP request for {signal}: {error}"
        raise ValueError(message) from error
    return to_json(request)


def to_json(message: Message) -> Json:
    """
    Any OTLP message in OTLP/JSON form.
    """
    return _converter(message.DESCRIPTOR)(message)


def response(rejected: int, text: str) -> bytes:
    """
    An Export…ServiceResponse, the same for all signals; `rejected` records of 0 and no text make an empty one.
    """
    partial = _varint_field(1, rejected) + _string_field(2, text)
    return _bytes_field(1, partial) if partial else b""


def status(code: int, text: str) -> bytes:
    """
    A google.rpc.Status; `code` as in google.rpc.Code.
    """
    return _varint_field(1, code) + _string_field(2, text)


@cache
def _request_type(signal: Signal) -> type[Message]:
    if signal == "logs":
        from opentelemetry.proto.collector.logs.v1 import logs_service_pb2

        return logs_service_pb2.ExportLogsServiceRequest
    if signal == "traces":
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        return trace_service_pb2.ExportTraceServiceRequest
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

    return metrics_service_pb2.ExportMetricsServiceRequest


@cache
def _converter(descriptor: Descriptor) -> Callable[[Any], Json]:
    """
    A function that turns messages of one type into dictionaries. What each field needs is found out once.
    """
    special = _SPECIAL.get(descriptor.full_name)
    if special is not None:
        return special
    plans: dict[str, tuple[str, Callable[[Any], Any] | None]] = {}

    def convert(message: Message) -> Json:
        found: Json = {}
        for field, value in message.ListFields():
            plan = plans.get(field.name)
            if plan is None:
                plan = plans[field.name] = (field.json_name, _field_converter(field))
            json_name, convert_value = plan
            found[json_name] = value if convert_value is None else convert_value(value)
        return found

    return convert


def _key_value(pair: Any) -> Json:
    # Most of a request is these, so they do not take the general way: it is three times slower.
    value = pair.value
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return {"key": pair.key, "value": {"stringValue": value.string_value}}
    if kind == "int_value":
        return {"key": pair.key, "value": {"intValue": str(value.int_value)}}
    if kind == "kvlist_value":
        pairs = value.kvlist_value.values
        return {"key": pair.key, "value": {"kvlistValue": {"values": [_key_value(pair) for pair in pairs]}}}
    return {"key": pair.key, "value": _any_value(value)}


def _any_value(value: Any) -> Json:
    kind = value.WhichOneof("value")
    if kind not in _KINDS:  # none, or one that only profiles use
        return {}
    json_name, convert = _KINDS[kind]
    content = getattr(value, kind)
    return {json_name: content if convert is None else convert(content)}


def _field_converter(field: FieldDescriptor) -> Callable[[Any], Any] | None:
    one = _one_converter(field)
    if not _is_repeated(field):
        return one
    return list if one is None else lambda values: [one(value) for value in values]


def _is_repeated(field: FieldDescriptor) -> bool:
    # `is_repeated` came with protobuf 6.31, where `label` is deprecated.
    known = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if known is None else known)


def _one_converter(field: FieldDescriptor) -> Callable[[Any], Any] | None:
    if field.cpp_type == field.CPPTYPE_MESSAGE:
        return _converter(field.message_type)
    if field.type == field.TYPE_BYTES:
        return bytes.hex if field.name in _HEX_FIELDS else _base64
    if field.cpp_type in {field.CPPTYPE_INT64, field.CPPTYPE_UINT64}:
        return str
    if field.cpp_type in {field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT}:
        return _double
    return None


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _double(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


_KINDS: Final[dict[str, tuple[str, Callable[[Any], Any] | None]]] = {
    "string_value": ("stringValue", None),
    "bool_value": ("boolValue", None),
    "int_value": ("intValue", str),
    "double_value": ("doubleValue", _double),
    "bytes_value": ("bytesValue", _base64),
    "array_value": ("arrayValue", lambda array: {"values": [_any_value(item) for item in array.values]}),
    "kvlist_value": ("kvlistValue", lambda pairs: {"values": [_key_value(pair) for pair in pairs.values]}),
}
_SPECIAL: Final[dict[str, Callable[[Any], Json]]] = {_KEY_VALUE: _key_value, _ANY_VALUE: _any_value}


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >> 7:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varint_field(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value) if value else b""


def _bytes_field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _varint(len(value)) + value


def _string_field(number: int, text: str) -> bytes:
    return _bytes_field(number, text.encode("utf-8", "replace")) if text else b""
