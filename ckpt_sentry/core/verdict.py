"""
One word for a load (docs/findings.md), from what is known about it on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ckpt_sentry.core import codes
from ckpt_sentry.core.report import Coverage, Finding, LoadError, Proof, Verdict

WRONG_VALUES: Final = codes.of_verdict("wrong_values")
"""Findings that say: the keys match, the values do not."""


def verdict(
    *,
    error: LoadError | None = None,
    coverage: Coverage | None = None,
    findings: Iterable[Finding] = (),
    proof: Proof | None = None,
) -> Verdict:
    """
    Judge a load. What raised has failed, whatever else is known; then nothing entered, wrong values, a part.

    `coverage` is after what the caller allows to be missing. Without it (nothing could be counted) a load that returned
    is taken to be whole. `diverged` and `stalled` are for those who see all ranks, or the clock.
    """
    if error is not None:
        return "failed"
    if coverage is not None and coverage.keys == 0:
        return "no_op"
    if (proof is not None and proof.differing.count) or any(finding.code in WRONG_VALUES for finding in findings):
        return "wrong_values"
    if coverage is not None and coverage.judged < 1:
        return "partial"
    return "ok"
