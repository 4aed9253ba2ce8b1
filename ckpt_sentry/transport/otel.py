"""
OpenTelemetry out of this process: log events as things happen, spans and metrics when a load is over.

A host that has set its own providers gets the signals through them, on the calling thread. For the others, where
OTEL_EXPORTER_OTLP_ENDPOINT or another standard variable asks for it, private providers send from a thread of the
agent: a call from the host only puts an event in a queue. Nothing global is ever set. A forked child starts afresh.

Importing this module does not import the SDK; that comes, once, with the first event that goes anywhere.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckpt_sentry import names
from ckpt_sentry.masking import clean, mask
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.transport import otel_env
from ckpt_sentry.transport.events import LoadFinished

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_sentry.core.report import Identity, LoadReport
    from ckpt_sentry.transport.events import Event, LoadStarted
    from ckpt_sentry.transport.otel_private import Pipeline
    from ckpt_sentry.transport.otel_signals import Signals

__all__ = ["active", "event", "finished", "flush", "shutdown", "started"]

_AT_EXIT: Final = 2.0
"""Seconds that the end of a process waits for telemetry to leave."""
_RETRY: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds between attempts at an endpoint that does not take requests."""
_QUEUE: Final = 4096


def active(environ: Mapping[str, str] | None = None) -> bool:
    """
    Whether an event would go anywhere. Imports nothing; a host's providers count once it has set them.
    """
    if environ is None:
        is_disabled, is_asked = _switches(tuple(map(os.environb.get, _ASKING)))
    else:
        is_disabled, is_asked = otel_env.is_disabled(environ), otel_env.asked(environ)
    return not is_disabled and (is_asked or bool(_host_providers()))


_ASKING: Final = tuple(name.encode() for name in otel_env.ASKING)


@lru_cache(maxsize=4)
def _switches(values: tuple[bytes | None, ...]) -> tuple[bool, bool]:
    """
    What the variables of `_ASKING` say, as `otel_env.is_disabled` and `otel_env.asked` do: asked at each load.
    """
    found = zip(otel_env.ASKING, values, strict=True)
    environ = {name: os.fsdecode(value) for name, value in found if value is not None}
    return otel_env.is_disabled(environ), otel_env.asked(environ)


@contained("otel.started")
def started(event: LoadStarted) -> None:
    """
    Tell that a load begins, at once.
    """
    _send(event)


@contained("otel.event")
def event(event: Event) -> None:
    """
    Tell an event, at once, as a log event.
    """
    _send(event)


@contained("otel.finished")
def finished(report: LoadReport) -> None:
    """
    Tell that a load is over: a log event with the whole report, the spans of this rank, and the metrics.
    """
    _send(LoadFinished(identity=report.identity, at=report.ended_at, report=report))


@contained("otel.flush", default=False)
def flush(seconds: float = 1.5) -> bool:
    """
    Wait until everything has left, but no longer than `seconds` in all, however dead the endpoint is.

    True if all was taken by whoever listens; a host's providers only tell that they have tried.
    """
    deadline = time.monotonic() + seconds
    host = _flush_host()
    done = _worker is None or _worker.flush(deadline)
    if host is not None:
        host.join(max(0.0, deadline - time.monotonic()))
        done = done and not host.is_alive()
    return done


def shutdown(seconds: float = _AT_EXIT) -> None:
    """
    Send what is left within `seconds` and end the agent's thread. Called when the process ends; a later event starts
    it again.
    """
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        worker.close(seconds)


class _Item(NamedTuple):
    """
    An event on its way to the private providers, and what was true when it happened.
    """

    event: Event
    without: frozenset[str]
    caller: Any


