from __future__ import annotations

import io
import logging
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry import config
from ckpt_sentry.config import Settings

pytestmark = pytest.mark.usefixtures("fresh_settings")
README = Path(__file__).parent.parent / "README.md"


def test_nothing_set_is_the_defaults() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"PATH": "/bin", "CKPT_SENTRYX": "1"}) == Settings()


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("", "off"),
        ("0", "off"),
        ("OFF", "off"),
        ("1", "on"),
        (" 1 ", "on"),
        ("true", "on"),
        ("observe", "observe"),
        ("Strict", "strict"),
    ],
)
def test_mode(text: str, mode: str) -> None:
    assert Settings.from_env({"CKPT_SENTRY": text}) == Settings(mode=mode)  # type: ignore[arg-type]


def test_every_setting() -> None:
    assert Settings.from_env(
        {
            "CKPT_SENTRY": "1",
            "CKPT_SENTRY_MIN_COVERAGE": "0.5",
            "CKPT_SENTRY_ALLOW_MISSING": "head.*, , x?",
            "CKPT_SENTRY_LOG": "JSON",
            "CKPT_SENTRY_DIR": "/records",
            "CKPT_SENTRY_VERIFY": "full",
            "CKPT_SENTRY_ALIGN": "auto",
            "CKPT_SENTRY_STALL_AFTER": "1.5",
            "CKPT_SENTRY_SOCKET": "/tmp/x/socket",
            "CKPT_SENTRY_RUN_ID": "run7",
        }
    ) == Settings(
        mode="on",
        min_coverage=0.5,
        allow_missing=("head.*", "x?"),
        log="json",
        dir="/records",
        verify="full",
        align="auto",
        stall_after=1.5,
        socket="/tmp/x/socket",
        run_id="run7",
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("CKPT_SENTRY_MIN_COVERAGE", "much", '"much" is no number from 0 to 1; 0.99 is used'),
        ("CKPT_SENTRY_MIN_COVERAGE", "nan", '"nan" is no number from 0 to 1; 0.99 is used'),
        ("CKPT_SENTRY_MIN_COVERAGE", "99", '"99" is no number from 0 to 1; 0.99 is used'),
        ("CKPT_SENTRY_LOG", "loud", '"loud" is none of auto, console, json, stdlib, off; auto is used'),
        ("CKPT_SENTRY_VERIFY", "\x1b[31m", r'"\x1b[31m" is none of sample, full, off; sample is used'),
        ("CKPT_SENTRY_ALIGN", "x" * 100, f'"{"x" * 59}…" is none of off, auto; off is used'),
        ("CKPT_SENTRY_STALL_AFTER", "-1", '"-1" is no number of seconds; 300 is used'),
        ("CKPT_SENTRY_STALL_AFTER", "nan", '"nan" is no number of seconds; 300 is used'),
    ],
)
def test_a_bad_value_is_one_problem_and_the_default(name: str, text: str, problem: str) -> None:
    assert Settings.from_env({name: text}) == Settings(problems=(f"{name}={problem}",))


def test_a_bad_switch_switches_on() -> None:
    assert Settings.from_env({"CKPT_SENTRY": "ture"}) == Settings(
        mode="on", problems=('CKPT_SENTRY="ture" is none of 0, 1, observe, strict; 1 is used',)
    )


def test_another_bad_value_does_not_switch_on() -> None:
    assert Settings.from_env({"CKPT_SENTRY": "0", "CKPT_SENTRY_LOG": "loud"}).mode == "off"


def test_unknown_names_with_the_nearest_known() -> None:
    environ = {"CKPT_SENTRY_VERFY": "off", "CKPT_SENTRY_QQQQQQQQQ": "1", "CKPT_SENTRY_GUARD": "swallow"}
    assert Settings.from_env(environ).problems == (
        "CKPT_SENTRY_QQQQQQQQQ is not a setting",
        "CKPT_SENTRY_VERFY is not a setting; did you mean CKPT_SENTRY_VERIFY?",
    )


