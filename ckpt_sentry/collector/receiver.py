"""
An OTLP/HTTP receiver: logs, traces and metrics, Protobuf and JSON, in bounded memory.

A thread for each connection reads; one worker inflates, decodes and calls the sink. So the sink is called by one thread
only, one request after the other, in the order in which requests arrived whole, and one inflated body is held at a
time. A request is answered with 200 after the sink has returned: what is acknowledged has been taken in.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import names
from ckpt_sentry.collector import answers, http1, otlp_proto
from ckpt_sentry.collector.answers import Rejection
from ckpt_sentry.collector.http1 import Head, HttpError
from ckpt_sentry.collector.otlp_proto import Signal
from ckpt_sentry.telemetry.deadline import Deadline, TimedSocket

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from typing_extensions import Self

_SIGNALS: Final[dict[str, Signal]] = {"/v1/logs": "logs", "/v1/traces": "traces", "/v1/metrics": "metrics"}
_CLOSE: Final = {"Connection": "close"}
_LINGER_SECONDS: Final = 1.0
_LINGER_BYTES: Final = 32 * 1024 * 1024

_log = logging.getLogger(names.SCOPE)


@dataclass(frozen=True, slots=True)
class Request:
    """
    One export request; `body` is in OTLP/JSON form whatever came in.
    """

    signal: Signal
    body: dict[str, Any]


class Busy(Exception):  # noqa: N818 - a condition, not an error
    """
    Raised by a sink that cannot take a request now: the sender gets 429 and may come again after `retry_after` seconds.
    """

    def __init__(self, retry_after: int = 1) -> None:
        super().__init__("the sink is busy")
        self.retry_after = retry_after


Sink = Callable[[Request], Rejection | None]


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Sizes in bytes, times in seconds. `pending` bounds what all connections together hold, `idle` the wait between
    requests, `request` the time from the first byte of a request to its last, `sink` the wait for the sink.
    """

    body: int = 20 * 1024 * 1024
    inflated: int = 20 * 1024 * 1024
    pending: int = 64 * 1024 * 1024
    connections: int = 512
    idle: float = 75.0
    request: float = 15.0
    sink: float = 30.0


@dataclass(slots=True, eq=False)
class _Job:
    signal: Signal
    media_type: str
    coding: str
    body: bytes | bytearray
    done: threading.Event = field(default_factory=threading.Event)
    outcome: Rejection | HttpError | None = None
    abandoned: bool = False