class _Worker:
    """
    One daemon thread, alive from the first event on, that owns the private providers.
    """

    def __init__(self, build: Callable[[Identity], Pipeline]) -> None:
        self._build = build
        self._state = threading.Condition()
        self._items: deque[_Item] = deque(maxlen=_QUEUE)
        self._asked = self._answered = 0
        """Flushes asked for, and how many of them are done."""
        self._clean = True
        self._closing = self._gone = False
        self._failures = 0
        self._pipeline: Pipeline | None = None
        self._thread = threading.Thread(target=self._run, name="ckpt_sentry.otel", daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        with self._state:
            self._items.append(item)
            self._state.notify_all()

    def flush(self, deadline: float) -> bool:
        """
        Wait for all that was put before, until `deadline` on the monotonic clock.
        """
        with self._state:
            self._asked += 1
            ticket = self._asked
            self._state.notify_all()
            answered = self._state.wait_for(
                lambda: self._answered >= ticket or self._gone, max(0.0, deadline - time.monotonic())
            )
            return answered and self._clean and not self._gone

    def close(self, seconds: float) -> None:
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._round():
                pass
        finally:
            # Whoever waits for a flush is not to wait for a thread that is gone.
            with self._state:
                self._gone = True
                self._state.notify_all()

    def _round(self) -> bool:
        """
        Wait for work and do it; True if it was the last.
        """
        with self._state:
            self._state.wait_for(self._has_work, self._patience())
            items, asked, closing = list(self._items), self._asked, self._closing
            self._items.clear()
        clean = self._work(items)
        with self._state:
            self._clean, self._answered = clean, asked
            self._failures = 0 if clean else self._failures + 1
            self._state.notify_all()
        return closing

    def _has_work(self) -> bool:
        return bool(self._items) or self._closing or self._asked > self._answered

    def _patience(self) -> float | None:
        """
        How long the thread may sleep: for ever, until the next attempt, or until the metrics are due again.
        """
        if self._failures:
            return _RETRY[min(self._failures, len(_RETRY)) - 1]
        return None if self._pipeline is None else _metric_interval()

    @contained("otel.work", default=False)
    def _work(self, items: list[_Item]) -> bool:
        for item in items:
            self._emit(item)
        if self._pipeline is None:
            return True
        self._pipeline.gather()
        return self._pipeline.send()

    @contained("otel.emit")
    def _emit(self, item: _Item) -> None:
        who = item.event.identity
        if self._pipeline is None:
            self._pipeline = self._build(who)
        elif who.pid == os.getpid() and who != self._pipeline.identity:
            self._pipeline.gather()
            self._pipeline.become(who)
        _emit(self._pipeline.signals(item.without), item.event, item.caller)


_worker: _Worker | None = None
_starting = threading.RLock()
_host: tuple[dict[str, Any], Signals] | None = None
"""The way through the host's providers, for as long as the host has these."""
_told_grpc = False


def _send(event: Event) -> None:
    if not active() or _suppressed():
        return
    event = clean(event)
    caller = _current_span()
    providers = _host_providers()
    if providers:
        _emit(_host_signals(providers), event, caller)
    private = {signal for signal in otel_env.SIGNALS if otel_env.exporters(os.environ, signal)} - providers.keys()
    if private:
        _warn_of_grpc(private)
        _running_worker().put(_Item(event, frozenset(providers), caller))


def _emit(signals: Signals, event: Event, caller: Any) -> None:
    signals.event(event)
    if isinstance(event, LoadFinished):
        signals.report(event, caller)


def _running_worker() -> _Worker:
    global _worker  # noqa: PLW0603
    with _starting:
        if _worker is None:
            # Here and not on the thread: a fork in the middle of another thread's import leaves the child with locked
            # modules, and once the interpreter has begun to end the SDK cannot be imported any more.
            from ckpt_sentry.transport.otel_private import Pipeline

            atexit.unregister(shutdown)
            atexit.register(shutdown)
            _worker = _Worker(Pipeline)
        return _worker


def _host_providers() -> dict[str, Any]:
    """
    The providers that the host has set, by signal. The API's own stand-ins are none.
    """
    found: dict[str, Any] = {}
    for signal, module_name, getter, stand_in in (
        ("traces", "opentelemetry.trace", "get_tracer_provider", "ProxyTracerProvider"),
        ("logs", "opentelemetry._logs", "get_logger_provider", "ProxyLoggerProvider"),
        ("metrics", "opentelemetry.metrics", "get_meter_provider", "_ProxyMeterProvider"),
    ):
        get = getattr(sys.modules.get(module_name), getter, None)
        if get is None:
            continue
        provider = get()
        kind = type(provider)
        # Other packages have classes of these names that do carry signals.
        if not (kind.__name__ == stand_in and kind.__module__.startswith("opentelemetry.")):
            found[signal] = provider
    return found


def _host_signals(providers: dict[str, Any]) -> Signals:
    global _host  # noqa: PLW0603
    if _host is None or _host[0] != providers:
        from ckpt_sentry.transport.otel_signals import Signals

        _host = providers, Signals(providers.get("traces"), providers.get("logs"), providers.get("metrics"))
    return _host[1]


def _flush_host() -> threading.Thread | None:
    """
    Have the host's providers send what they hold; their own `force_flush` may block for as long as it likes.
    """
    flushes = [
        force_flush
        for provider in (_host[0].values() if _host is not None else ())
        if callable(force_flush := getattr(provider, "force_flush", None))
    ]
    if not flushes:
        return None

    @contained("otel.flush_host")
    def run() -> None:
        for force_flush in flushes:
            force_flush()

    thread = threading.Thread(target=run, name="ckpt_sentry.otel.flush", daemon=True)
    thread.start()
    return thread


def _suppressed() -> bool:
    """
    Whether the host has suppressed instrumentation around this call.
    """
    context = sys.modules.get("opentelemetry.context")
    key = getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None)
    if context is None or key is None:
        return False
    return bool(context.get_value(key) or context.get_value("suppress_instrumentation"))


def _current_span() -> Any:
    """
    The context of the span that the host has open, or None.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_current_span"):
        return None
    context = trace.get_current_span().get_span_context()
    return context if context.is_valid else None


def _metric_interval() -> float:
    """
    OTEL_METRIC_EXPORT_INTERVAL in seconds: metrics that are not sent again are taken for gone by what stores them.
    """
    try:
        return max(1.0, float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000)
    except ValueError:
        return 60.0


def _warn_of_grpc(signals: set[Any]) -> None:
    """
    Say once that gRPC was asked for and HTTP is spoken, and where to.
    """
    global _told_grpc  # noqa: PLW0603
    asked = sorted(signal for signal in signals if otel_env.wants_grpc(os.environ, signal))
    if _told_grpc or not asked:
        return
    _told_grpc = True
    logging.getLogger(names.SCOPE).warning(
        "ckpt_sentry: OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not spoken; OTLP/HTTP goes to %s",
        mask(otel_env.target(os.environ, asked[0]).url.partition("?")[0]),
    )


def _after_fork_in_child() -> None:
    """
    The thread is not here, its lock may be held, and what it holds is the parent's to send.
    """
    global _worker, _starting
    _worker, _starting = None, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
