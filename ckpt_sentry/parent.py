"""
The process above the workers: it listens to them, outlives them all and speaks for them.

torchrun becomes one through `targets.torchrun`, any other launcher through `ckpt-sentry run`.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_sentry import identity
from ckpt_sentry.collector.receiver import Receiver, Rejection
from ckpt_sentry.guard import contained
from ckpt_sentry.speaker import Speaker, records_for
from ckpt_sentry.telemetry.events import RankEnded, RunEnded

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from ckpt_sentry.collector.receiver import Request

TICK_SECONDS = 0.5
VARIABLES = ("CKPT_SENTRY_RECEIVER", "CKPT_SENTRY_TOKEN", "CKPT_SENTRY_RUN_ID")


def has_parent() -> bool:
    """
    Whether this process already has a parent that listens.
    """
    return "CKPT_SENTRY_RECEIVER" in os.environ


class Parent:
    """
    A receiver on loopback, a speaker behind it, and the environment that leads the workers there.
    """

    def __init__(self, run_id: str, local_ranks: int) -> None:
        token = secrets.token_urlsafe(24)
        self.run_id = run_id
        self._identity = replace(identity.identity({}), run_id=run_id)
        self._speaker = Speaker(records_for(self._identity), local_ranks, source=f"{self._identity.node}:{os.getpid()}")
        self._receiver = Receiver(self._take, token=token)
        self._receiver.start()
        self.environment = dict(zip(VARIABLES, (self._receiver.address, token, run_id), strict=True))
        self._before: dict[str, str | None] = {}
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="ckpt_sentry-speaker", daemon=True)
        self._ticker.start()

    def enter(self, environ: MutableMapping[str, str]) -> None:
        """
        Put the way to the receiver into the environment that the workers inherit.
        """
        self._before = {name: environ.get(name) for name in self.environment}
        environ.update(self.environment)

    def leave(self, environ: MutableMapping[str, str]) -> None:
        """
        Take it out again: a launch from a notebook is followed by others.
        """
        for name, value in self._before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value

    def close(self, ended: Iterable[RankEnded], *, ok: bool) -> None:
        """
        All workers are gone: stop listening and say what has not been said. May be called twice.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._receiver.close()
        self._ticker.join()
        for event in ended:
            self._speaker.hear(event)
        self._speaker.hear(RunEnded(identity=self._identity, at=time.time(), ok=ok))
        self._speaker.settle()

    def _take(self, request: Request) -> Rejection | None:
        refused = self._speaker.receive(request.signal, request.body)
        return Rejection(refused, "not in the form of the events of ckpt_sentry") if refused else None

    def _tick(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            self._tick_once()

    @contained("parent.tick")
    def _tick_once(self) -> None:
        self._speaker.tick()
