"""
The entry point for `opentelemetry-instrument` and for programs that call instrumentors themselves.

```
opentelemetry-instrument torchrun …
CkptSentryInstrumentor().instrument()
```

`opentelemetry-instrumentation` is no dependency: who runs the command has it. Without it this module cannot be
imported, and nothing else needs it. `CKPT_SENTRY=0` keeps the agent off here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from ckpt_sentry import _startup
from ckpt_sentry.package import _instruments

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["CkptSentryInstrumentor"]


class CkptSentryInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """
    Switches the agent on by `instrument()` and off by `uninstrument()`. It uses the global OpenTelemetry providers.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        return _instruments

    def _instrument(self, **_: Any) -> None:
        _startup.install_by(_startup.OPENTELEMETRY)

    def _uninstrument(self, **_: Any) -> None:
        _startup.uninstall()
