"""
How a DCP load ended: whose failure it was, what it was, and the same exception with the report attached.

The exception object, its type and its `args` are never changed. Notes and one attribute are added, and the text of a
`CheckpointException` says each distinct failure once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config
from ckpt_sentry.core.report import Finding, LoadError, LoadReport, Verdict
from ckpt_sentry.core.verdict import verdict
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.integrations.dcp import facts as dcp_facts
from ckpt_sentry.integrations.exceptions import INTERRUPTS, attach, describe, tell
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core import peers, raised
    from ckpt_sentry.core.findings import percent
    from ckpt_sentry.core.policy import Policy
    from ckpt_sentry.formats import neighbours
    from ckpt_sentry.formats.dcp import diagnosis as files
    from ckpt_sentry.integrations.dcp import keys as dcp_keys
    from ckpt_sentry.render.note import note
    from ckpt_sentry.session.loads import Load
else:
    files = later("ckpt_sentry.formats.dcp.diagnosis")
    neighbours = later("ckpt_sentry.formats.neighbours")
    percent = later("ckpt_sentry.core.findings:percent")
    peers = later("ckpt_sentry.core.peers")
    Policy = later("ckpt_sentry.core.policy:Policy")
    raised = later("ckpt_sentry.core.raised")
    note = later("ckpt_sentry.render.note:note")
    dcp_keys = later("ckpt_sentry.integrations.dcp.keys")

_PARTIAL = "dcp.load(…, planner=DefaultLoadPlanner(allow_partial_load=True))"
_NOT_COMPARED = Finding("not_compared", "info", "what was loaded could not be compared with what was asked for")


def note_own(load: Load, exc: BaseException) -> None:
    """
    This rank has raised inside a collective: find out why while its files and arguments are at hand, and say it now.
    """
    if load.error is not None:
        return
    if isinstance(exc, INTERRUPTS):
        load.failing(describe(exc, load.phase))
        return
    tell(exc)
    error = _described(load, exc)
    if load.facts.coverage is None:
        dcp_facts.note_plan(load, None)
    _explain(load, exc, error)
    load.failing(error)


def conclude(load: Load, exc: BaseException | None) -> None:
    """
    Finish the load with its report; where it failed, attach the report to the exception.

    :raises LowCoverageError: it returned, but not with what the settings ask for.
    """
    if exc is None:
        _returned(load)
        return
    error = _whose(load, exc)
    report = load.finish(_judged(load, error), error)
    if not isinstance(exc, INTERRUPTS):
        attach(exc, note(report), report)


def cut_short(load: Load, exc: BaseException | None) -> None:
    """
    Finish a load that could not be looked at to its end. Names and plan hold where planner and reader are torch's own;
    of others nothing is known.
    """
    if dcp_facts.is_watched(load):
        load.facts = replace(load.facts, coverage=None, utilisation=None, findings=())
    load.facts = load.facts.with_findings([_NOT_COMPARED])
    error = None if exc is None else load.error or describe(exc, load.phase)
    load.finish(_judged(load, error), error)


def _returned(load: Load) -> None:
    """
    The load came back: look at what it left behind, and refuse that where the settings say so.
    """
    dcp_facts.look_after(load)
    path = load.notes.get("path")
    if path and neighbours.newer_unfinished(path) is not None:
        load.facts = load.facts.with_findings(files.newer_unfinished(path))
    if load.facts.coverage is None and not any(one.code == _NOT_COMPARED.code for one in load.facts.findings):
        load.facts = load.facts.with_findings([_NOT_COMPARED])
    judged = _judged(load, None)
    if not _is_refused(load, judged):
        load.finish(judged, None)
        return
    refusal = LowCoverageError(_refused(load, judged))
    error = describe(refusal, load.phase)
    load.failing(error)
    report = load.finish(judged, error)
    attach(refusal, note(report), report)
    raise refusal


def _is_refused(load: Load, judged: Verdict) -> bool:
    """
    DCP itself raises for a missing key, so a part was asked for, if not in words then by a planner: only the mode
    "strict" refuses it. Nothing at all is another matter.
    """
    mode = config.settings().mode
    if judged == "wrong_values":
        return mode == "strict"
    coverage = load.facts.coverage
    if load.notes.get("nothing") and not load.notes.get("partial"):
        return Policy(mode=mode).refusal(coverage) is not None
    return Policy(mode=mode, tolerated=True).refusal(coverage) is not None


def _judged(load: Load, error: LoadError | None) -> Verdict:
    return verdict(error=error, coverage=load.facts.coverage, findings=load.facts.findings)


def _refused(load: Load, judged: Verdict) -> str:
    facts = load.facts
    worst = next((one.text for one in facts.findings if one.level != "info"), "")
    part = "" if facts.coverage is None else f" {percent(facts.coverage.judged)} of what was asked for was loaded."
    step = "" if facts.step is None else f", step {facts.step}"
    what = "wrong values" if judged == "wrong_values" else "a partial load"
    path = shown_path(facts.path or "no path")
    return f"{load.entry_point} refused, {what}: {path}{step}, rank {load.identity.rank}.{part} {worst}"


def _whose(load: Load, exc: BaseException) -> LoadError:
    """
    The error to report: what this rank raised itself; else what its peers raised, marked as theirs.
    """
    if load.error is not None:
        return load.error
    if (failures := _failures(exc)) and _inner(exc) is None:
        load.facts = load.facts.with_findings([peers.failed_finding(failures)])
        return describe(exc, load.phase)
    error = _described(load, exc)
    if isinstance(exc, INTERRUPTS):
        return error
    if peers.is_loss(error):
        load.facts = load.facts.with_findings([peers.lost_finding(error)])
        return error
    _explain(load, exc, error)
    load.failing(error)
    return error


def _inner(exc: BaseException) -> LoadError | None:
    """
    What ended another load, of which this exception has come: one that a planner or a `Stateful` of this one made.
    """
    report = BaseException.__getattribute__(exc, "__dict__").get("ckpt_sentry")
    return report.error if isinstance(report, LoadReport) else None


def _way() -> str:
    """
    How a part is loaded. The mode "strict" refuses what is not allowed, however it was asked for.
    """
    return f"{_PARTIAL}, and name them in CKPT_SENTRY_ALLOW_MISSING" if config.settings().mode == "strict" else _PARTIAL


def _described(load: Load, exc: BaseException) -> LoadError:
    """
    An exception as data; one that has ended another load by what that load's report says of it.
    """
    error, inner = describe(exc, load.phase), _inner(exc)
    return error if inner is None else replace(error, message=f"{inner.type}: {inner.message}")


def _failures(exc: BaseException) -> Any:
    """
    What a `CheckpointException` brings from all ranks; nothing for any other exception.

    The class is looked up rather than imported: targets that are no part of DCP use this module, and DCP takes seconds
    to import.
    """
    api = sys.modules.get("torch.distributed.checkpoint.api")
    return exc.failures if api is not None and isinstance(exc, api.CheckpointException) else {}


def _explain(load: Load, exc: BaseException, error: LoadError) -> None:
    """
    Add why this rank raised: what the keys say, else what the files say, else the exception itself.
    """
    path = load.notes.get("path")
    if not (is_of_keys := raised.is_planners(error.message)):
        dcp_facts.unsay(load, error.message)
    facts = load.facts
    by_keys = is_of_keys and bool(facts.findings)
    if by_keys and (facts.checkpoint is None or facts.checkpoint.keys):
        load.facts = replace(facts, findings=dcp_keys.decisive(facts.findings, _way()))
        return
    found = list(files.diagnose(path, error=exc, rank=load.notes.get("group_rank"))) if path is not None else []
    if by_keys:
        # A checkpoint that holds nothing: why, instead of that it does.
        keys = dcp_keys.decisive(facts.findings, _way())
        load.facts = replace(facts, findings=(*found, *(one for one in keys if not found or one.code != "no_overlap")))
        return
    if not any(finding.level == "error" for finding in found):
        text = f"{error.type}: {error.message}" if error.message else error.type
        found.append(Finding("rank_raised", "error", text))
    load.facts = facts.with_findings(found)