def test_stalls_can_be_switched_off() -> None:
    assert Settings.from_env({"CKPT_SENTRY_STALL_AFTER": "0"}).stall_after == math.inf
    assert Settings.from_env({"CKPT_SENTRY_STALL_AFTER": "off"}).stall_after == math.inf


@given(
    st.dictionaries(
        st.sampled_from([variable.name for variable in config.VARIABLES]) | st.text().map("CKPT_SENTRY_{}".format),
        st.text(),
    )
)
def test_any_text_yields_settings_and_printable_problems(environ: dict[str, str]) -> None:
    found = Settings.from_env(environ)
    assert len(found.problems) <= len(environ)
    assert all(problem.isprintable() for problem in found.problems)
    assert 0 <= found.min_coverage <= 1
    assert found.stall_after > 0


def test_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SENTRY", "strict")
    first = config.settings()
    monkeypatch.setenv("CKPT_SENTRY", "0")
    assert config.settings() is first
    config.reset()
    assert config.settings().mode == "off"


@pytest.mark.parametrize(
    ("text", "wanted", "mode"),
    [(None, True, "on"), ("", True, "on"), ("0", False, "off"), ("off", False, "off"), ("strict", True, "strict")],
)
def test_switch_on(monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: bool, mode: str) -> None:  # noqa: FBT001
    monkeypatch.delenv("CKPT_SENTRY", raising=False)
    if text is not None:
        monkeypatch.setenv("CKPT_SENTRY", text)
    assert (config.switch_on(), config.settings().mode) == (wanted, mode)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CKPT_SENTRY_LOG", "x")
    monkeypatch.setenv("CKPT_SENTRY_DRI", "/")
    return (
        'ckpt_sentry: CKPT_SENTRY_LOG="x" is none of auto, console, json, stdlib, off; auto is used; '
        "CKPT_SENTRY_DRI is not a setting; did you mean CKPT_SENTRY_DIR?"
    )


def test_one_warning_to_a_logger_that_is_heard(problems: str, caplog: pytest.LogCaptureFixture) -> None:
    config.warn_problems()
    config.warn_problems()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", problems)]


def test_else_to_standard_error(problems: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ckpt_sentry"), "propagate", False)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    config.warn_problems()
    config.warn_problems()
    assert stream.getvalue() == problems + "\n"


@pytest.mark.usefixtures("problems")
@pytest.mark.parametrize("closed", [True, False])
def test_without_standard_error(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:  # noqa: FBT001
    monkeypatch.setattr(logging.getLogger("ckpt_sentry"), "propagate", False)
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    config.warn_problems()


def test_no_problem_no_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    config.warn_problems()
    assert caplog.records == []


def test_origins() -> None:
    found = config.origins({"CKPT_SENTRY": "1", "CKPT_SENTRY_LOG": "loud", "CKPT_SENTRY_ALLOW_MISSING": "a,b"})
    shown = {origin.name: (origin.value, origin.source) for origin in found}
    assert shown == {
        "CKPT_SENTRY": ("on", "environment"),
        "CKPT_SENTRY_MIN_COVERAGE": ("0.99", "default"),
        "CKPT_SENTRY_ALLOW_MISSING": ("a,b", "environment"),
        "CKPT_SENTRY_LOG": ("auto", "default"),
        "CKPT_SENTRY_DIR": ("-", "default"),
        "CKPT_SENTRY_VERIFY": ("sample", "default"),
        "CKPT_SENTRY_ALIGN": ("off", "default"),
        "CKPT_SENTRY_STALL_AFTER": ("300", "default"),
    }


def test_the_table_has_every_field_once() -> None:
    fields = [variable.field for variable in config.VARIABLES]
    assert sorted([*fields, "problems"]) == sorted(Settings.__dataclass_fields__)


@pytest.mark.skipif(not README.exists(), reason="the README is not written yet")
def test_the_readme_names_every_setting() -> None:
    text = README.read_text()
    assert [variable.name for variable in config.VARIABLES if not variable.internal and variable.name not in text] == []
