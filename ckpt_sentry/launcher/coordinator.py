"""
The process above the workers: it listens to them, outlives them all and reports for them.

torchrun becomes one through `integrations.launchers.torchrun`, any other launcher through `ckpt-sentry run`. A launcher
that has a coordinator above itself only relays to it how its workers ended.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config, identity
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.launcher.job_reporter import JobReporter
from ckpt_sentry.launcher.socket_server import LauncherSocket
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.session.process_reporter import records_for
from ckpt_sentry.transport import connection
from ckpt_sentry.transport.events import RankEnded, RunEnded

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from ckpt_sentry.core.report import Identity
    from ckpt_sentry.transport.events import Event

TICK_SECONDS: Final = 0.5
RELAY_SECONDS: Final = 1.5
SOCKET, RUN_ID = "CKPT_SENTRY_SOCKET", "CKPT_SENTRY_RUN_ID"


def has_coordinator() -> bool:
    """
    Whether this process already has a coordinator that listens.
    """
    return SOCKET in os.environ


class EnvironmentOverlay:
    """
    Variables that workers are to inherit, put into an environment and taken out again.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self.environment = variables
        self._before: dict[str, str | None] = {}

    def enter(self, environ: MutableMapping[str, str]) -> None:
        """
        Put the variables in.
        """
        self._before = {name: environ.get(name) for name in self.environment}
        environ.update(self.environment)

    def leave(self, environ: MutableMapping[str, str]) -> None:
        """
        Put back what was there before: a launch from a notebook is followed by others.
        """
        for name, value in self._before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


class Coordinator(EnvironmentOverlay):
    """
    A socket to which the workers connect, and a job reporter behind it.

    Args:
        run_id: the run of all workers, or None where their events tell it (a command may start several runs).
        local_ranks: how many workers there are, or None where their events tell that.
        knows_ends: whether the owner passes on how each worker ended; else a closed connection is all that is known.
    """

    def __init__(self, run_id: str | None, local_ranks: int | None, *, knows_ends: bool = True) -> None:
        config.warn_problems()
        me = identity.identity({})
        self.run_id = run_id or me.run_id
        self._identity = replace(me, run_id=self.run_id)
        self._knows_ends = knows_ends
        records = records_for(self._identity)
        self._reporter = JobReporter(records, local_ranks, source=f"{self._identity.node}:{os.getpid()}")
        self._socket = LauncherSocket(self._take, self._on_disconnect)
        self._socket.start()
        variables = {SOCKET: self._socket.path}
        super().__init__(variables if run_id is None else variables | {RUN_ID: run_id})
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="ckpt_sentry-reporter", daemon=True)
        self._ticker.start()

    def on_event(self, event: Event) -> None:
        """
        Take one event of this very process: how a worker ended.
        """
        self._reporter.on_event(event)

    def close(self, *, ok: bool, signal: str | None = None) -> None:
        """
        Stop listening and report what has not been reported: all workers are gone. May be called twice.

        Args:
            ok: whether all went well, by the launcher's exit code.
            signal: the signal that killed a worker, by the launcher's exit code, if it tells one.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._socket.close()
        self._ticker.join()
        if signal is not None and not self._knows_ends:
            self._reporter.assign_cause(signal)
        now = time.time()
        for run_id in self._reporter.runs() or (self.run_id,):
            self._reporter.on_event(RunEnded(identity=replace(self._identity, run_id=run_id), at=now, ok=ok))
        self._reporter.settle()

    def _take(self, request: dict[str, Any]) -> None:
        self._reporter.receive(request)

    def _on_disconnect(self, who: Identity) -> None:
        """
        A worker's connection has closed: its process has ended.
        """
        if not self._knows_ends and not self._closed.is_set():
            self._reporter.on_disconnect(who)

    def _tick(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            self._tick_once()

    @contained("coordinator.tick")
    def _tick_once(self) -> None:
        overdue = self._reporter.overdue(config.settings().stall_after)
        if overdue:
            self._socket.ask({"loads": overdue})
        self._reporter.tick()


class Relay(EnvironmentOverlay):
    """
    A launcher below another coordinator: what it knows of its workers goes there.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__({RUN_ID: run_id})
        self.run_id = run_id

    def on_event(self, event: RankEnded) -> None:
        """
        Bring the coordinator one event.
        """
        connection.send_once(event, RELAY_SECONDS)

    def close(self, *, ok: bool) -> None:
        """
        Nothing is left to be done: the coordinator goes on.
        """
