"""
How a DCP load ended: whose failure it was, what it was, and the same exception with the report attached.

The exception object, its type and its `args` are never changed. Notes and one attribute are added, and the text of a
`CheckpointException` says each distinct failure once.
"""

from __future__ import annotations

import builtins
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_sentry.audit import peers
from ckpt_sentry.audit.report import Finding, LoadError
from ckpt_sentry.audit.verdict import verdict
from ckpt_sentry.checkpoints import dcp as files
from ckpt_sentry.checkpoints.paths import mask_text
from ckpt_sentry.render.note import note
from ckpt_sentry.targets import dcp_facts

if TYPE_CHECKING:
    from ckpt_sentry.loads import Load

LONGEST_MESSAGE = 2_000
"""Characters of an exception's text that go into a report: planners may list every key they know."""

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_PARTIAL = "If they are to start anew: dcp.load(…, planner=DefaultLoadPlanner(allow_partial_load=True))."
_KEY_TEXTS = ("Missing key in checkpoint state_dict", "Size mismatch between saved", "Invalid checkpoint metadata for")
"""How the default planner words what `audit.examine` finds by itself (default_planner.py:477)."""


def describe(exc: BaseException, phase: str | None) -> LoadError:
    """
    An exception as data. The text is cut and holds no credentials.
    """
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return LoadError(name, mask_text(_text(exc))[:LONGEST_MESSAGE], phase)


def note_own(load: Load, exc: BaseException) -> None:
    """
    This rank has raised inside a collective: find out why while its files and arguments are at hand, and say it now.
    """
    if load.error is not None:
        return
    error = describe(exc, load.phase)
    if isinstance(exc, INTERRUPTS):
        load.failing(error)
        return
    if load.facts.coverage is None:
        dcp_facts.note_plan(load, None)
    _explain(load, exc, error)
    load.failing(error)


def conclude(load: Load, exc: BaseException | None) -> None:
    """
    Finish the load with its report; where it failed, attach the report to the exception.
    """
    error: LoadError | None = None
    if exc is not None:
        error = _whose(load, exc)
    judged = verdict(error=error, coverage=load.facts.coverage, findings=load.facts.findings)
    report = load.finish(judged, error)
    if exc is not None and not isinstance(exc, INTERRUPTS):
        attach(exc, note(report), report)


def attach(exc: BaseException, text: str, report: Any) -> None:
    """
    Add the report as the attribute `ckpt_sentry` and its short text as a note, once.
    """
    if getattr(exc, "ckpt_sentry", None) is not None:
        return
    exc.ckpt_sentry = report  # type: ignore[attr-defined]
    if hasattr(exc, "add_note"):
        exc.add_note(text)


def portable(exc: BaseException) -> BaseException:
    """
    The same exception where it survives the way to the other ranks; else the nearest built-in one with its text.

    torch gathers failures by pickle (utils.py:199): one that cannot be rebuilt would replace the cause by
    "Can't pickle local object" or "__init__() missing …" on every rank.
    """
    try:
        pickle.loads(pickle.dumps(exc))  # noqa: S301 - bytes of our own making
    except Exception:  # noqa: BLE001 - whatever the class of the host raises
        bases = (c for c in type(exc).__mro__ if c.__module__ == "builtins")
        nearest = next((c for c in bases if c not in (BaseException, Exception, object)), RuntimeError)
        name = f"{type(exc).__module__}.{type(exc).__qualname__}"
        return _build(nearest, f"{name}: {_text(exc)}").with_traceback(exc.__traceback__)
    return exc


def _build(kind: type[BaseException], text: str) -> BaseException:
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and its kin want five arguments
        return builtins.RuntimeError(text)


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - a class of the host whose __str__ fails
        return f"<{type(exc).__qualname__} without a text>"


def _whose(load: Load, exc: BaseException) -> LoadError:
    """
    The error to report: what this rank raised itself; else what its peers raised, marked as theirs.
    """
    failures = getattr(exc, "failures", None)
    if load.error is not None:
        return load.error
    if isinstance(failures, dict) and failures:
        load.facts = load.facts.with_findings([peers.failed_finding(failures)])
        return describe(exc, load.phase)
    error = describe(exc, load.phase)
    if isinstance(exc, INTERRUPTS):
        return error
    if peers.is_loss(error):
        load.facts = load.facts.with_findings([peers.lost_finding(error)])
        return error
    _explain(load, exc, error)
    load.failing(error)
    return error


def _decisive(finding: Finding) -> Finding:
    """
    A missing key ends a load by the default planner: say it as an error, with the way that DCP has around it.
    """
    if finding.code != "missing_keys":
        return finding
    way = None if finding.next is None else _PARTIAL
    return replace(finding, level="error", next=way)


def _explain(load: Load, exc: BaseException, error: LoadError) -> None:
    """
    Add why this rank raised: what the keys say, else what the files say, else the exception itself.
    """
    facts = load.facts
    if error.message.startswith(_KEY_TEXTS) and facts.findings:
        load.facts = replace(facts, findings=tuple(map(_decisive, facts.findings)))
        return
    path = load.notes.get("path")
    found = list(files.diagnose(path, error=exc, rank=load.notes.get("group_rank"))) if path is not None else []
    if not any(finding.level == "error" for finding in found):
        text = f"{error.type}: {error.message}" if error.message else error.type
        found.append(Finding("rank_raised", "error", text))
    load.facts = facts.with_findings(found)
