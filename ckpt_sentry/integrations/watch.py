"""
A wrapper for loads that the agent may refuse: judged before, judged after, and ended in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging

if TYPE_CHECKING:
    from ckpt_sentry.patching.patches import Wrap
    from ckpt_sentry.session.loads import Load


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
    return judging(begin, before, after, end)
