"""
What an OTLP/HTTP receiver answers, in the type of the request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from ckpt_sentry.collector import http1, otlp_proto

if TYPE_CHECKING:
    from ckpt_sentry.collector.http1 import HttpError
    from ckpt_sentry.collector.otlp_proto import Signal

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"

_REJECTED: Final[dict[Signal, str]] = {
    "logs": "rejectedLogRecords",
    "traces": "rejectedSpans",
    "metrics": "rejectedDataPoints",
}
_RPC_CODES: Final = {400: 3, 401: 16, 404: 5, 405: 12, 408: 4, 413: 8, 429: 8, 431: 8, 501: 12, 503: 14}
"""google.rpc.Code of a status; INVALID_ARGUMENT (3) for other 4xx, INTERNAL (13) for other 5xx."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """
    How many records of a request the sink did not take, and why; the sender is told (OTLP: partial success).
    """

    count: int
    text: str


def good(signal: Signal, rejection: Rejection | None, media_type: str, headers: dict[str, str]) -> bytes:
    """
    The answer to a request that was taken in, wholly or but for the records in `rejection`.
    """
    count, text = (rejection.count, rejection.text) if rejection else (0, "")
    if media_type == PROTOBUF:
        body = otlp_proto.response(count, text)
    elif rejection:
        body = json.dumps({"partialSuccess": {_REJECTED[signal]: str(count), "errorMessage": text}}).encode()
    else:
        body = b"{}"
    return http1.answer(HTTPStatus.OK, media_type, body, headers)


def refusal(error: HttpError, media_type: str, headers: dict[str, str]) -> bytes:
    """
    The answer to a refused request: a google.rpc.Status in the type of the request.
    """
    code = _RPC_CODES.get(error.status.value, 3 if error.status.value < HTTPStatus.INTERNAL_SERVER_ERROR else 13)
    if media_type == PROTOBUF:
        body = otlp_proto.status(code, error.text)
    else:
        body = json.dumps({"code": code, "message": error.text}).encode()
    return http1.answer(error.status, media_type, body, {**error.headers, **headers})
