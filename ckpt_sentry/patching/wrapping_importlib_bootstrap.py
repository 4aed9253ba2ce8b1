"""
The frames of the agent that stand between a program and the function that it calls: one each, and nothing else.

A function of the host may warn with `stacklevel=2`: of the line that called it. Python passes over frames whose file
name has "importlib" and "_bootstrap" in it when it counts (`warnings._is_internal_filename`, and so does
`logging.Logger.findCaller`), since such frames only lead from a line of the program to what it asked for. So do these,
hence the name of this file: the warning names the program's line, once for each line, as without the agent.

What a wrapper calls is bound when it is made: nothing is looked up amid a call of the host, where an error of ours
would be the host's.

From a traceback all frames of the agent go but the outermost one, which an exception cannot lose while it passes.
"""

from __future__ import annotations

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ckpt_sentry.patching.patches import Patch, Wrap

_OURS = __name__.partition(".")[0]


def around(
    before: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    after: Callable[[Any, BaseException | None], object],
) -> Wrap:
    """
    Make a wrapper for `ledger.patch` that watches each call of a function of the host from outside.

    `before(original, args, kwargs)` returns a state, or None to let this call pass unwatched. `after(state, error)` is
    called once, with the exception that the call ended with, or None. Both are `contained` and bound here, once.
    Arguments, result and exception pass through untouched.
    """

    def wrap(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        shorten = trim

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            state = before(original, args, kwargs) if patch.active else None
            if state is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                after(state, error)
                shorten(error)
                raise
            after(state, None)
            return result

        return watched

    return wrap


def reading(
    before: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    came: Callable[[Any, Any], object],
    failed: Callable[[Any, BaseException], object],
) -> Wrap:
    """
    As `around`, for a function whose result is of interest: `came(state, result)` or `failed(state, error)` is called.
    """

    def wrap(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        shorten = trim

        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            state = before(args, kwargs) if patch.active else None
            if state is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                failed(state, error)
                shorten(error)
                raise
            came(state, result)
            return result

        return read

    return wrap


def judging(
    begin: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    before: Callable[[Any], Callable[[], Any] | None],
    after: Callable[[Any, Any], object],
    end: Callable[[Any, BaseException | None], object],
) -> Wrap:
    """
    As `around`, for loads that the agent may refuse: judged before, judged after, and ended in every case.

    `before(load)` and `after(load, result)` may raise a `Refusal`. `before` may return a function of the host: it is
    called first, since it raises what the host would raise when it has begun to write. `end(load, error)` gets what the
    caller gets to see.
    """

    def wrap(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        shorten = trim

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            load = begin(original, args, kwargs) if patch.active else None
            if load is None:
                return original(*args, **kwargs)
            try:
                if (early := before(load)) is not None:
                    early()
                result = original(*args, **kwargs)
                after(load, result)
            except BaseException as error:
                end(load, error)
                shorten(error)
                raise
            end(load, None)
            return result

        return watched

    return wrap


def repeating(
    begin: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    end: Callable[[Any, Any, BaseException | None], bool],
) -> Wrap:
    """
    As `around`, for a function that is called a second time, with `call.args` and `call.kwargs`, where `end` says so.

    `begin(args, kwargs)` returns the call, or None; `end(call, result, error)` may raise a `Refusal`.
    """

    def wrap(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        shorten = trim

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            call = begin(args, kwargs) if patch.active else None
            if call is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if not end(call, None, error):
                    shorten(error)
                    raise
            else:
                if not end(call, result, None):
                    return result
            try:
                result = original(*call.args, **call.kwargs)
            except BaseException as error:
                end(call, None, error)
                shorten(error)
                raise
            end(call, result, None)
            return result

        return load

    return wrap


def trim(error: BaseException) -> None:
    """
    Take the frames of the agent out of a traceback, all but one that is its first entry. They are no news to anybody
    who reads it, and stand between lines that call each other.
    """
    try:
        entry = error.__traceback__
        while entry is not None:
            inner = entry.tb_next
            while inner is not None and _is_ours(inner.tb_frame.f_globals):
                inner = inner.tb_next
            if inner is not entry.tb_next:
                entry.tb_next = inner
            entry = inner
    except Exception:  # noqa: S110 - a longer traceback is no harm
        pass


def _is_ours(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).partition(".")[0] == _OURS
