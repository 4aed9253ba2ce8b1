"""
Exceptions of the host: as data for a report, and with the report attached.

For all integrations; imports nothing of the host.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ckpt_sentry.core.report import LoadError
from ckpt_sentry.masking import mask_text
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core.generators import readable
else:
    readable = later("ckpt_sentry.core.generators:readable")

TEXT = "_ckpt_sentry_text"
"""Attribute of an exception: its text without generators, made where its frames were."""

LONGEST_MESSAGE = 2_000
"""Characters of an exception's text that go into a report: planners may list every key they know."""

_LONGEST_READ = 32 * LONGEST_MESSAGE
"""Characters that are searched for credentials: a secret that is cut off here is far beyond what is kept."""

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def describe(exc: BaseException, phase: str | None) -> LoadError:
    """
    An exception as data. The text is cut and holds no credentials.
    """
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return LoadError(name, mask_text(text_of(exc)[:_LONGEST_READ])[:LONGEST_MESSAGE], phase)


def attach(exc: BaseException, text: str, report: Any) -> None:
    """
    Add the report as the attribute `ckpt_sentry` and its short text as a note, once.
    """
    # Past the class of the exception, which may be frozen or have ways of its own.
    held = BaseException.__getattribute__(exc, "__dict__")
    if held.get("ckpt_sentry") is not None:
        return
    held["ckpt_sentry"] = report
    if hasattr(BaseException, "add_note"):
        with contextlib.suppress(Exception):
            BaseException.add_note(exc, text)


def keep_text(exc: BaseException) -> None:
    """
    Keep on the exception what its text means, while the frames are there that know.
    """
    text = raw_text(exc)
    told = readable(text, exc)
    if told != text:
        BaseException.__getattribute__(exc, "__dict__")[TEXT] = told


def text_of(exc: BaseException) -> str:
    """
    The text of an exception, readable as far as it was kept (see `keep_text`).
    """
    told = BaseException.__getattribute__(exc, "__dict__").get(TEXT)
    return told if isinstance(told, str) else readable(raw_text(exc), exc)


def raw_text(exc: BaseException) -> str:
    """
    `str(exc)`, whatever its class makes of it.
    """
    try:
        return str(exc)
    except Exception:
        return f"<{type(exc).__qualname__} without a text>"
