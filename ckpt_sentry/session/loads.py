"""
The life of one load in this process: begin, phases, failing, finished.

An integration opens a `Load` and tells it what it observes, `session.conclude` finishes it; the load makes the
`LoadReport` and hands it on. One call of the user is one load: an integration that is entered while another load of the
same thread runs adds to that one.

Nothing here holds a tensor, a frame or an exception beyond the call that brought it.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ckpt_sentry import identity
from ckpt_sentry.core.report import (
    Facts,
    Finding,
    Framework,
    Identity,
    LoadError,
    LoadReport,
    Phase,
    PhaseName,
    Verdict,
)
from ckpt_sentry.masking import clean
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.session import sinks, stall
from ckpt_sentry.transport.events import LoadFailing, LoadFinished, LoadStarted, PhaseEntered

if TYPE_CHECKING:
    from collections.abc import Callable

_State = TypeVar("_State")
_current: ContextVar[Load | None] = ContextVar("ckpt_sentry_load", default=None)


SETUP: Final = "setup"


class Load:
    """
    A load that is under way. Belongs to the thread (or task) that began it.
    """

    def __init__(
        self, framework: Framework, entry_point: str, path: str | None, *, kind: str = "", seconds_ago: float = 0.0
    ) -> None:
        operation = f"{framework}:{kind}" if kind else framework
        nth = identity.next_ordinal(f"{framework}:{kind}")
        self.framework: Framework = framework
        self.entry_point = entry_point
        self.identity: Identity = identity.identity()
        self.ordinal = identity.next_ordinal(framework)
        self.load_id = identity.load_id(self.identity.run_id, self.identity.attempt, operation, nth, identity.salt())
        self.facts = Facts(path=path)
        self.error: LoadError | None = None
        """The exception that this rank itself raised, if any."""
        self.report: LoadReport | None = None
        self.started_at = time.time() - seconds_ago
        self.left = False
        self.is_aside = False
        """Whether what the host loads meanwhile are loads of their own: hooks of the program within a longer call."""
        self.thread_id = threading.get_ident()
        self.is_provisional = False
        """Whether the facts are what names alone say, which the values that are written have yet to confirm."""
        self.was_seen = True
        """Whether nothing of the agent's own has failed when it looked at what the load left behind."""
        self.has_phases = not seconds_ago
        """Whether its phases are seen; not where it was over before it was taken note of."""
        self.on_filled: Callable[[Any], object] | None = None
        """Who wants to hear of each module that is filled within this load (`integrations.torch_module.calls.Call`)."""
        self._states: dict[type[Any], Any] = {}
        self._clock = time.perf_counter() - seconds_ago
        self._phase: PhaseName = SETUP
        self._phase_began = self._clock
        self._phases: list[Phase] = []
        self._sinks = sinks.Sinks()
        self._outer = _current.get()
        _current.set(self)

    @property
    def phase(self) -> str:
        return self._phase

    def keep(self, state: object) -> None:
        """
        Keep what an integration has to remember until the load ends, one object of each class.
        """
        self._states[type(state)] = state

    def state(self, kind: type[_State]) -> _State | None:
        """
        The state of this class, if one is kept and the load has not ended.
        """
        return self._states.get(kind)

    def begin(self, members: str | None = None) -> None:
        """
        Say that the load has started, before anything is read. For `members` see `begin`.
        """
        stall.connect()
        stall.stand(self.load_id, self._phase)
        self._sinks.event(
            LoadStarted(
                identity=self.identity,
                at=self.started_at,
                load_id=self.load_id,
                ordinal=self.ordinal,
                framework=self.framework,
                entry_point=self.entry_point,
                path=self.facts.path,
                members=members,
            )
        )

    def enter(self, phase: PhaseName, findings: tuple[Finding, ...] = ()) -> None:
        """
        Go over to the next phase; the one before is closed with the seconds it took.

        Args:
            findings: what is to be said now already: the load may hang in this phase.
        """
        if phase == self._phase:
            return
        self._close_phase()
        self._phase = phase
        stall.stand(self.load_id, phase)
        self.facts = self.facts.with_findings(findings)
        self._sinks.event(
            PhaseEntered(
                identity=self.identity, at=self._now(), load_id=self.load_id, phase=phase, findings=tuple(findings)
            )
        )

    def failing(self, error: LoadError) -> None:
        """
        This rank has raised. Said at once: the cause can vanish before the load ends. The first one stays.
        """
        if self.error is not None:
            return
        self.error = error
        self._sinks.urgent(LoadFailing(identity=self.identity, at=self._now(), load_id=self.load_id, error=error))

    def finish(self, verdict: Verdict, error: LoadError | None) -> LoadReport:
        """
        Make the report, hand it on, and forget the load.

        Args:
            error: what the caller gets to see, or None. Where this rank raised itself, that error is reported.
        """
        self._close_phase()
        facts = self.facts
        report = LoadReport(
            load_id=self.load_id,
            ordinal=self.ordinal,
            identity=self.identity,
            framework=self.framework,
            entry_point=self.entry_point,
            verdict=verdict,
            started_at=self.started_at,
            ended_at=self._now(),
            phases=tuple(self._phases),
            error=error,
            **{name: getattr(facts, name) for name in Facts.__slots__},
        )
        # From here on it is the host's too, as a note and an attribute of its exception.
        self.report = clean(report)
        self.leave()
        self._sinks.finished(LoadFinished(identity=self.identity, at=self.report.ended_at, report=self.report))
        return self.report

    def leave(self) -> None:
        """
        Stop being the current load. May be called twice.
        """
        self.left = True
        stall.leave(self.load_id)
        # Nothing of the host's lives on.
        self._states.clear()
        self.on_filled = None
        if _current.get() is self:
            _current.set(self._outer)
        self._outer = None

    def _close_phase(self) -> None:
        now = time.perf_counter()
        self._phases.append(Phase(self._phase, round(now - self._phase_began, 6)))
        self._phase_began = now

    def _now(self) -> float:
        return self.started_at + (time.perf_counter() - self._clock)


