"""
How many good loads the records only count, see `repeats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_sentry.transport.events import LoadsLeftOut


class LeftOut:
    """
    The good loads that records count only. All ranks make the same ones: what one of them counts is not added up.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str, str], int] = {}

    def add(self, event: LoadsLeftOut) -> None:
        """
        Take in one count.
        """
        kind = event.identity.run_id, event.framework, event.entry_point, event.model
        self._counts[kind] = max(self._counts.get(kind, 0), event.count)

    def of(self, run_id: str | None) -> int:
        """
        How many loads of a run (None: of all runs) are only counted.
        """
        return sum(count for kind, count in self._counts.items() if run_id in (None, kind[0]))
