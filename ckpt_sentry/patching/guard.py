"""
The agent's own errors: swallowed and logged in production, raised under this package's own tests.

Every entry from the host into the agent goes through `contained`, and a function of the host that is observed as a
whole goes through `around`. The host's own call is never inside a `try` that swallows. A `Refusal` is no own error: it
is meant for the host. Neither is what a signal handler of the host raises while the agent happens to run: a time limit
by `signal.alarm`, torchrun's `SignalException`. What swallows exceptions by itself calls `let_through`.
"""

from __future__ import annotations

import functools
import os

from ckpt_sentry.errors import Refusal
from ckpt_sentry.patching.wrapping_importlib_bootstrap import around, trim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")
    D = TypeVar("D")

__all__ = ["around", "contained", "from_signal", "let_through", "log", "strict", "trim", "under_test"]

_said: set[str] = set()
_STARRED = 0x04
"""CO_VARARGS: the code takes `*args`."""

_OURS = __name__.partition(".")[0]

under_test = False
"""Set by this package's own `tests/conftest.py` alone."""


def contained(point: str, default: Any = None) -> Callable[[Callable[P, T]], Callable[P, T | Any]]:
    """
    Decorate a function of the agent so that it never disturbs the host: on its own `Exception` it returns `default`.

    The error is logged once for each `point`, a dotted name such as "dcp.before". In our own tests it is raised.
    `KeyboardInterrupt` and `SystemExit` are the host's and always pass.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T | Any]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | Any:
            try:
                return function(*args, **kwargs)
            except Refusal:
                raise
            except Exception as error:
                # Spelt out here rather than in a function: no other code of the agent has to work for this to hold.
                raising = False
                try:
                    raising = from_signal(error) or strict()
                    if not raising:
                        log(point, error)
                except Exception:  # noqa: S110
                    pass
                if raising:
                    raise
                return default

        return call

    return decorate


def let_through(error: BaseException) -> None:
    """
    Raise the error again if a signal handler of the host has raised it. For an `except` block that would swallow it.
    """
    if from_signal(error):
        raise error


def from_signal(error: BaseException) -> bool:
    """
    Whether a signal handler of the host has raised this while the agent ran.

    A handler is called from the very frame that it interrupts, and gets that frame as an argument (`signal.signal`).
    """
    traceback = error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        # No handler is ours. And a look at the variables of a frame that holds the error ties a knot, before Python
        # 3.13: the frame keeps what was seen, and with the error all that its callers hold, until a collection.
        if str(frame.f_globals.get("__name__")).partition(".")[0] == _OURS:
            continue
        given = _arguments(frame)
        if any(type(number) is int and where is frame.f_back for number, where in zip(given, given[1:])):  # noqa: B905, RUF007
            return True
    return False


def _arguments(frame: FrameType) -> list[Any]:
    """
    The positional arguments of the function that a frame runs, those of `*args` included.
    """
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _STARRED:
        given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return given


def strict() -> bool:
    """
    Whether own errors are raised: in this package's own tests, unless `CKPT_SENTRY_GUARD=swallow`.

    The tests of a program that has the agent on are that program's business, and so are the jobs that they start.
    """
    return under_test and "PYTEST_CURRENT_TEST" in os.environ and os.environ.get("CKPT_SENTRY_GUARD") != "swallow"


def log(point: str, error: Exception) -> None:
    """
    Say once for each point that something of the agent failed: by the logger "ckpt_sentry", the traceback at DEBUG, or
    on standard error, where the host does not listen to it.
    """
    # Imported here: this module is loaded when the interpreter starts, and neither is free.
    import logging

    from ckpt_sentry import config

    logger = logging.getLogger("ckpt_sentry")
    if point not in _said:
        _said.add(point)
        what = f"{type(error).__name__}: {error}"
        config.warn(f"ckpt_sentry: own error in {point}, the job goes on without this part: {what}")
    logger.debug("ckpt_sentry: own error in %s", point, exc_info=error)
