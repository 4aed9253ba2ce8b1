from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_sentry.audit.report import Identity
from ckpt_sentry.collector.receiver import Busy, Limits, Receiver, Rejection, Request
from ckpt_sentry.telemetry import otlp_json
from ckpt_sentry.telemetry.channel import Channel, is_loopback, split_address
from ckpt_sentry.telemetry.events import PhaseEntered

EVENT = PhaseEntered(identity=Identity("run", 1), at=1.5, load_id="0af7651916cd43dd8448eb211c80319c", phase="plan")
ENOUGH = 10.0


def sent(address: str, token: str | None = None) -> bool:
    """Whether one event, sent by a channel of its own, was acknowledged."""
    with Channel(address, token) as channel:
        return channel.send(EVENT, ENOUGH)


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that gives each connection one of these answers, as soon as anything comes; then it is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                sock, _ = listener.accept()
                with sock:
                    sock.recv(65536)
                    sock.sendall(answer)
            listener.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(ENOUGH)


def test_an_event_arrives_and_is_acknowledged() -> None:
    got: list[Request] = []
    with Receiver(got.append, token="t") as receiver:
        channel = Channel(receiver.address, "t")
        assert channel.send(EVENT, ENOUGH)
        assert channel.send(EVENT, ENOUGH)
        channel.close()
    assert [otlp_json.decode(request.body) for request in got] == [([EVENT], 0)] * 2


def test_one_connection_for_all_sends() -> None:
    with Receiver(lambda _: None, limits=Limits(connections=1)) as receiver:
        channel = Channel(receiver.address)
        assert [channel.send(EVENT, ENOUGH) for _ in range(5)] == [True] * 5
        assert not sent(receiver.address)
        channel.close()


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_wrong_token_is_no_acknowledgement(token: str | None) -> None:
    with Receiver(print, token="t") as receiver:
        assert not sent(receiver.address, token)


def test_what_the_receiver_does_not_take_in_is_no_acknowledgement() -> None:
    def busy(_: Request) -> None:
        raise Busy

    with Receiver(busy) as receiver:
        assert not sent(receiver.address)
    with Receiver(lambda _: Rejection(1, "no form")) as receiver:
        assert not sent(receiver.address)


def test_an_absent_receiver_costs_nothing_and_raises_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    channel = Channel(address)
    assert [channel.send(EVENT, ENOUGH) for _ in range(3)] == [False] * 3
    channel.close()


def test_a_receiver_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = Channel(f"127.0.0.1:{listener.getsockname()[1]}")
        assert not channel.send(EVENT, 0.05)
        assert not channel.send(EVENT, 0.05)
        channel.close()


def test_a_receiver_that_trickles_is_given_up() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            sock, _ = listener.accept()
            with sock:
                while not stop.wait(0.01):
                    try:
                        sock.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        assert not Channel(f"127.0.0.1:{listener.getsockname()[1]}").send(EVENT, 0.2)
        stop.set()
        thread.join()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_without_time_nothing_is_sent(seconds: float) -> None:
    got: list[Request] = []
    with Receiver(got.append) as receiver:
        assert not Channel(receiver.address).send(EVENT, seconds)
    assert got == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200,
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000,
        b"HTTP/1.1 307 Elsewhere\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_other_answers_are_no_acknowledgement(answer: bytes) -> None:
    with answering(answer) as address:
        assert not sent(address)


def test_a_connection_that_the_receiver_closed_is_replaced() -> None:
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with answering(good, good, good) as address:
        channel = Channel(address)
        assert [channel.send(EVENT, ENOUGH) for _ in range(3)] == [True] * 3
        assert not channel.send(EVENT, ENOUGH)


def test_proxies_are_not_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")
    with Receiver(lambda _: None) as receiver:
        assert sent(receiver.address)


def test_threads_may_share_a_channel() -> None:
    got: list[Request] = []
    with Receiver(got.append) as receiver:
        channel = Channel(receiver.address)
        acknowledged: list[bool] = []
        threads = [
            threading.Thread(target=lambda: acknowledged.extend(channel.send(EVENT, ENOUGH) for _ in range(10)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        channel.close()
    assert acknowledged == [True] * 40
    assert len(got) == 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_connection_of_its_own() -> None:
    got: list[Request] = []
    with Receiver(got.append) as receiver:
        channel = Channel(receiver.address)
        assert channel.send(EVENT, ENOUGH)
        child = os.fork()
        if not child:
            os._exit(0 if channel.send(EVENT, ENOUGH) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert channel.send(EVENT, ENOUGH)
        channel.close()
    assert len(got) == 3


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system has no /proc")
def test_nothing_is_left_behind() -> None:
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    with Receiver(lambda _: None) as receiver:
        channel = Channel(receiver.address)
        assert channel.send(EVENT, ENOUGH)
        channel.close()
        channel.close()
    assert set(threading.enumerate()) == threads
    assert set(os.listdir("/proc/self/fd")) == files


def test_a_request_is_forwarded_as_it_is() -> None:
    got: list[Request] = []
    with Receiver(got.append) as receiver:
        request = {"resourceLogs": [{"schemaUrl": "é"}]}
        with Channel(f"http://{receiver.address}/", reach="anywhere") as channel:
            assert channel.post(request, ENOUGH)
    assert json.loads(json.dumps(got[0].body)) == request


@pytest.mark.parametrize("address", ["192.0.2.1:4318", "example.org:4318", "[2001:db8::1]:4318", "0.0.0.0:4318"])
def test_other_machines_must_be_asked_for(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address of this machine"):
        Channel(address)
    Channel(address, reach="anywhere").close()


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:4318", ("127.0.0.1", 4318)),
        ("[::1]:4318", ("::1", 4318)),
        ("http://localhost:80/", ("localhost", 80)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert is_loopback(parts[0])


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        ":4318",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "::1:4318",
        "https://a:1",
        "a:1/x",
        "a:²",
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(address)
