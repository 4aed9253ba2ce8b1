"""
The structured line: fields, levels, streams that fail, and a host's structlog that stays as it is.
"""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import structlog

from ckpt_sentry.config import Settings
from ckpt_sentry.core.report import Coverage, Finding, Identity, KeyList, LoadError, LoadReport, ShapeMismatch
from ckpt_sentry.transport.events import LoadFailing, LoadFinished, LoadStarted
from ckpt_sentry.transport.log import report_fields, write, write_event

WHO = Identity("run7", 1, 1, 4, 4, "node0", 17, 0)
REPORT = LoadReport(
    load_id="ab" * 16,
    ordinal=0,
    identity=WHO,
    framework="dcp",
    entry_point="dcp.load",
    verdict="failed",
    started_at=1000.0,
    ended_at=1000.25,
    path="/data/step-1200",
    step=1200,
    coverage=Coverage(0.986, 0.999),
    missing=KeyList(5, ("a.{0-1}", "b", "c", "d")),
    mismatched=(ShapeMismatch("head.weight", 1, "head", (32, 8), (16, 8)),),
    findings=(Finding("shape_mismatch", "error", "…"), Finding("missing_keys", "error", "…")),
    error=LoadError("builtins.ValueError", "Size mismatch\nand more", "plan"),
)
FIELDS = {
    "verdict": "failed",
    "entry_point": "dcp.load",
    "framework": "dcp",
    "rank": 1,
    "world_size": 4,
    "path": "/data/step-1200",
    "step": 1200,
    "coverage_keys": 0.986,
    "coverage_elements": 0.999,
    "missing": 5,
    "missing_keys": "a.{0-1} b c …",
    "unexpected": 0,
    "mismatched": 1,
    "mismatched_keys": "head.weight",
    "findings": "missing_keys,shape_mismatch",
    "error_type": "builtins.ValueError",
    "error_message": "Size mismatch",
    "error_phase": "plan",
    "seconds": 0.25,
    "bytes_read": 0,
    "run_id": "run7",
    "load_id": "ab" * 16,
}
JSON = Settings(log="json")
CONSOLE = Settings(log="console")
STDLIB = Settings(log="stdlib")


def test_fields() -> None:
    assert report_fields(REPORT) == FIELDS


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write(REPORT, JSON)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", found.pop("timestamp"))
    assert found == FIELDS | {"event": "ckpt_sentry.load.finished", "level": "error"}


@pytest.mark.parametrize(
    ("verdict", "level"),
    [("ok", "info"), ("partial", "warning"), ("diverged", "warning"), ("no_op", "error"), ("stalled", "error")],
)
def test_levels(capsys: pytest.CaptureFixture[str], verdict: Any, level: str) -> None:
    write(replace(REPORT, verdict=verdict), JSON)
    assert json.loads(capsys.readouterr().err)["level"] == level


def test_console_without_a_terminal_has_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    write(REPORT, CONSOLE)
    (line,) = capsys.readouterr().err.splitlines()
    assert "\x1b" not in line
    assert re.search(r"\[error *\] ckpt_sentry\.load\.finished +verdict=failed entry_point=dcp\.load", line)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: str, coloured: bool) -> None:  # noqa: FBT001
    monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    write(REPORT, CONSOLE)
    assert ("\x1b[" in terminal.getvalue()) is coloured


def test_text_from_outside_is_escaped_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    error = LoadError("E\x07", "\x1b]0;title\x07", None)
    write(replace(REPORT, path="/data/\x1b[31m" + "x" * 10_000, error=error), CONSOLE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "\\x1b[31mxxx" in line
    assert len(line) < 1500


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_silent_modes(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, mode: Any) -> None:
    write(REPORT, Settings(log=mode))
    assert (capsys.readouterr().err, caplog.records) == ("", [])


def test_stdlib_has_flat_extra_fields(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    write(REPORT, STDLIB)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ckpt_sentry", logging.ERROR)
    assert record.getMessage().startswith("ckpt_sentry.load.finished verdict=failed entry_point=dcp.load")
    assert {name: record.__dict__[name] for name in FIELDS} == FIELDS
    assert capsys.readouterr().err == ""


def test_events(capsys: pytest.CaptureFixture[str]) -> None:
    shared: dict[str, Any] = {"identity": WHO, "at": 1000.0, "load_id": "ab" * 16}
    write_event(LoadStarted(**shared, ordinal=0, framework="dcp", entry_point="dcp.load", path="/data"), JSON)
    write_event(LoadFailing(**shared, error=LoadError("E", "why", "plan")), JSON)
    write_event(LoadFinished(identity=WHO, at=1.0, report=REPORT), JSON)
    started, failing, finished = map(json.loads, capsys.readouterr().err.splitlines())
    for found in (started, failing):
        del found["timestamp"]
    same = {"rank": 1, "world_size": 4, "run_id": "run7", "load_id": "ab" * 16}
    assert started == same | {
        "event": "ckpt_sentry.load.started",
        "level": "info",
        "entry_point": "dcp.load",
        "path": "/data",
    }
    assert failing == same | {
        "event": "ckpt_sentry.load.failing",
        "level": "error",
        "phase": "plan",
        "error_type": "E",
        "error_message": "why",
    }
    assert (finished["event"], finished["verdict"]) == ("ckpt_sentry.load.finished", "failed")


def test_a_hosts_configuration_neither_changes_the_line_nor_is_changed(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> dict[str, Any]:
        raise AssertionError

    structlog.configure(processors=[refuse])
    before = structlog.get_config()
    try:
        with structlog.contextvars.bound_contextvars(experiment="e1"):
            write(REPORT, JSON)
        assert structlog.get_config() == before
    finally:
        structlog.reset_defaults()
    assert json.loads(capsys.readouterr().err)["experiment"] == "e1"


class Broken(io.StringIO):
    """
    A stream on a full disk.
    """

    def write(self, _text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        raise ValueError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), Broken()], ids=["none", "closed", "full"])
@pytest.mark.parametrize("settings", [JSON, CONSOLE], ids=["json", "console"])
def test_a_stream_that_fails_loses_the_line_alone(
    monkeypatch: pytest.MonkeyPatch, stream: Any, settings: Settings
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    write(REPORT, settings)
    again = io.StringIO()
    monkeypatch.setattr(sys, "stderr", again)
    write(REPORT, settings)
    assert again.getvalue().count("\n") == 1


@pytest.mark.parametrize(("mode", "imported"), [("stdlib", False), ("off", False), ("auto", False), ("json", True)])
def test_structlog_is_imported_only_where_it_writes(mode: str, imported: bool) -> None:  # noqa: FBT001
    code = f"""
import sys
from ckpt_sentry.core.report import Identity, LoadReport
from ckpt_sentry.config import Settings
from ckpt_sentry.transport.log import write
write(LoadReport(load_id="0", ordinal=0, identity=Identity("r"), framework="dcp", entry_point="e", verdict="ok",
               started_at=0.0, ended_at=0.0), Settings(log={mode!r}))
print("structlog" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, bool(done.stderr)) == (f"{imported}\n", imported)
