"""
ckpt_sentry: no checkpoint loads silently wrong, and no failed load is unreadable.

Set `CKPT_SENTRY=1` and start the job as always. The names below are for programs that want more; each is imported at
its first use, so that `import ckpt_sentry` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckpt_sentry._startup import install, uninstall
    from ckpt_sentry.api.auditor import LoadAuditor
    from ckpt_sentry.api.dcp import DCPLoadError, ShapeConflict, audit, precheck
    from ckpt_sentry.api.dcp_aggregator import DCPErrorAggregator
    from ckpt_sentry.errors import LowCoverageError
    from ckpt_sentry.model.unify import Unified, unify_keys

__all__ = [
    "DCPErrorAggregator",
    "DCPLoadError",
    "LoadAuditor",
    "LowCoverageError",
    "ShapeConflict",
    "Unified",
    "__version__",
    "audit",
    "install",
    "precheck",
    "unify_keys",
    "uninstall",
]

__version__ = "0.1.0"

_PUBLIC = {
    "DCPErrorAggregator": "ckpt_sentry.api.dcp_aggregator",
    "DCPLoadError": "ckpt_sentry.api.dcp",
    "LoadAuditor": "ckpt_sentry.api.auditor",
    "LowCoverageError": "ckpt_sentry.errors",
    "ShapeConflict": "ckpt_sentry.api.dcp",
    "Unified": "ckpt_sentry.model.unify",
    "audit": "ckpt_sentry.api.dcp",
    "install": "ckpt_sentry._startup",
    "precheck": "ckpt_sentry.api.dcp",
    "unify_keys": "ckpt_sentry.model.unify",
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
