"""
Events of made-up jobs, for the tests of the aggregate and of what is rendered from it.
"""

from __future__ import annotations

from typing import Any

from ckpt_sentry.collector.aggregate import Aggregate, Aggregator
from ckpt_sentry.core.report import Finding, Identity, LoadError, LoadReport
from ckpt_sentry.transport.events import (
    Event,
    LoadFailing,
    LoadFinished,
    LoadStalled,
    LoadStarted,
    PhaseEntered,
    RankEnded,
    RunEnded,
)

LOAD = "a" * 32
RUN = "run7-a1b2"
PEER = Finding("peer_failed", "error", "another rank failed; this rank had no error of its own")
LOST = LoadError("RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:4242", "plan")


def who(rank: int, world: int = 4, *, node: str = "node0", attempt: int = 0, local: int | None = None) -> Identity:
    return Identity(RUN, rank, rank if local is None else local, world, world if local is None else 1, node, 9, attempt)


def started(rank: int, world: int = 4, *, load: str = LOAD, at: float = 100.0, **who_: Any) -> LoadStarted:
    return LoadStarted(
        identity=who(rank, world, **who_),
        at=at,
        load_id=load,
        ordinal=0,
        framework="dcp",
        entry_point="dcp.load",
        path="/data/run7/step-1200",
    )


def entered(rank: int, phase: str, world: int = 4, at: float = 100.5) -> PhaseEntered:
    return PhaseEntered(identity=who(rank, world), at=at, load_id=LOAD, phase=phase)


def failing(rank: int, error: LoadError, world: int = 4, at: float = 100.6, **who_: Any) -> LoadFailing:
    return LoadFailing(identity=who(rank, world, **who_), at=at, load_id=LOAD, error=error)


def finished(rank: int, world: int = 4, *, attempt: int = 0, **fields: Any) -> LoadFinished:
    me = who(rank, world, attempt=attempt)
    facts: dict[str, Any] = {
        "load_id": LOAD,
        "ordinal": 0,
        "identity": me,
        "framework": "dcp",
        "entry_point": "dcp.load",
        "verdict": "ok",
        "started_at": 100.0,
        "ended_at": 101.0 + rank,
        "path": "/data/run7/step-1200",
        "format": "DCP",
        "step": 1200,
        "step_source": "folder name",
    }
    report = LoadReport(**(facts | fields))
    return LoadFinished(identity=report.identity, at=report.ended_at, report=report)


def told(rank: int, world: int = 4) -> LoadFinished:
    return finished(rank, world, verdict="failed", error=LOST, findings=(PEER,))


def stalled(rank: int, phase: str | None, stack: str, at: float = 105.0) -> LoadStalled:
    return LoadStalled(identity=who(rank), at=at, load_id=LOAD, phase=phase, since=100.0, stack=stack)


def killed(rank: int, signal: str, world: int = 4, at: float = 103.0) -> RankEnded:
    return RankEnded(identity=who(rank, world), at=at, how="killed", signal=signal)


def stopped(rank: int, world: int = 4, at: float = 103.5) -> RankEnded:
    return RankEnded(identity=who(rank, world), at=at, how="stopped", signal="SIGTERM")


def exited(rank: int, code: int, at: float = 103.0) -> RankEnded:
    return RankEnded(identity=who(rank), at=at, how="exited", exit_code=code)


def raised(rank: int, error: LoadError, at: float = 103.0) -> RankEnded:
    return RankEnded(identity=who(rank), at=at, how="raised", exit_code=1, error=error)


def over(*, ok: bool, node: str = "node0") -> RunEnded:
    return RunEnded(identity=who(0, node=node), at=110.0, ok=ok)


def seen(*events: Event, source: str = "receiver", settled: bool = False) -> Aggregate:
    """
    The aggregate of the one load in these events.
    """
    aggregator = Aggregator()
    for event in events:
        aggregator.add(event, source=source)
    (one,) = aggregator.loads(settled=settled)
    return one
