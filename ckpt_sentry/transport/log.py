"""
One structured line for each load, by structlog or the standard library, as CKPT_SENTRY_LOG asks.

The chain is private: `structlog.configure` is never called, and what a host has configured neither changes these lines
nor is changed by them. Fields that the host has bound with `structlog.contextvars` are taken along.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import names
from ckpt_sentry.core.escape import shown
from ckpt_sentry.masking import clean
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import LoadFinished

if TYPE_CHECKING:
    from ckpt_sentry.config import Settings
    from ckpt_sentry.core.report import KeyList, LoadReport
    from ckpt_sentry.transport.events import Event

__all__ = ["write", "write_event"]

_LEVELS: Final = {"ok": logging.INFO, "partial": logging.WARNING, "diverged": logging.WARNING}
"""Levels of verdicts; any other is an error."""
_SEVERITIES: Final = {otlp_json.INFO: logging.INFO, otlp_json.WARN: logging.WARNING, otlp_json.ERROR: logging.ERROR}
_FIRST_KEYS: Final = 3
"""Folded keys that a line names; the report has them all."""

_logger: Final = logging.getLogger(names.SCOPE)
# A library's records are the host's to show; without this, warnings go to the terminal of a host that has no handler.
_logger.addHandler(logging.NullHandler())


def write(report: LoadReport, settings: Settings) -> None:
    """
    Write one line about a load that is over. "auto" and "off" write nothing here. Never raises for a stream.
    """
    _write(names.EVENT_LOAD_FINISHED, _LEVELS.get(report.verdict, logging.ERROR), settings, report_fields, report)


def write_event(event: Event, settings: Settings) -> None:
    """
    Write one line about any event; for the end of a load the same as `write` does.
    """
    if isinstance(event, LoadFinished):
        write(event.report, settings)
    else:
        _write(event.name, _SEVERITIES[otlp_json.severity(event)], settings, event_fields, event)


def report_fields(report: LoadReport) -> dict[str, Any]:
    """
    The flat fields of a report's line, in the order of their weight; what is not known is left out.
    """
    coverage, error = report.coverage, report.error
    return _known(
        {
            "verdict": report.verdict,
            "entry_point": report.entry_point,
            "framework": report.framework,
            "rank": report.identity.rank,
            "world_size": report.identity.world_size,
            "path": _text(report.path),
            "step": report.step,
            "coverage_keys": coverage and round(coverage.keys, 6),
            "coverage_elements": coverage and round(coverage.elements, 6),
            "missing": report.missing.count,
            "missing_keys": _first(report.missing),
            "unexpected": report.unexpected.count,
            "unexpected_keys": _first(report.unexpected),
            "mismatched": sum(mismatch.count for mismatch in report.mismatched),
            "mismatched_keys": _join([mismatch.keys for mismatch in report.mismatched]),
            "findings": ",".join(sorted({finding.code for finding in report.findings})),
            "error_type": _text(error.type if error else None),
            "error_message": _text(error.message if error else None),
            "error_phase": error and error.phase,
            "seconds": round(report.seconds, 3),
            "bytes_read": report.bytes_read,
            "run_id": report.identity.run_id,
            "load_id": report.load_id,
        }
    )


def event_fields(event: Event) -> dict[str, Any]:
    """
    The flat fields of any other event's line.
    """
    error = getattr(event, "error", None)
    return _known(
        {
            "entry_point": getattr(event, "entry_point", None),
            "rank": event.identity.rank,
            "world_size": event.identity.world_size,
            "path": _text(getattr(event, "path", None)),
            "phase": getattr(event, "phase", None) or (error and error.phase),
            "how": getattr(event, "how", None),
            "exit_code": getattr(event, "exit_code", None),
            "signal": getattr(event, "signal", None),
            "ok": getattr(event, "ok", None),
            "error_type": _text(error.type if error else None),
            "error_message": _text(error.message if error else None),
            "run_id": event.identity.run_id,
            "load_id": otlp_json.load_id(event),
        }
    )


def _write(name: str, level: int, settings: Settings, fields: Any, subject: Any) -> None:
    if settings.log == "stdlib":
        if _logger.isEnabledFor(level):
            found = fields(clean(subject))
            text = " ".join(f"{key}={value}" for key, value in found.items())
            _logger.log(level, "%s %s", name, text, extra=found)
    elif settings.log in {"console", "json"}:
        _chain(settings.log, _colours(), os.getpid()).log(level, name, **fields(clean(subject)))


@cache
def _chain(mode: str, colours: bool, pid: int) -> Any:  # noqa: FBT001
    """
    The private chain. One for each process: the lock of a stream may be held while another thread forks.
    """
    del pid
    import structlog

    renderer: Any = structlog.processors.JSONRenderer()
    if mode == "console":
        renderer = structlog.dev.ConsoleRenderer(
            colors=colours, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )
    return structlog.wrap_logger(
        structlog.WriteLogger(_Stderr()),  # type: ignore[arg-type]
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        context_class=dict,
        cache_logger_on_first_use=True,
    )


class _Stderr:
    """
    Whatever `sys.stderr` is at the time: a closed, full or absent one loses the line and nothing else.
    """

    def write(self, text: str) -> None:
        try:
            if sys.stderr is not None:
                sys.stderr.write(text)
        except (OSError, ValueError):
            return

    def flush(self) -> None:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except (OSError, ValueError):
            return


def _colours() -> bool:
    """
    Whether a person looks at it and has nothing against colours (no-color.org: set and not empty).
    """
    try:
        return not os.environ.get("NO_COLOR") and sys.stderr is not None and sys.stderr.isatty()
    except (OSError, ValueError):
        return False


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def _first(keys: KeyList) -> str:
    return _join(list(keys.keys), keys.omitted)


def _join(folds: list[str], omitted: int = 0) -> str:
    """
    The first few folds, which are escaped already, and whether there are more.
    """
    more = omitted or len(folds) > _FIRST_KEYS
    return " ".join(folds[:_FIRST_KEYS]) + (" …" if more else "")


def _text(text: str | None) -> str | None:
    """
    Text from outside as one short line: of several lines the first, which says what it is about.
    """
    return None if text is None else shown(text.strip().partition("\n")[0])
