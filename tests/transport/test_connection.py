from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from ckpt_sentry import config
from ckpt_sentry.core.report import Identity, LoadError
from ckpt_sentry.launcher.socket_server import LauncherSocket
from ckpt_sentry.transport import connection, otlp_json
from ckpt_sentry.transport.connection import Connection
from ckpt_sentry.transport.events import Event
from tests.collector.jobs import failing, finished, started

ME = Identity("run7-a1b2", rank=1, local_rank=1, world_size=2, local_world_size=2, node="node0", pid=7)
ERROR = LoadError("OSError", "[Errno 5] Input/output error", "read")
WAIT = 10.0
BRIEF = 0.05


class Launcher:
    """
    A launcher's socket, and what it heard.
    """

    def __init__(self) -> None:
        self.requests: Queue[dict[str, Any]] = Queue()
        self.gone: Queue[Identity] = Queue()
        self.questions: Queue[dict[str, Any]] = Queue()
        self.socket = LauncherSocket(self.requests.put, self.gone.put)

    def worker(self, who: Identity | None = ME) -> Connection:
        made = Connection(self.socket.path)
        if who is not None:
            made.introduce(who, self.questions.put)
        return made

    def event(self) -> Event:
        (event,), refused = otlp_json.decode(self.requests.get(timeout=WAIT))
        assert refused == 0
        return event


@contextmanager
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    made.socket.start()
    try:
        yield made
    finally:
        made.socket.close()


@contextmanager
def stopped() -> Iterator[str]:
    """
    A launcher that was stopped (SIGSTOP): the kernel takes connections and bytes for it, and nobody reads.
    """
    with LauncherSocket(print, print)._listener as listener:
        yield listener.getsockname()


def test_an_event_arrives_and_is_acknowledged() -> None:
    with launcher() as far:
        way = far.worker()
        assert way.send(started(1, 2), WAIT)
        assert way.send(failing(1, ERROR, 2), WAIT)
        assert way.taken(WAIT)
        assert [far.event(), far.event()] == [started(1, 2), failing(1, ERROR, 2)]
        assert way.untaken() == []
        way.close()


def test_a_worker_is_asked_and_answers_on_a_thread_of_its_own() -> None:
    with launcher() as far:
        way = far.worker()
        assert way.send(started(1), WAIT)
        assert way.taken(WAIT)
        assert far.socket.workers() == (ME,)
        far.socket.ask({"loads": {"a": 1.5}})
        assert far.questions.get(timeout=WAIT) == {"loads": {"a": 1.5}}
        way.close()


def test_what_was_said_arrives_before_the_end() -> None:
    with launcher() as far:
        way = far.worker()
        for rank in range(100):
            assert way.send(started(rank), WAIT)
        way.close()
        assert far.gone.get(timeout=WAIT) == ME
        assert [far.event().identity.rank for _ in range(100)] == list(range(100))
        assert far.socket.workers() == ()


def test_whoever_is_no_worker_is_neither_asked_nor_missed() -> None:
    with launcher() as far:
        way = far.worker(None)
        assert way.send(started(1), WAIT)
        assert way.taken(WAIT)
        assert far.socket.workers() == ()
        way.close()
    with pytest.raises(Empty):
        far.gone.get_nowait()


def test_a_large_report_goes_over_whole() -> None:
    large = LoadError("OSError", "x" * 1_000_000, "read")
    with launcher() as far:
        way = far.worker()
        assert way.send(failing(1, large), WAIT)
        assert way.taken(WAIT)
        assert far.event() == failing(1, large)
        way.close()


def test_a_launcher_that_does_not_read_keeps_nobody() -> None:
    with stopped() as path:
        way = Connection(path)
        assert way.send(started(0), BRIEF)
        assert not way.taken(BRIEF)
        assert way.untaken() == [started(0)]
        while way.send(failing(0, LoadError("E", "x" * 50_000)), BRIEF):
            pass
        # Half a line lies in the kernel: nothing more goes this way.
        assert not way.send(started(0), WAIT)
        way.close()


def test_a_launcher_that_has_kept_somebody_waiting_is_not_waited_for_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SILENT_SECONDS", BRIEF)
    far = LauncherSocket(lambda _: None, lambda _: None)
    way = Connection(far.path)
    assert way.send(started(0), WAIT)
    assert not way.taken(BRIEF)
    # A second wait of this length would not end here.
    assert not way.taken(threading.TIMEOUT_MAX)
    far.start()
    with way._news:
        assert way._news.wait_for(way._is_settled, WAIT)
    assert way.send(failing(0, ERROR), WAIT)
    assert way.taken(WAIT)
    far.close()
    way.close()


