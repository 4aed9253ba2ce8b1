"""
The worker's way to its launcher: events over HTTP, each acknowledged within a given time or given up.

One connection for the life of a `Channel` (one load), no thread, no queue: what was acknowledged has been taken in by
the receiver, what was not is known at once.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, Final, Literal

from ckpt_sentry.guard import let_through
from ckpt_sentry.telemetry import otlp_json
from ckpt_sentry.telemetry.deadline import Deadline, TimedSocket

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from ckpt_sentry.telemetry.events import Event

Reach = Literal["loopback", "anywhere"]

_PATH: Final = "/v1/logs"
_MAX_ANSWER: Final = 64 * 1024


class _Connection(http.client.HTTPConnection):
    """
    A connection over a socket that is open already; `http.client` opens none itself.
    """

    sock: TimedSocket  # it has the methods that `http.client` calls
    auto_open = 0

    def __init__(self, host: str, port: int, sock: TimedSocket) -> None:
        super().__init__(host, port)
        self.sock = sock


class Channel:
    """
    Sends events to the OTLP/HTTP receiver at `address` ("HOST:PORT", "[::1]:PORT", or with "http://" before it).

    Uses no proxy, whatever the environment says. May be shared by threads: sends come one after the other. A forked
    child opens its own connection. Raises ValueError for an address without a port, and, unless `reach` is
    "anywhere", for a host other than a literal loopback address or "localhost".
    """

    def __init__(self, address: str, token: str | None = None, *, reach: Reach = "loopback") -> None:
        self._host, self._port = split_address(address)
        if reach == "loopback" and not is_loopback(self._host):
            message = f"{address!r} is not an address of this machine"
            raise ValueError(message)
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self.status: int | None = None
        """The HTTP status of the last answer; None where there was none."""
        self.gone = False
        """Whether nobody listens at the address any more, unlike somebody who is slow."""
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._pid = os.getpid()

    def send(self, event: Event, seconds: float) -> bool:
        """
        Send one event; True if the receiver acknowledged it within `seconds` (connecting included).

        Never raises OSError.
        """
        return self.post(otlp_json.encode((event,)), seconds)

    def post(self, request: Mapping[str, Any], seconds: float) -> bool:
        """
        Send an `ExportLogsServiceRequest` in OTLP/JSON form as it is; see `send`.

        An event may arrive twice: a connection that broke before the answer is replaced once, as the receiver closes
        those that were idle for long. After a failure the next call begins anew.
        """
        body = json.dumps(request, separators=(",", ":")).encode()
        deadline = Deadline(seconds)
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            return False
        try:
            reused = self._own_connection() is not None
            try:
                return self._exchange(body, deadline)
            except TimeoutError as error:
                self._drop()
                let_through(error)
                return False
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                let_through(error)
                self.gone = isinstance(error, ConnectionRefusedError)
                if not reused:
                    return False
            try:
                return self._exchange(body, deadline)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                let_through(error)
                self.gone = isinstance(error, ConnectionRefusedError)
                return False
        finally:
            self._lock.release()

    def close(self) -> None:
        """
        Close the connection; a later send opens another.
        """
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_connection(self) -> _Connection | None:
        if self._pid != os.getpid():
            self._drop()
            self._pid = os.getpid()
        return self._connection

    def _exchange(self, body: bytes, deadline: Deadline) -> bool:
        self.status = None
        connection = self._connection
        if connection is None:
            connection = self._connection = _connect(self._host, self._port, deadline)
        connection.sock.deadline = deadline
        connection.request("POST", _PATH, body, self._headers)
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER)
        self.status = response.status
        if response.will_close or not response.isclosed():
            self._drop()
        return response.status == http.client.OK and not _refused(answer)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def split_address(address: str) -> tuple[str, int]:
    """
    Host and port of "HOST:PORT", "[IPv6]:PORT" or "http://HOST:PORT"; raises ValueError for anything else.
    """
    bare = address.removeprefix("http://").removesuffix("/")
    host, colon, port = bare.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "/" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) in range(1, 2**16)):
        message = f"{address!r} is not HOST:PORT"
        raise ValueError(message)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """
    Whether `host` is "localhost" or a literal loopback address. No name is looked up.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _connect(host: str, port: int, deadline: Deadline) -> _Connection:
    """
    Try every address of the host until the deadline. Only the look-up of a name is not bounded by it.
    """
    failure: OSError | None = None
    # As bytes, a name needs no codec: a process that has given up its rights may no longer be able to import one.
    name = host.encode() if host.isascii() else host
    for family, kind, proto, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            let_through(error)
            failure = error
            continue
        return _Connection(host, port, TimedSocket(sock, deadline))
    raise failure or OSError("the host has no address")


def _refused(answer: bytes) -> bool:
    """
    Whether the receiver says that it could not take the record in (OTLP: partial success).
    """
    try:
        partial = json.loads(answer or b"{}").get("partialSuccess") or {}
        return int(partial.get("rejectedLogRecords") or 0) > 0
    except (ValueError, AttributeError, TypeError):
        return False
