"""
A wrapper for loads that the agent may refuse: judged before, judged after, and ended in every case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_sentry.loads import Load
    from ckpt_sentry.patches import Patch, Wrap


def watching(
    begin: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Load | None],
    before: Callable[[Load], Callable[[], Any] | None],
    after: Callable[[Load], object],
    end: Callable[[Load, BaseException | None], object],
) -> Wrap:
    """
    Make a wrapper for `hooks.patch`. All four functions are `contained`; `before` and `after` may raise a `Refusal`.

    `begin` returns None to let a call pass unwatched. `before` may return a function of the host: it is called first,
    since it raises what the host would raise when it has begun to write. `end` gets what the caller gets to see.
    """

    def wrap(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            load = begin(original, args, kwargs) if patch.active else None
            if load is None:
                return original(*args, **kwargs)
            try:
                if (early := before(load)) is not None:
                    early()
                result = original(*args, **kwargs)
                after(load)
            except BaseException as error:
                end(load, error)
                raise
            end(load, None)
            return result

        return watched

    return wrap
