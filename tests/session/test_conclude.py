"""
The one end of a load, whichever integration has begun it.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_sentry import LowCoverageError
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Coverage, Finding, LoadReport
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.session import conclude, loads
from ckpt_sentry.session.loads import Load
from tests.agents import Agent

WANTED = Inventory({"a": Entry((2,), "float32"), "b": Entry((2,), "float32")})
HALF = Coverage(0.5, 0.5)
NOTHING = Coverage(0.0, 0.0)


def begun(path: str | None = "/data/step-7", framework: str = "toy") -> Load:
    load = loads.begin(framework, f"{framework}.load", path)
    assert load is not None
    return load


def codes(report: LoadReport) -> list[str]:
    return [finding.code for finding in report.findings]


def test_a_load_that_returned(agent: Agent) -> None:
    load = begun()
    load.facts = replace(load.facts, coverage=Coverage(1.0, 1.0))
    report = conclude.end(load, None)
    assert report == agent.last()
    assert (report.verdict, report.error, report.framework) == ("ok", None, "toy")
    assert loads.current() is None


def test_an_exception_gets_the_report_and_a_note(agent: Agent) -> None:
    error = OSError(5, "no such luck")
    report = conclude.end(begun(), error)
    assert (error.args, error.ckpt_sentry) == ((5, "no such luck"), report)  # type: ignore[attr-defined]
    assert (report.verdict, report.error.type, codes(report)) == ("failed", "OSError", ["rank_raised"])
    assert agent.last() == report


def test_why_it_raised_comes_before_that_it_did(agent: Agent) -> None:
    broken = Finding("truncated_file", "error", "the file ends early")
    report = conclude.end(begun(), ValueError("x"), lambda _, __: [broken])
    assert codes(report) == ["truncated_file"]
    beside = Finding("partly_overwritten", "warning", "half of it")
    report = conclude.end(begun(), ValueError("x"), lambda _, __: [beside])
    assert codes(report) == ["rank_raised", "partly_overwritten"]
    assert agent.last() == report


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_interrupt_is_explained_to_nobody(agent: Agent, interrupt: BaseException) -> None:
    report = conclude.end(begun(), interrupt, lambda _, __: pytest.fail("asked"))
    assert (report.verdict, report.findings) == ("failed", ())
    assert not hasattr(interrupt, "ckpt_sentry")
    assert agent.last() == report


def test_a_peer_that_went_away_is_no_failure_of_this_rank(agent: Agent) -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    load = begun()
    report = conclude.end(load, error, lambda _, __: pytest.fail("asked"))
    assert codes(report) == ["peer_failed"]
    assert load.error is None
    assert agent.last() == report


def test_the_exception_of_this_rank_stays_the_one_that_is_reported(agent: Agent) -> None:
    load = begun()
    load.enter("read")
    conclude.note_raised(load, ValueError("mine"), lambda _, __: [])
    conclude.note_raised(load, ValueError("later"), lambda _, __: pytest.fail("asked"))
    report = conclude.end(load, RuntimeError("what the job made of it"), lambda _, __: pytest.fail("asked"))
    assert (report.error.message, report.error.phase) == ("mine", "read")
    assert agent.last() == report


@pytest.mark.parametrize(
    ("mode", "asked", "coverage", "minimum"),
    [
        ("1", "whole", HALF, "99 %"),
        ("1", "something", NOTHING, "99 %"),
        ("1", "something", HALF, None),
        ("1", "part", NOTHING, None),
        ("observe", "whole", NOTHING, None),
        ("strict", "whole", HALF, "100 %"),
        ("strict", "something", HALF, "100 %"),
        ("strict", "part", HALF, "100 %"),
    ],
)
def test_what_is_refused(
    agent: Agent, mode: str, asked: conclude.Asked, coverage: Coverage, minimum: str | None
) -> None:
    agent.mode(mode)
    load = begun()
    load.facts = replace(load.facts, coverage=coverage)
    error = conclude.refusal("toy.load", load.facts, WANTED, ["b"], asked=asked)
    assert (error is None) == (minimum is None)
    if error is not None:
        assert f"the minimum is {minimum}" in str(error)
        report = conclude.end(load, error)
        # What the agent refuses is judged by what came in, and says so itself: no note repeats it.
        assert (report.verdict, error.ckpt_sentry) == ("no_op" if coverage is NOTHING else "partial", report)
        assert not hasattr(error, "__notes__")
        assert report.error.phase is None
    load.leave()


def test_a_refusal_before_anything_is_written_says_so(agent: Agent) -> None:
    load = begun()
    load.facts = replace(load.facts, coverage=NOTHING)
    error = conclude.refusal("toy.load", load.facts, WANTED, (), asked="whole", is_before=True)
    assert error is not None
    assert error.is_untouched
    assert "the model is untouched" in str(error)
    assert conclude.end(load, error).error.phase == "setup"
    assert agent.last().verdict == "no_op"


def test_the_refusal_of_a_load_within_is_the_failure_of_this_one(agent: Agent) -> None:
    inner = begun(framework="inner")
    error = LowCoverageError("too little")
    first = conclude.end(inner, error)
    report = conclude.end(begun(), error)
    assert error.ckpt_sentry == first
    assert (report.verdict, codes(report)) == ("failed", ["rank_raised"])
    assert [one.framework for one in agent.reports()] == ["inner", "toy"]


@pytest.fixture
def swallowing(agent: Agent) -> Agent:
    agent.monkeypatch.setenv("CKPT_SENTRY_GUARD", "swallow")
    return agent


def erring(_load: Any) -> None:
    raise ArithmeticError("ours")


def test_a_look_that_fails_leaves_a_load_that_was_not_compared(swallowing: Agent) -> None:
    load = begun()
    load.facts = replace(load.facts, coverage=Coverage(1.0, 1.0))
    with pytest.raises(ArithmeticError):
        conclude.look(load, erring)
    report = conclude.end(load, None)
    assert (report.verdict, report.coverage, codes(report)) == ("ok", Coverage(1.0, 1.0), ["not_compared"])
    assert swallowing.last() == report


def test_what_only_the_look_could_confirm_is_dropped(swallowing: Agent) -> None:
    load = begun()
    load.facts = replace(load.facts, coverage=NOTHING, findings=(Finding("missing_keys", "warning", "2 keys"),))
    load.is_provisional = True
    with pytest.raises(ArithmeticError):
        conclude.look(load, erring)
    report = conclude.end(load, None)
    assert (report.verdict, report.coverage, codes(report)) == ("ok", None, ["not_compared"])
    assert swallowing.last() == report


def test_a_load_has_an_end_where_its_explanation_fails(swallowing: Agent) -> None:
    error = ValueError("the host's")

    def explain(*_: Any) -> list[Finding]:
        raise ArithmeticError("ours")

    load = begun()
    conclude.end(load, error, explain)
    report = swallowing.last()
    assert (report.verdict, report.error.message, codes(report)) == ("failed", "the host's", ["not_compared"])
    assert loads.current() is None
