"""
A line from each worker to its launcher, open as long as the worker lives.

It has three uses. The launcher asks through it what a worker is about, and a thread that does nothing else answers, so
that also a worker that never came to a load, or whose main thread is blocked in native code, can be seen. A worker
that comes to the next phase of a load says so without waiting for an answer: what the kernel has taken arrives, even if
the worker is killed right after. And when the worker is gone, however it ended, the kernel closes the line at once:
that gives the order of deaths under launchers that tell nobody about them.

The price is one parked thread in each worker and one connection on loopback, made once, when the process group is
there. No signal is sent and no signal handler is set: both are the host's. A worker whose thread holds the
interpreter lock in native code can not answer, and that is then said. `faulthandler.dump_traceback_later` could look
into it, but there is one such timer in a process, and it is the host's as well.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import names
from ckpt_sentry.audit import codec
from ckpt_sentry.audit.report import Identity
from ckpt_sentry.guard import contained, let_through
from ckpt_sentry.telemetry.channel import split_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONNECT_SECONDS: Final = 1.0
MAX_LINE: Final = 256 * 1024
MAX_LINES_OPEN: Final = 4096


@dataclass(slots=True, eq=False)
class _Line:
    """
    One worker's connection; `who` is None until it has said its name and the token.
    """

    sock: socket.socket
    who: Identity | None = None
    unread: bytearray = field(default_factory=bytearray)


class Exchange:
    """
    The launcher's end of all lines: listens on loopback from `start` to `close`.

    From the exchange's own thread, `heard(request)` is called with each OTLP request (in JSON form) that a worker has
    sent, and `gone(identity)` when its line has closed.
    """

    def __init__(
        self, token: str, heard: Callable[[dict[str, Any]], object], gone: Callable[[Identity], object]
    ) -> None:
        self._token = token
        self._heard = heard
        self._gone = gone
        self._lines: dict[socket.socket, _Line] = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(0)
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"{names.SCOPE}-lifelines", daemon=True)

    @property
    def address(self) -> str:
        """
        "127.0.0.1:PORT".
        """
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def start(self) -> None:
        """
        Begin to listen.
        """
        self._thread.start()

    def close(self) -> None:
        """
        Let all lines go; `gone` is not called any more.
        """
        self._waker.close()
        self._thread.join(1.0)

    def alive(self) -> tuple[Identity, ...]:
        """
        The workers whose lines are open, by rank.
        """
        with self._lock:
            known = [line.who for line in self._lines.values() if line.who is not None]
        return tuple(sorted(known, key=lambda who: (who.rank, who.pid)))

    def ask(self, question: Mapping[str, Any]) -> None:
        """
        Send a question to every worker. Never waits: a line that takes nothing now is passed over.
        """
        data = json.dumps(question, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            lines = [line for line in self._lines.values() if line.who is not None]
        for line in lines:
            with contextlib.suppress(OSError):
                line.sock.send(data)

    def _serve(self) -> None:
        with self._listener, self._wake, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake in ready:
                    break
                for sock in ready:
                    self._turn(selector, sock)
            for line in self._lines.values():
                line.sock.close()

    @contained("lifeline.serve")
    def _turn(self, selector: selectors.BaseSelector, sock: Any) -> None:
        if sock is self._listener:
            self._accept(selector)
        elif not self._read(self._lines[sock]):
            selector.unregister(sock)
            with self._lock:
                line = self._lines.pop(sock)
            sock.close()
            if line.who is not None:
                self._gone(line.who)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._lines) >= MAX_LINES_OPEN:
                sock.close()
                return
            sock.settimeout(0)
            with self._lock:
                self._lines[sock] = _Line(sock)
            selector.register(sock, selectors.EVENT_READ)

    def _read(self, line: _Line) -> bool:
        """
        Take in what has come; False when the line is to be closed.
        """
        try:
            data = line.sock.recv(MAX_LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        line.unread += data
        *whole, rest = line.unread.split(b"\n")
        line.unread = rest
        for words in whole:
            if line.who is not None:
                self._hear(words)
            elif (who := self._name(words)) is not None:
                with self._lock:
                    line.who = who
            else:
                return False
        return bool(data) and len(rest) <= MAX_LINE

    @contained("lifeline.hear")
    def _hear(self, words: bytes | bytearray) -> None:
        request = json.loads(words)
        if isinstance(request, dict):
            self._heard(request)

    def _name(self, hello: bytes | bytearray) -> Identity | None:
        try:
            words = json.loads(hello)
            if not hmac.compare_digest(str(words["token"]).encode(), self._token.encode()):
                return None
            return codec.restore(Identity, words["who"])
        except (ValueError, KeyError, TypeError):
            return None


class Lifeline:
    """
    The worker's end: a parked daemon thread that calls `answer(question)` for each question, and ends with the line.
    """

    def __init__(self, address: str, token: str, who: Identity, answer: Callable[[dict[str, Any]], None]) -> None:
        """
        Connect and say who we are. Raises OSError where nobody listens.
        """
        self._answer = answer
        self._telling = threading.RLock()
        self._sock = socket.create_connection(split_address(address), CONNECT_SECONDS)
        hello = json.dumps({"token": token, "who": codec.dump(who)}, separators=(",", ":"))
        self._sock.sendall(hello.encode() + b"\n")
        self._sock.settimeout(None)
        threading.Thread(target=self._listen, name=f"{names.SCOPE}-lifeline", daemon=True).start()

    def tell(self, request: Mapping[str, Any]) -> bool:
        """
        Send an OTLP request (in JSON form) without waiting; False where the line does not take it.
        """
        data = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        with self._telling:
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT)
            except OSError as error:
                let_through(error)
                return False
            if sent < len(data):
                # Half a line would spoil the next one.
                self._sock.close()
            return sent == len(data)

    def close(self) -> None:
        """
        Close this process's end. The line itself stays open as long as another process holds it.
        """
        self._sock.close()

    def _listen(self) -> None:
        with self._sock, contextlib.suppress(OSError):
            unread = b""
            while (data := self._sock.recv(64 * 1024)) and len(unread) <= MAX_LINE:
                *whole, unread = (unread + data).split(b"\n")
                for line in whole:
                    self._reply(line)

    @contained("lifeline.answer")
    def _reply(self, line: bytes) -> None:
        self._answer(json.loads(line))
