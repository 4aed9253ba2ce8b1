"""
ckpt_sentry: no checkpoint loads silently wrong, and no failed load is unreadable.

Set `CKPT_SENTRY=1` and start the job as always. The names below are for programs that want more; each is imported at
its first use, so that `import ckpt_sentry` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckpt_sentry._startup import install, uninstall

__all__ = ["__version__", "install", "uninstall"]

__version__ = "0.1.0"

_PUBLIC = {
    "install": "ckpt_sentry._startup",
    "uninstall": "ckpt_sentry._startup",
}
"""Public name: the module that defines it."""


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
