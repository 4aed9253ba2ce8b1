"""
Imports that wait for their first use.

What explains a failure is half of this package, and no good load needs it. It is named like any import, for type
checkers and for the import contract, and stands at run time for what is imported when it is called or looked into:

    if TYPE_CHECKING:
        from ckpt_sentry.core.fold import fold
        from ckpt_sentry.integrations import dcp_errors
    else:
        fold = later("ckpt_sentry.core.fold:fold")
        dcp_errors = later("ckpt_sentry.integrations.dcp.errors")

A function, or a class that is only called, may stand so, and a module; not what `isinstance` or `except` is given. An
import that fails then, as where no file can be opened any more, fails in the function that wanted it: `guard` holds it.
"""

from __future__ import annotations

import sys
from typing import Any

from ckpt_sentry.patching.pause import uncollected


class _Later:
    """
    A module, or what it defines under a name. Asks anew each time: the module may be reloaded or patched.
    """

    __slots__ = ("__module", "__name")

    def __init__(self, module: str, name: str) -> None:
        self.__module = module
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(_found(self.__module, self.__name), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _found(self.__module, self.__name)(*args, **kwargs)


def later(reference: str) -> Any:
    """
    What stands for "module" or "module:name" until it is used.
    """
    module, _, name = reference.partition(":")
    return _Later(module, name)


def _found(module: str, name: str) -> Any:
    if module not in sys.modules:
        uncollected(__import__, module)
    # Free by now, and waits where another thread is importing it.
    __import__(module)
    found = sys.modules[module]
    return getattr(found, name) if name else found
