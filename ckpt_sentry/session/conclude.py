"""
The end of a load: whether it is refused, whose failure it was, its verdict, and what its exception carries.

An integration hands over what it has observed, as the facts of its `Load`; what follows from them is decided here, the
same for all of them:

* `refusal` and `disproof` make the error that the settings ask for (docs/policy.md); the integration raises it where
  the host's own call has run, or before anything is written where policy says so.
* `look` runs what an integration makes of a load that came back.
* `note_raised` takes an exception where it is raised, on its rank, before it travels or vanishes.
* `end` finishes the load with its one report, in every case: also where something of the agent's own fails.

The exception object that the caller gets, its type and its `args` are never changed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Literal

from ckpt_sentry import config
from ckpt_sentry.core import codes
from ckpt_sentry.core.policy import Policy
from ckpt_sentry.core.report import Finding, LoadError, LoadReport
from ckpt_sentry.core.verdict import verdict
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.session.exceptions import INTERRUPTS, attach, describe, keep_text
from ckpt_sentry.session.loads import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt_sentry.core import peers
    from ckpt_sentry.core.inventory import Inventory
    from ckpt_sentry.core.report import Facts
    from ckpt_sentry.render import refusals
    from ckpt_sentry.render.note import note
    from ckpt_sentry.session.loads import Load

    Explain = Callable[[BaseException, LoadError], Iterable[Finding]]
    """Why a load raised, as far as files and arguments tell; empty where the exception itself has to do."""
else:
    note = later("ckpt_sentry.render.note:note")
    peers = later("ckpt_sentry.core.peers")
    refusals = later("ckpt_sentry.render.refusals")

Asked = Literal["whole", "something", "part"]
"""What the caller asked for: the model up to the minimum of the settings; at least one key of it; a part, or none."""

NOT_COMPARED: Final = Finding("not_compared", "info", "what was loaded could not be compared with what was asked for")
_SOMETHING: Final = 1e-12
"""The coverage of a load that brought in anything at all."""


def policy(asked: Asked) -> Policy:
    """
    The policy that the settings ask for, for a caller who asked for so much.
    """
    settings = config.settings()
    minimum = settings.required if asked == "whole" else _SOMETHING
    return Policy(mode=settings.mode, minimum=minimum, tolerated=asked == "part")


def refusal(  # noqa: PLR0913 - the parts of one message
    entry_point: str,
    facts: Facts,
    wanted: Inventory,
    missing: Sequence[str],
    *,
    asked: Asked,
    is_before: bool = False,
) -> LowCoverageError | None:
    """
    Make the error for a load whose coverage the settings refuse; None where they do not.

    Args:
        facts: coverage, findings, path and what else the message names.
        wanted: what the model asks for.
        missing: the keys of it that do not come, for the setting that would allow them. Empty: none is named.
        is_before: whether nothing has been written yet.
    """
    if policy(asked).refusal(facts.coverage) is None:
        return None
    say = refusals.refused if is_before else refusals.loaded
    error = LowCoverageError(say(entry_point, facts, wanted, missing, config.settings().required))
    error.is_untouched = is_before
    return error


def disproof(entry_point: str, facts: Facts, differing: int) -> LowCoverageError | None:
    """
    Make the error for a load that left `differing` tensors with other values than the checkpoint's; None where the
    settings do not refuse that.
    """
    if policy("whole").disproof(differing) is None:
        return None
    return LowCoverageError(refusals.disproved(entry_point, facts))


def look(load: Load, judge: Callable[[Load], object]) -> None:
    """
    Let an integration judge a load that came back. Where something of its own fails amid that, the load is reported as
    one that was not compared.
    """
    load.was_seen = False
    judge(load)
    load.was_seen = True


def note_raised(load: Load, error: BaseException, explain: Explain) -> None:
    """
    Take the exception of this rank where it is raised: find out why while files and arguments are at hand, and report
    it at once. The first one stays.
    """
    if load.error is not None:
        return
    if not isinstance(error, INTERRUPTS):
        keep_text(error)
    _own(load, error, explain)


def end(load: Load, error: BaseException | None, explain: Explain | None = None) -> LoadReport | None:
    """
    Finish a load with its report, attached to the exception that the caller gets to see, if any.

    Args:
        error: what the call ended with: the host's exception, or a refusal; None where it returned.
        explain: why it raised. Not asked for refusals, interrupts, and failures of other ranks.
    """
    try:
        _conclude(load, error, explain or _nothing)
    finally:
        if load.report is None:
            _cut_short(load, error)
        load.leave()
    return load.report


@contained("session.conclude")
def _conclude(load: Load, error: BaseException | None, explain: Explain) -> None:
    described = None if error is None else _whose(load, error, explain)
    is_refused = isinstance(error, LowCoverageError) and error.ckpt_sentry is None
    if error is None and not load.was_seen:
        _note_unseen(load)
    facts = load.facts
    # What the agent refuses is judged by what came in, or would have; what the host refuses has failed.
    fatal = None if is_refused else described
    judged = verdict(error=fatal, coverage=facts.coverage, findings=facts.findings, proof=facts.proof)
    report = load.finish(judged, described)
    if isinstance(error, LowCoverageError):
        # Its text has it all: a note would repeat that. The report of a load within stays.
        error.ckpt_sentry = error.ckpt_sentry or report
    elif error is not None and not isinstance(error, INTERRUPTS):
        attach(error, note(report), report)


@contained("session.cut_short")
def _cut_short(load: Load, error: BaseException | None) -> None:
    """
    Finish a load where something of the agent's own has failed: what is certain is reported.
    """
    _note_unseen(load)
    described = None if error is None else load.error or describe(error, _phase(load, error))
    judged = verdict(error=described, coverage=load.facts.coverage, findings=load.facts.findings)
    load.finish(judged, described)


def _note_unseen(load: Load) -> None:
    """
    Say of a load that it could not be looked at to its end; drop what only that could have confirmed.
    """
    if load.is_provisional:
        load.facts = replace(load.facts, coverage=None, utilisation=None, findings=())
    load.facts = load.facts.with_findings([NOT_COMPARED])


def _phase(load: Load, error: BaseException) -> str | None:
    """
    The phase in which the load raised; None where phases are not seen.
    """
    is_late = isinstance(error, LowCoverageError) and not error.is_untouched
    return load.phase if load.has_phases and not (is_late and load.phase == SETUP) else None


def _whose(load: Load, error: BaseException, explain: Explain) -> LoadError:
    """
    The error to report: what this rank raised itself; else what its peers raised, marked as theirs.
    """
    if load.error is not None:
        return load.error
    described = describe(error, _phase(load, error))
    if (failures := _failures(error)) and inner_error(error) is None:
        load.facts = load.facts.with_findings([peers.failed_finding(failures)])
        return described
    if not isinstance(error, (LowCoverageError, *INTERRUPTS)) and peers.is_loss(described):
        load.facts = load.facts.with_findings([peers.lost_finding(described)])
        return described
    return _own(load, error, explain)


def _own(load: Load, error: BaseException, explain: Explain) -> LoadError:
    """
    Report the exception of this rank at once, with the reason for it.
    """
    described, inner = describe(error, _phase(load, error)), inner_error(error)
    if inner is not None:
        described = replace(described, message=f"{inner.type}: {inner.message}")
    is_own_refusal = isinstance(error, LowCoverageError) and inner is None
    if not is_own_refusal and not isinstance(error, INTERRUPTS):
        found = list(explain(error, described))
        if not any(one.level == "error" for one in (*load.facts.findings, *found)):
            found.insert(0, raised(described))
        load.facts = load.facts.with_findings(found)
    load.failing(described)
    return described


def raised(error: LoadError) -> Finding:
    """
    The exception itself as the reason, where nothing tells more.
    """
    return codes.finding("rank_raised", "error", type=error.type, message=error.message)


def inner_error(error: BaseException) -> LoadError | None:
    """
    The error of another load that this exception has ended already: one that a planner, a hook or a `Stateful` made.
    """
    report = BaseException.__getattribute__(error, "__dict__").get("ckpt_sentry")
    return report.error if isinstance(report, LoadReport) else None


def _failures(error: BaseException) -> Any:
    """
    What a `CheckpointException` brings from all ranks (torch/distributed/checkpoint/api.py); nothing for any other.

    The class is looked up rather than imported: a job that does not use it has not imported it, and that takes seconds.
    """
    api = sys.modules.get("torch.distributed.checkpoint.api")
    return error.failures if api is not None and isinstance(error, api.CheckpointException) else {}


def _nothing(_error: BaseException, _described: LoadError) -> tuple[Finding, ...]:
    return ()
