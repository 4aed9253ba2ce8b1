"""
The agent's own errors: swallowed and logged in production, raised under pytest.

Every entry from the host into the agent goes through `contained`. The host's own call is never inside it.
"""

from __future__ import annotations

import functools
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")
    D = TypeVar("D")

_said: set[str] = set()


def contained(point: str, default: Any = None) -> Callable[[Callable[P, T]], Callable[P, T | Any]]:
    """
    Decorate a function of the agent so that it never disturbs the host: on its own `Exception` it returns `default`.

    The error is logged once for each `point`, a dotted name such as "dcp.before". Under pytest it is raised.
    `KeyboardInterrupt` and `SystemExit` are the host's and always pass.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T | Any]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                # Spelt out here rather than in a function: no other code of the agent has to work for this to hold.
                raising = False
                try:
                    raising = strict()
                    if not raising:
                        log(point, error)
                except Exception:  # noqa: S110
                    pass
                if raising:
                    raise
                return default

        return call

    return decorate


def strict() -> bool:
    """
    Whether own errors are raised: under pytest, unless `CKPT_SENTRY_GUARD=swallow` (for tests of this very module).
    """
    return "PYTEST_CURRENT_TEST" in os.environ and os.environ.get("CKPT_SENTRY_GUARD") != "swallow"


def log(point: str, error: Exception) -> None:
    """
    Say once for each point, to the logger "ckpt_sentry", that something of the agent failed; the traceback at DEBUG.
    """
    # Imported here: this module is loaded when the interpreter starts, and `logging` is not free.
    import logging

    logger = logging.getLogger("ckpt_sentry")
    if point not in _said:
        _said.add(point)
        logger.warning(
            "ckpt_sentry: own error in %s, the job goes on without this part: %s: %s", point, type(error).__name__, error
        )
    logger.debug("ckpt_sentry: own error in %s", point, exc_info=error)
