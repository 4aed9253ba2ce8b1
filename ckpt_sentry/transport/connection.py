"""
A worker's one connection to its launcher: events out, acknowledged; questions in.

A Unix stream socket, one JSON object a line. The first line is `{"pid": N}`. A worker that others may wait for sends
`{"who": Identity}`; each other line is one OTLP request in JSON form. The launcher (`socket_server`) answers
`{"taken": N}`, how many requests it has taken in so far, and sends questions, `{"loads": {…}}`, at any time.

What the kernel has taken arrives, even if the worker is killed right after. So nobody waits here, but whoever has to
know that the launcher reads: one that was stopped takes connections and bytes, and acknowledges nothing.

The price is one parked daemon thread, which answers questions also while the main thread is blocked in native code. No
signal is sent and no signal handler is set: both are the host's.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config
from ckpt_sentry.core import codec
from ckpt_sentry.patching.guard import contained, let_through
from ckpt_sentry.transport import otlp_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_sentry.core.report import Identity
    from ckpt_sentry.transport.events import Event

CONNECT_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.01
SILENT_SECONDS: Final = 0.5
"""A launcher that has let somebody wait for so long is not waited for again before it has answered."""
MAX_LINE: Final = 64 * 1024
"""Bytes of a question beyond which the launcher is not one of ours."""
MOST_UNTAKEN: Final = 256
"""Events that are kept until they are acknowledged; older ones are past saving."""


class Connection:
    """
    A connection that is open.

    May be used by several threads, and by a signal handler amid its own sending.

    Raises OSError where nobody listens at `path`.
    """

    def __init__(self, path: str) -> None:
        self._who: Identity | None = None
        self._answer: Callable[[dict[str, Any]], object] | None = None
        self._outgoing: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._sender: int | None = None
        self._news = threading.Condition()
        self._sent = 0
        self._taken = 0
        self._silent_at: int | None = None
        """How much the launcher had taken in when it last kept somebody waiting."""
        self._open = True
        self._untaken: deque[tuple[int, Event]] = deque(maxlen=MOST_UNTAKEN)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(self._socket, path)
            self._write(json_line({"pid": os.getpid()}), CONNECT_SECONDS)
        except BaseException:
            self._socket.close()
            raise
        self._unread = b""
        self._has_listener = True
        try:
            _thread.start_new_thread(self._listen, ())
        except RuntimeError:
            # From Python 3.12 on none is to be had any more when the interpreter ends: whoever waits listens himself.
            self._has_listener = False

    def introduce(self, who: Identity, answer: Callable[[dict[str, Any]], object]) -> None:
        """
        Send which worker this is, where that is news: from then on it is missed when it is gone, and asked.

        `answer(question)` is called on the thread of this connection.
        """
        self._answer = answer
        if who != self._who and self._hand_over(json_line({"who": codec.dump(who)}), CONNECT_SECONDS):
            self._who = who

    def send(self, event: Event, seconds: float) -> bool:
        """
        Hand one event over; True once the kernel has it. Waits only where the launcher has long not read.
        """
        return self._hand_over(otlp_json.line(event), seconds, event)

    def _hand_over(self, line: bytes, seconds: float, event: Event | None = None) -> bool:
        mine = threading.get_ident()
        is_nested = self._sender == mine
        if not self._open or not (is_nested or self._sending.acquire(timeout=max(0.0, seconds))):
            return False
        if event is not None:
            self._sent += 1
            self._untaken.append((self._sent, event))
        self._outgoing.append(line)
        if is_nested:
            # A signal handler amid a line: the frame that it interrupts sends this one after its own.
            return True
        try:
            self._sender = mine
            while self._outgoing:
                self._write(self._outgoing[0], seconds)
                self._outgoing.popleft()
        except OSError as error:
            # Half a line may have left, which the next one would spoil.
            self._open = False
            let_through(error)
        finally:
            self._sender = None
            self._sending.release()
        return self._open

    def taken(self, seconds: float) -> bool:
        """
        Whether the launcher has taken in all that was sent; waits for that at most `seconds`, and not at all for a
        launcher that has kept somebody waiting (`SILENT_SECONDS`) and has acknowledged nothing since.
        """
        if not self._has_listener:
            self._listen_until_settled(seconds)
            return self._taken >= self._sent
        with self._news:
            if self._silent_at == self._taken:
                seconds = 0.0
            if not self._news.wait_for(self._is_settled, max(0.0, seconds)) and seconds >= SILENT_SECONDS:
                self._silent_at = self._taken
        return self._taken >= self._sent

    def untaken(self) -> list[Event]:
        """
        What the launcher has not acknowledged, in its order; forgotten by this.
        """
        found = []
        while self._untaken:
            number, event = self._untaken.popleft()
            if number > self._taken:
                found.append(event)
        return found

    def close(self) -> None:
        """
        End the connection, for every process that holds it.
        """
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        """
        Close this process's end alone: a forked child's, of what is its parent's.
        """
        self._open = False
        self._socket.close()

    def _is_settled(self) -> bool:
        return self._taken >= self._sent or not self._open

    def _write(self, data: bytes, seconds: float) -> None:
        """
        Send all of it; raises TimeoutError where the kernel does not take it in time.
        """
        rest, until = memoryview(data), time.monotonic() + seconds
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0:
                    message = "the launcher does not read"
                    raise TimeoutError(message) from None
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                poll.poll(left * 1000)

    @contained("connection.listen")
    def _listen(self) -> None:
        try:
            while self._read():
                pass
        finally:
            self._open = False
            with self._news:
                self._news.notify_all()

    def _listen_until_settled(self, seconds: float) -> None:
        poll, until = select.poll(), time.monotonic() + seconds
        poll.register(self._socket, select.POLLIN)
        while not self._is_settled() and (left := until - time.monotonic()) > 0:
            if poll.poll(left * 1000) and not self._read():
                self._open = False

    def _read(self) -> bool:
        """
        Take in what the launcher has sent, and wait for it; False where nothing more will come.
        """
        try:
            data = self._socket.recv(MAX_LINE)
            *whole, self._unread = (self._unread + data).split(b"\n")
            for line in whole:
                self._receive(line)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            # Broken, closed at our own end, or no launcher of ours.
            let_through(error)
            return False
        return bool(data) and len(self._unread) <= MAX_LINE

    def _receive(self, line: bytes) -> None:
        words = json.loads(line)
        taken = words.pop("taken", None)
        if taken is None:
            if self._answer is not None:
                self._answer(words)
            return
        with self._news:
            self._taken = max(self._taken, int(taken))
            while self._untaken and self._untaken[0][0] <= self._taken:
                self._untaken.popleft()
            self._news.notify_all()


class _Own:
    """
    The connection of this process: None where there is no launcher, it is gone, or nothing was tried yet.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.connection: Connection | None = None
        self.lock = threading.RLock()


