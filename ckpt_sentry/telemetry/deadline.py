"""
A socket whose operations together end by a deadline.

A socket's own timeout bounds each call: a peer that sends a byte now and then is never cut. Here the rest of the time
is set before each call.
"""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from _typeshed import WriteableBuffer


class Deadline:
    """
    A moment on the monotonic clock, `seconds` from now.
    """

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """
        The seconds that are left; raises TimeoutError where there are none.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            message = "the time is up"
            raise TimeoutError(message)
        return left


class TimedSocket:
    """
    The few socket methods that HTTP needs, each within `deadline`, which may be replaced at any time.

    Owns the socket: `close` closes it. All methods raise OSError (TimeoutError once the deadline has passed).
    """

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self.sock = sock
        self.deadline = deadline

    def sendall(self, data: bytes) -> None:
        """
        Send all of `data`.
        """
        self.sock.settimeout(self.deadline.left())
        self.sock.sendall(data)

    def makefile(self, _mode: str = "rb") -> io.BufferedReader:
        """
        A buffered reader (the mode is always "rb", as `http.client` asks); closing it leaves the socket open.
        """
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        """
        Close the socket.
        """
        self.sock.close()


class _Reader(io.RawIOBase):
    def __init__(self, owner: TimedSocket) -> None:
        super().__init__()
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        self._owner.sock.settimeout(self._owner.deadline.left())
        return self._owner.sock.recv_into(buffer)
