"""
What leaves a process: small facts as they happen, and the report at the end.

Every event is a frozen class of plain data with a static, low-cardinality name. The order in which a collector gets
them is the order in which things happened on one machine.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from ckpt_sentry import names
from ckpt_sentry.core.report import Finding, Framework, Identity, LoadError, LoadReport
from ckpt_sentry.dataclasses_ import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted:
    """
    A rank has entered a load. Sent before anything is read, so that a rank that dies is known by what it began.
    """

    name: ClassVar[str] = names.EVENT_LOAD_STARTED
    identity: Identity
    at: float
    load_id: str
    ordinal: int
    framework: Framework
    entry_point: str
    path: str | None = None
    members: str | None = None
    """The ranks that make this load, compact ("0-3"), as far as this one knows; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEntered:
    """
    A rank has come to a phase of a load that it has started.
    """

    name: ClassVar[str] = names.EVENT_LOAD_PHASE
    identity: Identity
    at: float
    load_id: str
    phase: str
    findings: tuple[Finding, ...] = ()
    """What is known already and worth a word, should the load never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailing:
    """
    An exception has been raised on this rank and is on its way to the others; the report follows if the rank lives.
    """

    name: ClassVar[str] = names.EVENT_LOAD_FAILING
    identity: Identity
    at: float
    load_id: str
    error: LoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinished:
    """
    A load has ended on this rank, well or not.
    """

    name: ClassVar[str] = names.EVENT_LOAD_FINISHED
    identity: Identity
    at: float
    report: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStalled:
    """
    A load has lasted longer than `CKPT_SENTRY_STALL_AFTER`. `stack` is the Python stack of the thread that loads.
    """

    name: ClassVar[str] = names.EVENT_LOAD_STALLED
    identity: Identity
    at: float
    load_id: str
    phase: str | None
    since: float
    """When the phase was entered."""
    stack: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """
    A worker process has ended, as its launcher saw it, or says itself that it ends by an exception.

    "killed" is by a signal from anywhere, "stopped" by the launcher's own, because the run was ending.
    """

    name: ClassVar[str] = names.EVENT_RANK_ENDED
    identity: Identity
    at: float
    how: Literal["exited", "killed", "raised", "stopped"]
    exit_code: int | None = None
    signal: str | None = None
    """Such as "SIGKILL"."""
    error: LoadError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """
    A launcher has seen all of its workers end: what has not been said by now will not be said.
    """

    name: ClassVar[str] = names.EVENT_RUN_ENDED
    identity: Identity
    at: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsLeftOut:
    """
    Good loads of one kind that have left no other trace in the records: how many, in all, and since when.
    """

    name: ClassVar[str] = names.EVENT_LOADS_LEFT_OUT
    identity: Identity
    at: float
    since: float
    framework: Framework
    entry_point: str
    count: int
    model: str = ""
    """Into which model, in words; "" where that is not known."""


Event = LoadStarted | PhaseEntered | LoadFailing | LoadFinished | LoadStalled | RankEnded | RunEnded | LoadsLeftOut
EVENT_TYPES: tuple[type[Event], ...] = (
    LoadStarted,
    PhaseEntered,
    LoadFailing,
    LoadFinished,
    LoadStalled,
    RankEnded,
    RunEnded,
    LoadsLeftOut,
)