_own = _Own()


def connect() -> Connection | None:
    """
    The connection to this process's launcher, opened by the first call; None where no launcher listens.
    """
    path = config.settings().socket
    if path is None:
        return None
    with _own.lock:
        if _own.pid != os.getpid():
            _own.pid = os.getpid()
            try:
                _own.connection = Connection(path)
            except OSError as error:  # gone, or never of our time
                let_through(error)
        return _own.connection


def send_once(event: Event, seconds: float) -> None:
    """
    Bring the launcher one event, if there is one that listens, and wait until it has it, for at most `seconds` twice.
    """
    way = connect()
    if way is not None and way.send(event, seconds):
        way.taken(seconds)


def opened() -> Connection | None:
    """
    The connection of this process, if it has one already.
    """
    return _own.connection if _own.pid == os.getpid() else None


def forget() -> None:
    """
    Close the connection of this process; the next `connect` tries anew.
    """
    with _own.lock:
        connection, _own.connection, _own.pid = _own.connection, None, 0
    if connection is not None:
        connection.close()


def _connect(sock: socket.socket, path: str) -> None:
    """
    Connect within `CONNECT_SECONDS`. A launcher that has many at its door is "temporarily unavailable" (connect(2)).
    """
    until = time.monotonic() + CONNECT_SECONDS
    sock.settimeout(0)
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            break
    sock.settimeout(None)


def json_line(words: Mapping[str, Any]) -> bytes:
    """
    One message of the wire, in either direction.
    """
    return json.dumps(words, separators=(",", ":")).encode() + b"\n"


def _after_fork_in_child() -> None:
    """
    The connection is the parent's: held by a child, it would hide the parent's end.
    """
    inherited, _own.connection, _own.pid = _own.connection, None, 0
    _own.lock = threading.RLock()
    if inherited is not None:
        inherited.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
