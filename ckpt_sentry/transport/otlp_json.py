"""
Events as OpenTelemetry log records in OTLP/JSON, and back; plain dictionaries, no SDK.

The form is that of the OTLP specification (JSON Protobuf encoding): 64-bit integers are strings, ids are hexadecimal,
bytes are base64, names are lowerCamelCase. What the Collector's `file` exporter writes and what the Python SDK's
exporter sends is read as well.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import __version__, names
from ckpt_sentry.core import codec
from ckpt_sentry.masking import clean, clean_path
from ckpt_sentry.transport.events import (
    EVENT_TYPES,
    Event,
    LoadFailing,
    LoadFinished,
    LoadsLeftOut,
    LoadStalled,
    LoadStarted,
    PhaseEntered,
    RankEnded,
    RunEnded,
)

if TYPE_CHECKING:
    from ckpt_sentry.core.report import Identity, LoadReport

Json = dict[str, Any]
Attributes = dict[str, Any]

INFO: Final = 9
WARN: Final = 13
ERROR: Final = 17
"""Severity numbers, as in the OpenTelemetry log data model."""

MAX_DEPTH: Final = 64
"""Nesting of a value beyond which it is refused; an event needs six levels."""

_SEVERITY_TEXT: Final = {INFO: "INFO", WARN: "WARN", ERROR: "ERROR"}
_VERDICT_SEVERITY: Final = {"ok": INFO, "partial": WARN, "diverged": WARN, "stalled": WARN}
_INT64: Final = range(-(2**63), 2**63)
_TYPES: Final[dict[str, type[Event]]] = {event_type.name: event_type for event_type in EVENT_TYPES}


def encode(events: Iterable[Event], *, service_name: str = names.SCOPE) -> Json:
    """
    An `ExportLogsServiceRequest` of these events, in their order.

    Neighbours of the same process share one resource. Credentials are masked.
    """
    return {
        "resourceLogs": [
            {
                "resource": {"attributes": list(_resource(identity, service_name))},
                "scopeLogs": [
                    {
                        "scope": {"name": names.SCOPE, "version": __version__},
                        "logRecords": [_record(clean(event)) for event in group],
                    }
                ],
            }
            for identity, group in groupby(events, key=lambda event: event.identity)
        ]
    }


def line(event: Event) -> bytes:
    """
    The request of one event, as a line of JSON.

    What a process says at each of its loads is encoded once; times, ids, counts and paths are put in.
    """
    if isinstance(event, PhaseEntered | LoadStarted | LoadsLeftOut) and type(event.at) is float:
        if isinstance(event, PhaseEntered) and not event.findings and event.load_id.isalnum():
            return _filled(_phase(event.identity, event.phase), event, event.load_id)
        if isinstance(event, LoadStarted) and event.load_id.isalnum() and event.path != "":
            like = _started(
                event.identity, event.framework, event.entry_point, event.members, None if event.path is None else _PATH
            )
            return _filled(like, event, event.load_id, event.ordinal, event.path)
        if isinstance(event, LoadsLeftOut):
            like = _left_out(event.identity, event.framework, event.entry_point, event.since, event.model)
            return _filled(like, event, number=event.count)
    return dumped(encode((event,)))


def dumped(request: Mapping[str, Any]) -> bytes:
    """
    A request as a line of JSON.
    """
    return _DUMP(request).encode() + b"\n"


_DUMP: Final = json.JSONEncoder(separators=(",", ":")).encode
_LOAD, _PATH, _NUMBER, _AT = "0123456789abcdef" * 2, "/any ckpt_sentry path", 987_654_321, 123_456_789.125
"""What stands in an event for its load, path, ordinal or count, and time until they are put in."""
_NANO: Final = f'"{round(_AT * 1e9)}"'
_PLACES: Final = re.compile(f'({_NANO}|{_AT}|"{_NUMBER}"|"{_LOAD}"|"{_PATH}")')


def _filled(parts: tuple[str, ...], event: Event, load: str = "", number: int = 0, path: str | None = None) -> bytes:
    put = {
        _NANO: f'"{round(event.at * 1e9)}"',
        str(_AT): repr(event.at),
        f'"{_NUMBER}"': f'"{number}"',
        f'"{_LOAD}"': f'"{load}"',
    }
    if path is not None:
        put[f'"{_PATH}"'] = _DUMP(clean_path(path))
    return "".join([put.get(part, part) for part in parts]).encode()


def _parts_of(event: Event) -> tuple[str, ...]:
    """
    The line of an event, cut where something is to be put in.
    """
    return tuple(_PLACES.split(dumped(encode((event,))).decode()))


@lru_cache(maxsize=64)
def _phase(identity: Identity, phase: str) -> tuple[str, ...]:
    return _parts_of(PhaseEntered(identity=identity, at=_AT, load_id=_LOAD, phase=phase))


@lru_cache(maxsize=64)
def _started(
    identity: Identity, framework: str, entry_point: str, members: str | None, path: str | None
) -> tuple[str, ...]:
    return _parts_of(
        LoadStarted(
            identity=identity,
            at=_AT,
            load_id=_LOAD,
            ordinal=_NUMBER,
            framework=framework,
            entry_point=entry_point,
            path=path,
            members=members,
        )
    )


@lru_cache(maxsize=64)
def _left_out(identity: Identity, framework: str, entry_point: str, since: float, model: str) -> tuple[str, ...]:
    return _parts_of(
        LoadsLeftOut(
            identity=identity,
            at=_AT,
            since=since,
            framework=framework,
            entry_point=entry_point,
            count=_NUMBER,
            model=model,
        )
    )


def decode(request: Mapping[str, Any]) -> tuple[list[Event], int]:
    """
    The events in an `ExportLogsServiceRequest`, in order, and how many records were refused.

    Log records of others are passed over. A record with the name of one of our events that cannot be restored, and a
    part of the request that has not the form of OTLP, count as refused. Never raises for what the request holds.
    """
    events: list[Event] = []
    refused = 0
    for record in _log_records(request):
        if record is None:
            refused += 1
            continue
        name = record.get("eventName")
        event_type = _TYPES.get(name) if isinstance(name, str) else None
        if event_type is None:
            continue
        try:
            events.append(_restore(event_type, record))
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            refused += 1
    return events, refused


def attributes(event: Event) -> Attributes:
    """
    The event's facts that one searches and groups by, under the names of `names`; unknown ones are left out.
    """
    identity = event.identity
    found: Attributes = {
        names.ATTR_RUN_ID: identity.run_id,
        names.ATTR_ATTEMPT: identity.attempt,
        names.ATTR_RANK: identity.rank,
        names.ATTR_WORLD_SIZE: identity.world_size,
        names.ATTR_HOST_NAME: identity.node,
        names.ATTR_LOAD_ID: load_id(event),
    }
    if isinstance(event, LoadStarted):
        found |= {
            names.ATTR_ORDINAL: event.ordinal,
            names.ATTR_FRAMEWORK: event.framework,
            names.ATTR_ENTRY_POINT: event.entry_point,
            names.ATTR_PATH: event.path,
        }
    elif isinstance(event, PhaseEntered | LoadStalled):
        found[names.ATTR_PHASE] = event.phase
    elif isinstance(event, LoadFinished):
        found |= report_attributes(event.report)
    error = event.error if isinstance(event, LoadFailing | RankEnded) else None
    if error is not None:
        found |= {
            names.ATTR_ERROR_TYPE: error.type,
            names.ATTR_EXCEPTION_TYPE: error.type,
            names.ATTR_EXCEPTION_MESSAGE: error.message,
            names.ATTR_PHASE: error.phase,
        }
    return {name: value for name, value in found.items() if value is not None and value != ""}


def report_attributes(report: LoadReport) -> Attributes:
    """
    The facts of a report that one searches and groups by; values may be None.
    """
    coverage, error = report.coverage, report.error
    return {
        names.ATTR_ORDINAL: report.ordinal,
        names.ATTR_FRAMEWORK: report.framework,
        names.ATTR_ENTRY_POINT: report.entry_point,
        names.ATTR_VERDICT: report.verdict,
        names.ATTR_PATH: report.path,
        names.ATTR_FORMAT: report.format,
        names.ATTR_STEP: report.step,
        names.ATTR_STEP_SOURCE: report.step_source,
        names.ATTR_COVERAGE_KEYS: coverage.keys if coverage else None,
        names.ATTR_COVERAGE_ELEMENTS: coverage.elements if coverage else None,
        names.ATTR_MISSING: report.missing.count,
        names.ATTR_UNEXPECTED: report.unexpected.count,
        names.ATTR_MISMATCHED: sum(mismatch.count for mismatch in report.mismatched),
        names.ATTR_FINDINGS: sorted({finding.code for finding in report.findings}) or None,
        names.ATTR_BYTES_READ: report.bytes_read,
        names.ATTR_PHASE: error.phase if error else None,
        names.ATTR_ERROR_TYPE: error.type if error else None,
        names.ATTR_EXCEPTION_TYPE: error.type if error else None,
        names.ATTR_EXCEPTION_MESSAGE: error.message if error else None,
    }


def severity(event: Event) -> int:
    """
    The severity number of the log record: ERROR for what lost a load, WARN for what one should look at, else INFO.
    """
    if isinstance(event, LoadFailing):
        return ERROR
    if isinstance(event, LoadStalled):
        return WARN
    if isinstance(event, LoadFinished):
        return _VERDICT_SEVERITY.get(event.report.verdict, ERROR)
    if isinstance(event, RankEnded):
        return INFO if event.how == "exited" and not event.exit_code else ERROR
    if isinstance(event, RunEnded):
        return INFO if event.ok else ERROR
    return INFO


def load_id(event: Event) -> str | None:
    """
    The load that the event belongs to, or None for the events of a whole rank or run.
    """
    if isinstance(event, LoadFinished):
        return event.report.load_id
    return getattr(event, "load_id", None)


def any_value(value: object) -> Json:  # noqa: PLR0911 - one for each kind
    """
    A value as OTLP `AnyValue`.

    An integer outside of 64 bits becomes a string: OTLP has no wider type. Raises TypeError for a type that OTLP does
    not have.
    """
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue" if value in _INT64 else "stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _non_finite(value)}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": key_values(value)}}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [any_value(item) for item in value]}}
    message = f"OTLP has no value for {type(value).__name__}"
    raise TypeError(message)


def key_values(mapping: Mapping[str, object]) -> list[Json]:
    """
    A mapping as a list of OTLP `KeyValue`.
    """
    return [{"key": str(key), "value": any_value(value)} for key, value in mapping.items()]


def plain_value(value: object, *, depth: int = MAX_DEPTH) -> Any:
    """
    The plain value of an OTLP `AnyValue` in JSON form; the inverse of `any_value`, tuples come back as lists.

    Raises ValueError, TypeError or AttributeError for anything that is not of that form, or nested too deeply.
    """
    if not depth:
        message = f"a value is nested in more than {MAX_DEPTH} levels"
        raise ValueError(message)
    if value is None or value == {}:
        return None
    if not isinstance(value, dict) or len(value) != 1:
        message = "an AnyValue holds exactly one value"
        raise ValueError(message)
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [plain_value(item, depth=depth - 1) for item in content.get("values") or ()]
    if kind == "kvlistValue":
        return plain_mapping(content.get("values"), depth=depth - 1)
    convert = _SCALARS.get(kind)
    if convert is None:
        message = "an AnyValue of an unknown kind"
        raise ValueError(message)
    return convert(content)


def plain_mapping(values: list[Json] | None, *, depth: int = MAX_DEPTH) -> dict[str, Any]:
    """
    The plain mapping of a list of OTLP `KeyValue`; raises as `plain_value` does.
    """
    found: dict[str, Any] = {}
    for pair in values or ():
        value = pair.get("value")
        # Most values are strings; the general way takes three times as long.
        text = value.get("stringValue") if isinstance(value, dict) and len(value) == 1 else None
        found[str(pair["key"])] = text if isinstance(text, str) else plain_value(value, depth=depth)
    return found


def _string(content: object) -> str:
    if not isinstance(content, str):
        message = "a stringValue is a string"
        raise TypeError(message)
    return content


def _bool(content: object) -> bool:
    if not isinstance(content, bool):
        message = "a boolValue is true or false"
        raise TypeError(message)
    return content


def _int(content: object) -> int:
    if isinstance(content, bool) or not isinstance(content, int | str) or len(str(content)) > len(str(-(2**63))):
        message = "an intValue is a 64-bit integer"
        raise TypeError(message)
    return int(content)


def _double(content: object) -> float:
    if isinstance(content, bool) or not isinstance(content, int | float | str):
        message = "a doubleValue is a number"
        raise TypeError(message)
    return float(content)


def _bytes(content: object) -> bytes:
    return base64.b64decode(_string(content), validate=True)


_SCALARS: Final[dict[str, Callable[[object], Any]]] = {
    "stringValue": _string,
    "boolValue": _bool,
    "intValue": _int,
    "doubleValue": _double,
    "bytesValue": _bytes,
}


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _record(event: Event) -> Json:
    number = severity(event)
    record = {
        "timeUnixNano": str(round(event.at * 1e9)),
        "severityNumber": number,
        "severityText": _SEVERITY_TEXT[number],
        "eventName": event.name,
        "attributes": key_values(attributes(event)),
        "body": any_value(codec.dump(event)),
    }
    trace_id = load_id(event)
    return record if trace_id is None else {**record, "traceId": trace_id}


def _restore(event_type: type[Event], record: Json) -> Event:
    body = plain_value(record["body"])
    if not isinstance(body, dict):
        message = "the body of an event is a mapping"
        raise TypeError(message)
    event: Event = codec.restore(event_type, body)
    return event


@lru_cache(maxsize=64)
def _resource(identity: Identity, service_name: str) -> tuple[Json, ...]:
    """
    The attributes of a process: the same in all that it says.
    """
    found = {
        names.ATTR_SERVICE_NAME: service_name,
        names.ATTR_HOST_NAME: identity.node,
        names.ATTR_PROCESS_PID: identity.pid,
        names.ATTR_RUN_ID: identity.run_id,
        names.ATTR_RANK: identity.rank,
        names.ATTR_LOCAL_RANK: identity.local_rank,
        names.ATTR_WORLD_SIZE: identity.world_size,
    }
    return tuple(key_values(found))


def _log_records(request: object) -> Iterator[Json | None]:
    """
    Every log record of a request; None for a part that has not the form of OTLP.
    """
    for resource in _parts(request, "resourceLogs"):
        if resource is None:
            yield None
            continue
        for scope in _parts(resource, "scopeLogs"):
            if scope is None:
                yield None
                continue
            yield from _parts(scope, "logRecords")


def _parts(parent: object, field: str) -> Iterator[Json | None]:
    children = parent.get(field) if isinstance(parent, Mapping) else parent
    if children is None:
        return
    if not isinstance(children, list):
        yield None
        return
    for child in children:
        yield child if isinstance(child, dict) else None
