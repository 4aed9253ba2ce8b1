"""
The garbage collector at rest while this package is imported: what that allocates would have it walk all of torch.
"""

from __future__ import annotations

import _thread
import gc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")


def uncollected(action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """
    Call the action while the garbage collector rests; afterwards it is as it was.

    Where other threads run it is left alone: one of them might switch it meanwhile, and that is not to be undone.
    """
    rests = gc.isenabled() and not _thread._count()
    try:
        if rests:
            gc.disable()
        return action(*args, **kwargs)
    finally:
        if rests:
            gc.enable()
