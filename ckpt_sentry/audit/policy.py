"""
When a load is refused: the table of the settings, the coverage and what the loader was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from ckpt_sentry.audit.report import Coverage, Finding
from ckpt_sentry.audit.verdict import WRONG_VALUES

Mode = Literal["off", "on", "observe", "strict"]

Demand = Literal["minimum", "something", "anything"]
"""
What a loader promises its caller: to fill the model up to the minimum (accelerate's loaders), to bring in something at
all (`from_pretrained`, whose heads may be new), or no more than what the caller asked for (an explicit strict=False).
"""

_WARNED_ONLY: Final = frozenset({"non_finite_values"})
"""Values that may be wanted as they are: said, and raised under `strict` alone."""


def refuses_coverage(mode: Mode, demand: Demand, coverage: Coverage | None, minimum: float) -> bool:
    """
    Tell whether a load with this coverage (None: not known) is refused. `minimum` is in [0, 1].

    Under `strict` every partial load is; under `observe` and `off` none.
    """
    if coverage is None or mode in ("off", "observe"):
        return False
    if mode == "strict":
        return coverage.judged < 1
    if demand == "minimum":
        return coverage.judged < minimum
    return demand == "something" and coverage.keys == 0


def refuses_values(mode: Mode, findings: Iterable[Finding]) -> bool:
    """
    Tell whether what was found in the values after the load is refused.
    """
    if mode in ("off", "observe"):
        return False
    codes = {finding.code for finding in findings} & WRONG_VALUES
    return bool(codes if mode == "strict" else codes - _WARNED_ONLY)
