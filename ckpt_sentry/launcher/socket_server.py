"""
The launcher's end of all connections of its workers (`transport.connection`): a Unix socket that is its user's alone.

The socket lies in a folder of its own with mode 0700, so that no other user can reach it (unix(7), "Pathname socket
ownership and permissions"), and whoever connects is asked for by `SO_PEERCRED`. There is no port and no token.

One thread serves all connections. It takes lines in the order in which they arrive, which on one machine is the order
in which things happened; a connection that closes tells at once that its worker is gone, however it ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import selectors
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import names
from ckpt_sentry.core import codec
from ckpt_sentry.core.report import Identity
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.transport.connection import json_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_LINE: Final = 4 * 1024 * 1024
"""Bytes of one request; a report is bounded far below."""
READ_BYTES: Final = 256 * 1024
BACKLOG: Final = 1024
MOST_OPEN: Final = 4096
SHARE_OF_FILES: Final = 4
"""One in so many of the process's file descriptors may be a worker's: the others are the launcher's own."""
LONGEST_PATH: Final = 100
"""Bytes of a socket's path (unix(7): `sun_path` has 108)."""
CLOSE_SECONDS: Final = 1.0
DRAIN_SECONDS: Final = 0.5
_BOOT_CHARS: Final = 8
_STALE_SECONDS: Final = 60.0
"""How old a folder has to be: a younger one may be about to be listened in."""
_MOST_LOOKED_AT: Final = 10_000
_MOST_REMOVED: Final = 256
_UCRED: Final = struct.Struct("3i")
"""Process, user and group id (unix(7), SO_PEERCRED)."""


@dataclass(slots=True, eq=False)
class _Peer:
    """
    One connection. `greeted` once its first line was one of ours; `who` is None unless it is a worker's. `acknowledged`
    is how many of the `taken` requests it knows of.
    """

    socket: socket.socket
    pid: int
    greeted: bool = False
    who: Identity | None = None
    unread: bytearray = field(default_factory=bytearray)
    taken: int = 0
    acknowledged: int = 0


