"""
Where OpenTelemetry's standard variables send each signal (OpenTelemetry specification: protocol/exporter.md).

OTEL_EXPORTER_OTLP_TIMEOUT is in seconds, as in the Python SDK; more than 10 s are not waited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

    Signal = Literal["traces", "logs", "metrics"]

__all__ = ["SIGNALS", "Target", "exporters", "target", "wants_grpc"]

SIGNALS: Final[tuple[Signal, ...]] = ("logs", "traces", "metrics")
"""The log events first: they are what a report is made from."""

_PREFIX: Final = "OTEL_EXPORTER_OTLP"
_LONGEST_WAIT: Final = 10.0
_GRPC_PORT: Final = 4317
_HTTP_PORT: Final = 4318


ASKING: Final = (
    *(f"OTEL_{signal.upper()}_EXPORTER" for signal in SIGNALS),
    *(f"{_PREFIX}_{signal.upper()}_ENDPOINT" for signal in SIGNALS),
    f"{_PREFIX}_ENDPOINT",
    "OTEL_SDK_DISABLED",
)
"""The variables that say whether anything is to be sent."""


class Target(NamedTuple):
    """
    Where and how one signal is sent; `timeout` in seconds.
    """

    url: str
    headers: Mapping[str, str]
    timeout: float
    compression: str
    certificate: str | None
    client_certificate: str | None
    client_key: str | None


def asked(environ: Mapping[str, str]) -> bool:
    """
    Whether the environment asks for any signal.
    """
    return any(exporters(environ, signal) for signal in SIGNALS)


def is_disabled(environ: Mapping[str, str]) -> bool:
    """
    Whether the environment forbids the SDK to do anything.
    """
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def exporters(environ: Mapping[str, str], signal: Signal) -> frozenset[str]:
    """
    The exporters that the environment asks for: "otlp", "console", both or none.

    An endpoint alone is enough to ask for "otlp"; its absence is not made up for by localhost unless
    OTEL_<SIGNAL>_EXPORTER names "otlp".
    """
    asked = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower()
    if asked:
        return frozenset(name.strip() for name in asked.split(",")) & {"otlp", "console"}
    return frozenset({"otlp"}) if _variable(environ, signal, "ENDPOINT") else frozenset()


def target(environ: Mapping[str, str], signal: Signal) -> Target:
    """
    The target of a signal by the OTEL_EXPORTER_OTLP_* variables, the signal's own before the common ones.
    """
    return Target(
        url=_url(environ, signal),
        headers=_headers(_variable(environ, signal, "HEADERS")),
        timeout=_timeout(_variable(environ, signal, "TIMEOUT")),
        compression=_variable(environ, signal, "COMPRESSION").lower(),
        certificate=_variable(environ, signal, "CERTIFICATE") or None,
        client_certificate=_variable(environ, signal, "CLIENT_CERTIFICATE") or None,
        client_key=_variable(environ, signal, "CLIENT_KEY") or None,
    )


def wants_grpc(environ: Mapping[str, str], signal: Signal) -> bool:
    """
    Whether the environment asks for OTLP over gRPC, which this agent does not speak.
    """
    return _variable(environ, signal, "PROTOCOL").lower() == "grpc"


def _variable(environ: Mapping[str, str], signal: Signal, name: str) -> str:
    """
    The signal's own variable, else the common one; set but empty counts as unset (specification: configuration).
    """
    own = environ.get(f"{_PREFIX}_{signal.upper()}_{name}", "").strip()
    return own or environ.get(f"{_PREFIX}_{name}", "").strip()


def _url(environ: Mapping[str, str], signal: Signal) -> str:
    own = environ.get(f"{_PREFIX}_{signal.upper()}_ENDPOINT", "").strip()
    base = environ.get(f"{_PREFIX}_ENDPOINT", "").strip() or f"http://localhost:{_HTTP_PORT}"
    url = own or f"{base.removesuffix('/')}/v1/{signal}"
    if "://" not in url:
        url = "http://" + url
    parts = urlsplit(url)
    if wants_grpc(environ, signal) and parts.netloc.endswith(f":{_GRPC_PORT}"):
        # The pair of ports on which every Collector listens by default.
        netloc = parts.netloc.removesuffix(str(_GRPC_PORT)) + str(_HTTP_PORT)
        path = parts.path if not own or parts.path.strip("/") else f"/v1/{signal}"
        return urlunsplit(parts._replace(netloc=netloc, path=path))
    return url


def _headers(text: str) -> dict[str, str]:
    """
    "name=value,name=value", URL-encoded, as in W3C Baggage; what has another form is left out.
    """
    pairs = (part.partition("=") for part in text.split(","))
    return {unquote(name).strip(): unquote(value).strip() for name, equals, value in pairs if equals and name.strip()}


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return _LONGEST_WAIT
    return min(seconds, _LONGEST_WAIT) if seconds > 0 else _LONGEST_WAIT
