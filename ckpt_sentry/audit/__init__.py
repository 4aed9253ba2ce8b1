"""
Pure functions on names, shapes and numbers: what a load did, and what to think of it.

Nothing in here imports torch or OpenTelemetry, so every function can be called on data that was written elsewhere. The
package bears the name of the public function `ckpt_sentry.audit(model, path)`, so it can be called as well.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Audit(ModuleType):
    def __call__(self, model_or_state_dict: Any, path: Any) -> Any:
        """
        Report on a load without loading: see `ckpt_sentry.dcp_api.audit`.
        """
        import importlib

        return importlib.import_module("ckpt_sentry.dcp_api").audit(model_or_state_dict, path)


sys.modules[__name__].__class__ = _Audit
