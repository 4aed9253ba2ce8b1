"""The frames that stand between a program and the function that it calls."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from typing import Any

import pytest

from ckpt_sentry.patching import wrapping_importlib_bootstrap as wrapping
from ckpt_sentry.patching.patches import Patch
from tests.frames import ours


def passing(*_: Any) -> Any:
    return types.SimpleNamespace(args=(), kwargs={})


def nothing(*_: Any) -> None:
    return None


WRAPS = {
    "around": wrapping.around(passing, nothing),
    "unwatched": wrapping.around(nothing, nothing),
    "reading": wrapping.reading(passing, nothing, nothing),
    "judging": wrapping.judging(passing, nothing, nothing, nothing),
    "repeating": wrapping.repeating(passing, nothing),
}


@pytest.fixture(params=WRAPS)
def wrap(request: pytest.FixtureRequest) -> Any:
    return WRAPS[request.param]


def wrapped(wrap: Any, function: Any) -> Any:
    return wrap(function, Patch(sys.modules[__name__], "wrapped", function))


def line() -> int:
    return sys._getframe(1).f_lineno


def test_a_warning_names_the_line_of_the_program(wrap):
    def warn() -> None:
        warnings.warn("old", FutureWarning, stacklevel=2)

    watched = wrapped(wrap, warn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        globals().pop("__warningregistry__", None)
        for _ in range(3):
            watched()
            first = line() - 1
        watched()
        second = line() - 1
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, first), (__file__, second)]


def test_a_log_record_names_the_line_of_the_program(wrap, caplog):
    watched = wrapped(wrap, lambda: logging.getLogger("host").warning("old", stacklevel=2))
    watched()
    expected = line() - 1
    (record,) = caplog.records
    assert (record.pathname, record.lineno) == (__file__, expected)


def test_one_frame_of_the_agent_is_left_in_a_traceback(wrap):
    def fail() -> None:
        raise ValueError("mine")

    watched = fail
    for _ in range(3):
        watched = wrapped(wrap, watched)
    with pytest.raises(ValueError, match=r"^mine$") as caught:
        watched()
    assert len(ours(caught.value)) <= (3 if wrap is WRAPS["unwatched"] else 1)
    assert caught.value.__traceback__.tb_frame.f_code.co_name == "test_one_frame_of_the_agent_is_left_in_a_traceback"


def test_a_second_attempt_that_fails_is_the_hosts_error():
    def fail() -> None:
        raise ValueError("mine")

    watched = wrapped(wrapping.repeating(passing, lambda *_: True), fail)
    with pytest.raises(ValueError, match=r"^mine$") as caught:
        watched()
    assert len(ours(caught.value)) == 1
