from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

from ckpt_sentry.audit.report import Identity
from ckpt_sentry.lifeline import MAX_LINE, Exchange, Lifeline

ME = Identity("run7-a1b2", rank=1, local_rank=1, world_size=2, local_world_size=2, node="node0", pid=7)
WAIT = 10.0


class Ends:
    """
    An exchange and what it was told.
    """

    def __init__(self) -> None:
        self.heard: Queue[dict[str, Any]] = Queue()
        self.gone: Queue[Identity] = Queue()
        self.asked: Queue[dict[str, Any]] = Queue()
        self.exchange = Exchange("secret", self.heard.put, self.gone.put)

    def worker(self, token: str = "secret") -> Lifeline:
        return Lifeline(self.exchange.address, token, ME, self.asked.put)


@contextmanager
def exchange() -> Iterator[Ends]:
    ends = Ends()
    ends.exchange.start()
    try:
        yield ends
    finally:
        ends.exchange.close()


def test_a_worker_is_asked_and_answers_on_a_thread_of_its_own() -> None:
    with exchange() as ends:
        line = ends.worker()
        assert line.tell({"hello": 1})
        assert ends.heard.get(timeout=WAIT) == {"hello": 1}
        assert ends.exchange.alive() == (ME,)
        ends.exchange.ask({"loads": {"a": 1.5}})
        assert ends.asked.get(timeout=WAIT) == {"loads": {"a": 1.5}}
        line.close()


def test_what_was_told_arrives_before_the_end() -> None:
    with exchange() as ends:
        line = ends.worker()
        for number in range(100):
            assert line.tell({"number": number})
        line._sock.shutdown(socket.SHUT_RDWR)
        assert ends.gone.get(timeout=WAIT) == ME
        assert [ends.heard.get_nowait()["number"] for _ in range(100)] == list(range(100))
        assert ends.exchange.alive() == ()


def test_a_wrong_token_is_cut_off() -> None:
    with exchange() as ends:
        line = ends.worker(token="wrong")
        line.tell({"hello": 1})
        # Only the exchange closes here: the thread of the line ends by that.
        for thread in [thread for thread in threading.enumerate() if thread.name == "ckpt_sentry-lifeline"]:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert ends.heard.empty()
        assert ends.gone.empty()


def test_a_line_without_an_end_is_cut_off() -> None:
    with exchange() as ends, socket.create_connection(ends.exchange.address.split(":"), WAIT) as sock:
        try:
            sock.sendall(b"x" * (2 * MAX_LINE))
            rest = sock.recv(1)
        except OSError:
            rest = b""
        assert rest == b""


def test_nobody_is_told_of_an_end_after_close() -> None:
    with exchange() as ends:
        line = ends.worker()
        line.tell({})
        ends.heard.get(timeout=WAIT)
    line.close()
    assert ends.gone.empty()


def test_a_line_whose_other_end_is_closed_takes_nothing() -> None:
    with exchange() as ends:
        line = ends.worker()
        line.close()
        assert not line.tell({"hello": 1})
