"""
ckpt_sentry: no checkpoint loads silently wrong, and no failed load is unreadable.

Set `CKPT_SENTRY=1` and start the job as always. The names below are for programs that want more; each is imported at
its first use, so that `import ckpt_sentry` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckpt_sentry._startup import install, uninstall
    from ckpt_sentry.auditor import LoadAuditor
    from ckpt_sentry.errors import LowCoverageError
    from ckpt_sentry.unify import Unified, unify_keys

__all__ = ["LoadAuditor", "LowCoverageError", "Unified", "__version__", "install", "unify_keys", "uninstall"]

__version__ = "0.1.0"

_PUBLIC = {
    "LoadAuditor": "ckpt_sentry.auditor",
    "LowCoverageError": "ckpt_sentry.errors",
    "Unified": "ckpt_sentry.unify",
    "install": "ckpt_sentry._startup",
    "unify_keys": "ckpt_sentry.unify",
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