def current() -> Load | None:
    """
    The load that runs in this thread, if any, and that takes what is loaded within for a part of itself.
    """
    load = _current.get()
    # A context that was copied amid a load (`asyncio.to_thread`, a task) still holds it when it is over.
    return None if load is None or load.left or load.is_aside else load


def within() -> Load | None:
    """
    As `current`, but of a load that is over in a copied context too: for what a load calls once for each tensor.
    """
    load = _current.get()
    return None if load is None or load.is_aside else load


def aside() -> Load | None:
    """
    The load that runs in this thread and stands aside, if any.
    """
    load = _current.get()
    return load if load is not None and load.is_aside and not load.left else None


@contained("loads.begin")
def begin(  # noqa: PLR0913 - all but the first three have defaults
    framework: Framework,
    entry_point: str,
    path: str | None,
    *,
    kind: str = "",
    members: str | None = None,
    seconds_ago: float = 0.0,
    observe: Callable[[Load], object] | None = None,
) -> Load | None:
    """
    Open a load and say so, or None where the agent itself fails: the caller then calls the original and nothing else.

    Args:
        kind: what tells this load from others of its framework on all ranks alike, where ranks do not all make the
            same loads: the n-th load of a kind is then one load on all of them, not the n-th of the framework.
        members: the ranks that make it, compact ("0-3"), where it is not all.
        seconds_ago: how long ago it began, where it is only worth a word now that it has ended.
        observe: what the integration wants to note of it at once. If it fails, the load is not the current one any
            more: it would make every later load of this thread a part of itself.
    """
    load = Load(framework, entry_point, path, kind=kind, seconds_ago=seconds_ago)
    try:
        load.begin(members)
        if observe is not None:
            observe(load)
    except BaseException:
        load.leave()
        raise
    return load