class LauncherSocket:
    """
    Listens from `start` to `close`. From its own thread it calls `take(request)` with each OTLP request in JSON form,
    and `on_disconnect(identity)` when a worker's connection has closed.
    """

    def __init__(self, take: Callable[[dict[str, Any]], object], on_disconnect: Callable[[Identity], object]) -> None:
        self._take = take
        self._on_disconnect = on_disconnect
        self._peers: dict[socket.socket, _Peer] = {}
        self._lock = threading.Lock()
        self._folder = _own_folder()
        self.path = os.path.join(self._folder, "socket")
        self._most = _most_open()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.path)
            self._listener.listen(BACKLOG)
        except BaseException:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._listener.settimeout(0)
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"{names.SCOPE}-socket", daemon=True)

    def start(self) -> None:
        """
        Begin to listen.
        """
        self._thread.start()

    def close(self) -> None:
        """
        Take in what has arrived, and let all go; `on_disconnect` is not called any more.
        """
        self._waker.close()
        self._thread.join(CLOSE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def workers(self) -> tuple[Identity, ...]:
        """
        The workers whose connections are open, by rank.
        """
        with self._lock:
            known = [peer.who for peer in self._peers.values() if peer.who is not None]
        return tuple(sorted(known, key=lambda who: (who.rank, who.pid)))

    def ask(self, question: Mapping[str, Any]) -> None:
        """
        Send a question to every worker. Never waits: a connection that takes nothing now is passed over.
        """
        data = json_line(question)
        with self._lock:
            peers = [peer for peer in self._peers.values() if peer.who is not None]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _serve(self) -> None:
        with self._listener, self._wake, self._selector as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing:
                ready = [key.fileobj for key, _ in selector.select()]
                self._closing = self._wake in ready
                for sock in ready:
                    self._turn(sock)
            selector.unregister(self._wake)
            # What workers have sent right before their end, and before ours, lies here still.
            until = time.monotonic() + DRAIN_SECONDS
            while (ready := [key.fileobj for key, _ in selector.select(0)]) and time.monotonic() < until:
                for sock in ready:
                    self._turn(sock)
            for peer in list(self._peers.values()):
                peer.socket.close()

    @contained("socket_server.serve")
    def _turn(self, sock: Any) -> None:
        if sock is self._wake:
            return
        if sock is self._listener:
            self._accept()
        elif (peer := self._peers.get(sock)) is not None and not self._read(peer):
            self._drop(peer)
            if peer.who is not None and not self._closing:
                self._on_disconnect(peer.who)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # Too many open files: whoever knocks has to wait, and the least known has to go.
            self._make_room()
            return
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in {0, os.geteuid()} or (len(self._peers) >= self._most and not self._make_room()):
            sock.close()
            return
        sock.settimeout(0)
        peer = _Peer(sock, pid)
        with self._lock:
            self._peers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ)
        # Its greeting lies here as a rule: whoever has greeted does not have to make room.
        self._turn(sock)

    def _make_room(self) -> bool:
        """
        Let the connection go that has been silent for longest, or one of a process that has several.
        """
        seen: set[int] = set()
        for peer in list(self._peers.values()):
            if not peer.greeted or peer.pid in seen:
                self._drop(peer)
                return True
            if peer.pid:  # 0 where it belongs to another namespace of processes
                seen.add(peer.pid)
        return False

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.pop(peer.socket, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()

    def _read(self, peer: _Peer) -> bool:
        """
        Take in what has come; False when the connection is to be closed.
        """
        try:
            data = peer.socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        peer.unread += data
        if b"\n" in data:
            *whole, peer.unread = peer.unread.split(b"\n")
            if not all(self._receive(peer, line) for line in whole):
                return False
        self._acknowledge(peer)
        return bool(data) and len(peer.unread) <= MAX_LINE

    def _receive(self, peer: _Peer, line: bytes | bytearray) -> bool:
        """
        Take one line; False where it is not of ours.
        """
        try:
            words = json.loads(line)
            if not peer.greeted:
                peer.greeted = isinstance(words["pid"], int)
                return peer.greeted
            if "who" in words:
                peer.who = codec.restore(Identity, words["who"])
                return True
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        peer.taken += 1
        self._pass_on(words)
        return True

    @contained("socket_server.take")
    def _pass_on(self, request: dict[str, Any]) -> None:
        self._take(request)

    def _acknowledge(self, peer: _Peer) -> None:
        if peer.acknowledged == peer.taken:
            return
        try:
            # A few bytes are taken whole or not at all; whoever does not read them does not wait for them either.
            peer.socket.send(json_line({"taken": peer.taken}), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            peer.acknowledged = peer.taken
        except OSError:
            return


def _own_folder() -> str:
    """
    A new folder that only this user can enter (mode 0700), where a socket's path has room. Those of launchers that were
    killed go.
    """
    prefix = f"{names.SCOPE}-{_boot()}-"
    made = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(made)) + len("/socket") > LONGEST_PATH:
        os.rmdir(made)
        made = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    _remove_stale(os.path.dirname(made), prefix)
    return made


def _boot() -> str:
    """
    What tells the sockets of this running kernel from those of another that shares the folder: nobody here can connect
    to those, though somebody there listens. Empty where the kernel does not say.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(_BOOT_CHARS)
    except OSError:
        return ""


@contained("socket_server.remove_stale")
def _remove_stale(parent: str, prefix: str) -> None:
    """
    Remove folders of launchers that are no more: this user's own, of this boot, in which nobody listens.
    """
    if prefix == f"{names.SCOPE}--":
        return
    with os.scandir(parent) as entries:
        found = [entry for entry in itertools.islice(entries, _MOST_LOOKED_AT) if entry.name.startswith(prefix)]
    for entry in found[:_MOST_REMOVED]:
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and time.time() - status.st_mtime > _STALE_SECONDS and _is_left(entry.path):
                os.unlink(os.path.join(entry.path, "socket"))
                os.rmdir(entry.path)


def _is_left(folder: str) -> bool:
    if not stat.S_ISSOCK(os.lstat(os.path.join(folder, "socket")).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.settimeout(0)
        try:
            knocking.connect(os.path.join(folder, "socket"))
        except ConnectionRefusedError:  # bound by a process that has ended (unix(7))
            return True
    return False


def _most_open() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if files == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, files // SHARE_OF_FILES))