class _Room:
    """
    Bytes that all connections may hold together.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def share(self) -> Iterator[http1.Charge]:
        """
        A function that takes bytes; all that it took are given back at the end.
        """
        taken = 0

        def charge(size: int) -> None:
            nonlocal taken
            with self._lock:
                if size > self._left:
                    raise HttpError(429, "the receiver is full", Retry_After="1")
                self._left -= size
                taken += size

        try:
            yield charge
        finally:
            with self._lock:
                self._left += taken


class Receiver:
    """
    Receives at `host` and `port` (0: any free one) from `start` to `close`; with a `token`, only from who knows it.

    `sink` gets each request (see the module on threads). What it raises is answered with 500, or 429 for `Busy`, and
    stays in here. Nothing is printed. `start` raises OSError if the address cannot be had.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._sink = sink
        self._wanted = (host, port)
        self._token = token
        self._limits = limits or Limits()
        self._room = _Room(self._limits.pending)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._waker: socket.socket | None = None

    @property
    def address(self) -> str:
        """
        "HOST:PORT", or "[HOST]:PORT" for IPv6; known after `start`.
        """
        if self._listener is None:
            message = "the receiver has not been started"
            raise RuntimeError(message)
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> Self:
        """
        Begin to listen; returns itself.
        """
        host, port = self._wanted
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=128)
        self._listener.settimeout(0)
        wake, self._waker = socket.socketpair()
        for target, arguments in ((self._accept, (self._listener, wake)), (self._work, ())):
            thread = threading.Thread(target=target, args=arguments, name=f"{names.SCOPE}-receiver", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def close(self, seconds: float = 2.0) -> None:
        """
        Stop listening, let requests that are complete be answered, and end all threads, within `seconds`.

        A sink that does not return keeps its (daemon) thread.
        """
        if self._waker is None or self._closing:
            return
        deadline = time.monotonic() + seconds
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        self._waker.close()
        for sock in connections:
            _shut(sock, socket.SHUT_RD)
        for thread in (self._threads[0], *connections.values()):
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        for sock in connections:
            _shut(sock, socket.SHUT_RDWR)
        self._jobs.put(None)
        self._threads[1].join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self.start() if self._listener is None else self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket, wake: socket.socket) -> None:
        with listener, wake, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                selector.select()
                if self._closing:
                    break
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError:
                    # Out of descriptors: the connection stays in the backlog, and one that ends makes room.
                    wake.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        wake.recv(1)
                    continue
                self._admit(sock)
            # A forked child may hold the socket as well: closing it here would leave the port listening.
            _shut(listener, socket.SHUT_RDWR)

    def _admit(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name=f"{names.SCOPE}-connection", daemon=True)
        with self._lock:
            full = self._closing or len(self._connections) >= self._limits.connections
            if not full:
                self._connections[sock] = thread
        if not full:
            try:
                thread.start()
            except RuntimeError:  # no more threads
                with self._lock:
                    del self._connections[sock]
            else:
                return
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0)
            error = HttpError(503, "too many connections", Retry_After="1")
            sock.send(answers.refusal(error, answers.JSON, _CLOSE))

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, EOFError):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                timed = TimedSocket(sock, Deadline(self._limits.idle))
                stream = timed.makefile()
                while stream.peek(1) and self._exchange(timed, stream):
                    timed.deadline = Deadline(self._limits.idle)
        except Exception:  # a bug in here must not print a traceback into the host's terminal
            _log.debug("receiver: a connection failed", exc_info=True)
        finally:
            with self._lock:
                self._connections.pop(sock, None)

    def _exchange(self, timed: TimedSocket, stream: io.BufferedReader) -> bool:
        """
        Read one request and answer it; True if another may follow on this connection.
        """
        timed.deadline = Deadline(self._limits.request)
        media_type, head = answers.JSON, None
        try:
            head = http1.read_head(stream)
            if head.media_type == answers.PROTOBUF:
                media_type = answers.PROTOBUF
            signal = self._check(head)
            coding = http1.content_coding(head)
            http1.check_framing(head, self._limits.body)
        except HttpError as error:
            return self._refuse(timed, error, media_type)
        _continue(timed, head)
        with self._room.share() as charge:
            try:
                body = http1.read_body(stream, head, self._limits.body, charge)
            except HttpError as error:
                return self._refuse(timed, error, media_type)
            except TimeoutError:
                return self._refuse(timed, HttpError(408, "the request took too long"), media_type)
            outcome = self._hand_over(_Job(signal, media_type, coding, body))
        keep = head.keep_alive and not self._closing
        headers = {} if keep else _CLOSE
        timed.deadline = Deadline(self._limits.request)
        if isinstance(outcome, HttpError):
            timed.sendall(answers.refusal(outcome, media_type, headers))
        else:
            timed.sendall(answers.good(signal, outcome, media_type, headers))
        return keep

    def _check(self, head: Head) -> Signal:
        signal = _SIGNALS.get(head.path)
        if signal is None:
            raise HttpError(404, "the paths are /v1/logs, /v1/traces and /v1/metrics")
        if head.method != "POST":
            raise HttpError(405, "the method is POST", Allow="POST")
        if self._token is not None:
            scheme, _, given = head.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
                raise HttpError(401, "the token is missing or wrong", WWW_Authenticate="Bearer")
        if head.media_type not in {answers.JSON, answers.PROTOBUF}:
            raise HttpError(415, f"the content type is {answers.JSON} or {answers.PROTOBUF}")
        return signal

    def _refuse(self, timed: TimedSocket, error: HttpError, media_type: str) -> bool:
        """
        Answer before the body was read, then read on for a moment.

        To close at once would reset the connection, and the sender would lose the answer while it still writes.
        """
        timed.deadline = Deadline(_LINGER_SECONDS)
        timed.sendall(answers.refusal(error, media_type, _CLOSE))
        _shut(timed.sock, socket.SHUT_WR)
        left, scratch = _LINGER_BYTES, bytearray(64 * 1024)
        while left > 0 and not self._closing:
            timed.sock.settimeout(timed.deadline.left())
            size = timed.sock.recv_into(scratch)
            if not size:
                break
            left -= size
        return False

    def _hand_over(self, job: _Job) -> Rejection | HttpError | None:
        self._jobs.put(job)
        if not job.done.wait(self._limits.sink):
            job.abandoned, job.body = True, b""
            return HttpError(503, "the receiver is too slow", Retry_After="1")
        return job.outcome

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.abandoned:
                job.outcome = self._sink_outcome(job)
            job.done.set()
            del job  # an idle worker must not keep the last body

    def _sink_outcome(self, job: _Job) -> Rejection | HttpError | None:
        try:
            body = _parse(job, self._limits.inflated)
        except HttpError as error:
            return error
        except (ValueError, RecursionError) as error:
            return HttpError(400, f"not an OTLP request for {job.signal}: {error}"[:300])
        except ImportError:
            return HttpError(415, f"this receiver reads {answers.JSON} only")
        try:
            return self._sink(Request(job.signal, body))
        except Busy as busy:
            return HttpError(429, "the receiver is busy", Retry_After=str(busy.retry_after))
        except BaseException:  # whatever the sink raises, the only worker goes on
            _log.debug("receiver: the sink failed", exc_info=True)
            return HttpError(500, "the request could not be taken in")


def _parse(job: _Job, limit: int) -> dict[str, Any]:
    plain = http1.inflate(job.body, job.coding, limit)
    if job.media_type == answers.PROTOBUF:
        return otlp_proto.parse(job.signal, bytes(plain))
    body = json.loads(plain)
    if not isinstance(body, dict):
        message = "the body is no object"
        raise ValueError(message)  # noqa: TRY004 - like any other body without form
    return body


def _continue(timed: TimedSocket, head: Head) -> None:
    if head.minor and head.headers.get("expect", "").lower() == "100-continue":
        timed.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def _shut(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