def test_nobody_at_the_path_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Connection(str(tmp_path / "socket"))
    with launcher() as far:
        path = far.socket.path
    with pytest.raises(OSError, match="No such file"):
        Connection(path)


def test_a_launcher_that_ends_is_known_at_the_next_word() -> None:
    with launcher() as far:
        way = far.worker()
        assert way.send(started(1), WAIT)
        assert way.taken(WAIT)
    assert not way.send(finished(1), WAIT) or not way.taken(WAIT)
    assert way.untaken() in ([], [finished(1)])
    way.close()


def test_a_signal_handler_that_sends_amid_a_line_does_not_spoil_it() -> None:
    large = failing(1, LoadError("OSError", "x" * 1_000_000, "read"))
    with launcher() as far:
        way = far.worker()
        ringing = threading.Lock()

        def ring(*_: object) -> None:
            # A slow machine would come here again before it is through.
            if ringing.acquire(blocking=False):
                way.send(started(7), WAIT)
                ringing.release()

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 2e-3, 2e-3)
        try:
            assert all(way.send(large, WAIT) for _ in range(20))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert way.taken(WAIT)
        found = [far.event() for _ in range(far.requests.qsize())]
        assert found.count(large) == 20
        assert set(map(type, found)) == {type(large), type(started(7))}
        way.close()


def test_threads_send_whole_lines() -> None:
    with launcher() as far:
        way = far.worker()

        def talk(rank: int) -> None:
            for _ in range(50):
                assert way.send(failing(rank, LoadError("E", "x" * 10_000)), WAIT)

        threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert way.taken(WAIT)
        assert sorted(far.event().identity.rank for _ in range(200)) == sorted([0, 1, 2, 3] * 50)
        way.close()


def test_a_process_has_one_connection_and_a_forked_child_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher() as far:
        monkeypatch.setenv("CKPT_SENTRY_SOCKET", far.socket.path)
        config.reset()
        way = connection.connect()
        assert way is not None
        assert connection.connect() is way is connection.opened()
        way.introduce(ME, far.questions.put)
        child = os.fork()
        if child == 0:
            mine = connection.connect()
            os._exit(int(mine is way or mine is None or not mine.send(started(3), WAIT) or not mine.taken(WAIT)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert far.event() == started(3)
        # The child's end is no end of its parent's connection.
        assert way.send(started(1), WAIT)
        assert way.taken(WAIT)
        assert far.gone.empty()
        connection.forget()
        assert far.gone.get(timeout=WAIT) == ME
    config.reset()


def test_without_a_launcher_there_is_no_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config.reset()
    assert connection.connect() is None
    monkeypatch.setenv("CKPT_SENTRY_SOCKET", str(tmp_path / "socket"))
    config.reset()
    assert connection.connect() is None
    connection.forget()
    config.reset()


@pytest.mark.parametrize("said", [b"[]\n", b"not json\n", b'{"taken": "x"}\n', b"x" * (2 * connection.MAX_LINE)])
def test_what_is_no_launcher_is_not_listened_to(said: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0ckpt_sentry-test-{os.getpid()}")
        listener.listen()
        way = Connection(listener.getsockname().decode())
        far, _ = listener.accept()
        with far:
            assert way.send(started(0), WAIT)
            far.sendall(said)
            assert not way.taken(WAIT)
            assert way.untaken() == [started(0)]
        way.close()


def _no_thread(*_: object) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_where_no_thread_can_be_had_whoever_waits_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection._thread, "start_new_thread", _no_thread)
    with launcher() as far:
        way = far.worker()
        assert way.send(started(1, 2), WAIT)
        assert way.taken(WAIT)
        assert far.event() == started(1, 2)
    # It is gone.
    assert not (way.send(finished(1, 2), BRIEF) and way.taken(WAIT))
    way.close()


def test_where_no_thread_can_be_had_a_silent_launcher_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection._thread, "start_new_thread", _no_thread)
    with stopped() as path:
        way = Connection(path)
        assert way.send(started(1, 2), WAIT)
        assert not way.taken(BRIEF)
        way.close()
