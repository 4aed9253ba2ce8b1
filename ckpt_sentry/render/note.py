"""
The short form of a report that travels with an exception: at most four lines, no colour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_sentry.core import codes
from ckpt_sentry.render.cells import visible
from ckpt_sentry.render.stack import first_line

if TYPE_CHECKING:
    from ckpt_sentry.core.report import Finding, LoadReport


def _weight(finding: Finding) -> int:
    """
    Errors first; before them a rename that was not applied, since it explains them.
    """
    return -1 if finding.code == "renamed_keys" and finding.level != "info" else codes.LEVELS[finding.level]


def _is_raised(report: LoadReport, finding: Finding) -> bool:
    """
    Whether a finding only quotes the exception that the note is added to.
    """
    quoted = codes.fact(finding.facts, codes.QUOTED) if finding.code == "rank_raised" else None
    return quoted is not None and report.error is not None and report.error.message == quoted


def sentence(report: LoadReport) -> str:
    """
    The same in one line: which load, and why.
    """
    step = "" if report.step is None else f" of step {report.step}"
    findings = sorted(report.findings, key=_weight)
    why = first_line(findings[0].text) if findings else report.error.type if report.error else report.verdict
    return visible(f"ckpt_sentry: {report.entry_point}{step}: {why}")


def note(report: LoadReport) -> str:
    """
    Where (rank, step, path), why (the weightiest finding), and what to do next.
    """
    identity = report.identity
    step = "step unknown" if report.step is None else f"step {report.step}"
    where = f"rank {identity.rank} of {identity.world_size} · {step} · {visible(report.path or 'no path')}"
    lines = [f"ckpt_sentry: {report.entry_point} · {where}"]
    findings = sorted(report.findings, key=_weight)
    told = (finding for finding in findings if finding.level != "info" and not _is_raised(report, finding))
    lines += [f"  {visible(finding.text)}" for finding in told][:2]
    if steps := [finding.next for finding in findings if finding.next]:
        lines.append(f"  next: {visible(steps[0])}")
    return "\n".join(lines)
