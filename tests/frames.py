"""Frames of the agent in a traceback."""

from __future__ import annotations

import traceback


def ours(error: BaseException) -> list[str]:
    """
    The functions of the agent that an exception has passed, as its traceback shows them, outermost first.
    """
    return [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith("ckpt_sentry.")
    ]
