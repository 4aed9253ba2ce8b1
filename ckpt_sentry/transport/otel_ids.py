"""
Span ids that no two ranks share, and the ids of the root that all ranks share.

The SDK's generator draws from the global `random`: ranks that call `random.seed(0)` get the same span ids, and each
draw moves the host's own sequence. This one asks the operating system, so a fork needs no new seed either.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.id_generator import IdGenerator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Ids"]


class Ids(IdGenerator):
    """
    Ids from `entropy` (a number of bytes to that many random bytes), but for those that `given` dictates.
    """

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy
        self._dictated = threading.local()

    @contextmanager
    def given(self, trace_id: int, span_id: int) -> Iterator[None]:
        """
        The next span that this thread starts within the block has these ids (the trace id only if it has no parent).
        """
        self._dictated.ids = (trace_id, span_id)
        try:
            yield
        finally:
            self._dictated.ids = None

    def generate_trace_id(self) -> int:
        dictated: tuple[int, int] | None = getattr(self._dictated, "ids", None)
        return dictated[0] if dictated else self._draw(16)

    def generate_span_id(self) -> int:
        dictated: tuple[int, int] | None = getattr(self._dictated, "ids", None)
        self._dictated.ids = None
        return dictated[1] if dictated else self._draw(8)

    def is_trace_id_random(self) -> bool:
        # A derived trace id is a hash: as evenly spread as a random one, which is all that samplers ask for.
        return True

    def _draw(self, size: int) -> int:
        """
        A number of `size` bytes, not 0: neither a trace nor a span may have that id.
        """
        while not (number := int.from_bytes(self._entropy(size), "big")):
            pass
        return number
