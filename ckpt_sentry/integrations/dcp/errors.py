"""
Why a DCP load failed, and what the settings refuse of one that came back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_sentry import config
from ckpt_sentry.core.verdict import verdict
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.integrations.dcp import facts as dcp_facts
from ckpt_sentry.patching.later import later
from ckpt_sentry.session.conclude import NOT_COMPARED, policy

if TYPE_CHECKING:
    from ckpt_sentry.core import raised
    from ckpt_sentry.core.findings import percent
    from ckpt_sentry.core.report import Finding, LoadError, Verdict
    from ckpt_sentry.formats.dcp import diagnosis as files
    from ckpt_sentry.formats.dcp import neighbours
    from ckpt_sentry.integrations.dcp import keys as dcp_keys
    from ckpt_sentry.session.conclude import Asked
    from ckpt_sentry.session.loads import Load
else:
    files = later("ckpt_sentry.formats.dcp.diagnosis")
    neighbours = later("ckpt_sentry.formats.dcp.neighbours")
    percent = later("ckpt_sentry.core.findings:percent")
    raised = later("ckpt_sentry.core.raised")
    dcp_keys = later("ckpt_sentry.integrations.dcp.keys")

_PARTIAL = "dcp.load(…, planner=DefaultLoadPlanner(allow_partial_load=True))"


def judge(load: Load) -> None:
    """
    Judge a load that came back, by what it left behind.

    :raises LowCoverageError: the settings refuse that.
    """
    dcp_facts.look_after(load)
    path = dcp_facts.observed(load).path
    if path and neighbours.newer_unfinished(path) is not None:
        load.facts = load.facts.with_findings(files.newer_unfinished(path))
    if load.facts.coverage is None and all(one.code != NOT_COMPARED.code for one in load.facts.findings):
        load.facts = load.facts.with_findings([NOT_COMPARED])
    judged = verdict(coverage=load.facts.coverage, findings=load.facts.findings)
    if _is_refused(load, judged):
        raise LowCoverageError(_refused(load, judged))


def _is_refused(load: Load, judged: Verdict) -> bool:
    """
    DCP itself raises for a missing key, so a part was asked for, if not in words then by a planner: only the mode
    "strict" refuses it. Nothing at all is another matter.
    """
    if judged == "wrong_values":
        return config.settings().mode == "strict"
    state = dcp_facts.observed(load)
    asked: Asked = "something" if state.is_nothing and not state.is_partial else "part"
    return policy(asked).refusal(load.facts.coverage) is not None


def _refused(load: Load, judged: Verdict) -> str:
    facts = load.facts
    worst = next((one.text for one in facts.findings if one.level != "info"), "")
    part = "" if facts.coverage is None else f" {percent(facts.coverage.judged)} of what was asked for was loaded."
    step = "" if facts.step is None else f", step {facts.step}"
    what = "wrong values" if judged == "wrong_values" else "a partial load"
    path = shown_path(facts.path or "no path")
    return f"{load.entry_point} refused, {what}: {path}{step}, rank {load.identity.rank}.{part} {worst}"


def _way() -> str:
    """
    How a part is loaded. The mode "strict" refuses what is not allowed, however it was asked for.
    """
    return f"{_PARTIAL}, and name them in CKPT_SENTRY_ALLOW_MISSING" if config.settings().mode == "strict" else _PARTIAL


def explain(load: Load, exc: BaseException, error: LoadError) -> list[Finding]:
    """
    Say why this rank raised: what the keys say, else what the files say.
    """
    if load.facts.coverage is None:
        dcp_facts.note_plan(load, None)
    state = dcp_facts.observed(load)
    if not (is_of_keys := raised.is_planners(error.message)):
        dcp_facts.unsay(load, error.message)
    facts = load.facts
    by_keys = is_of_keys and bool(facts.findings)
    if by_keys and (facts.checkpoint is None or facts.checkpoint.keys):
        load.facts = replace(facts, findings=dcp_keys.decisive(facts.findings, _way()))
        return []
    found = [] if state.path is None else [*files.diagnose(state.path, error=exc, rank=state.group_rank)]
    if not by_keys:
        return found
    # A checkpoint that holds nothing: why, instead of that it does.
    keys = dcp_keys.decisive(facts.findings, _way())
    load.facts = replace(facts, findings=(*found, *(one for one in keys if not found or one.code != "no_overlap")))
    return []
