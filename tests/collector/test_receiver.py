from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse

from ckpt_sentry.collector.receiver import Busy, Limits, Receiver, Rejection, Request

TOKEN = "s3cret"
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
BODY = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": "x"}]}]}]}


def host_port(receiver: Receiver) -> tuple[str, int]:
    host, _, port = receiver.address.rpartition(":")
    return host.strip("[]"), int(port)


def ask(
    receiver: Receiver, body: bytes | Iterator[bytes], *, path: str = "/v1/logs", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    fields = {"Content-Type": JSON, "Authorization": f"Bearer {TOKEN}"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(*host_port(receiver), timeout=10)) as connection:
        connection.request(method, path, body, fields, encode_chunked=not isinstance(body, bytes))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def raw(receiver: Receiver, data: bytes) -> bytes:
    """What comes back for `data`, sent by a client that then sends no more."""
    with socket.create_connection(host_port(receiver), timeout=10) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(65536), b""))


@contextmanager
def receiving(sink: Callable[[Request], Rejection | None], **options: Any) -> Iterator[Receiver]:
    options = {"token": TOKEN, **options}
    with Receiver(sink, **options) as receiver:
        yield receiver


@pytest.fixture
def got() -> list[Request]:
    return []


@pytest.fixture
def receiver(got: list[Request]) -> Iterator[Receiver]:
    with receiving(got.append) as receiver:
        yield receiver


@pytest.mark.parametrize("signal", ["logs", "traces", "metrics"])
def test_json_of_every_signal(receiver: Receiver, got: list[Request], signal: str) -> None:
    status, headers, body = ask(receiver, json.dumps(BODY).encode(), path=f"/v1/{signal}")
    assert (status, headers, body) == (200, {"Content-Type": JSON, "Content-Length": "2"}, b"{}")
    assert got == [Request(signal, BODY)]  # type: ignore[arg-type]


@pytest.mark.parametrize("signal", ["logs", "traces", "metrics"])
def test_protobuf_of_every_signal(receiver: Receiver, got: list[Request], signal: str) -> None:
    status, headers, body = ask(receiver, b"", path=f"/v1/{signal}", Content_Type=PROTOBUF)
    assert (status, headers, body) == (200, {"Content-Type": PROTOBUF, "Content-Length": "0"}, b"")
    assert got == [Request(signal, {})]  # type: ignore[arg-type]


def test_a_media_type_with_parameters(receiver: Receiver) -> None:
    assert ask(receiver, b"{}", Content_Type="Application/JSON; charset=utf-8")[0] == 200


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("identity", bytes),
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data)[2:-4]),
    ],
)
def test_codings(receiver: Receiver, got: list[Request], coding: str, encode: Callable[[bytes], bytes]) -> None:
    assert ask(receiver, encode(json.dumps(BODY).encode()), Content_Encoding=coding)[0] == 200
    assert got == [Request("logs", BODY)]


def test_chunked_bodies(receiver: Receiver, got: list[Request]) -> None:
    data = json.dumps(BODY).encode()
    assert ask(receiver, iter([data[:5], data[5:]]))[0] == 200
    assert got == [Request("logs", BODY)]


def test_one_connection_carries_many_requests(receiver: Receiver, got: list[Request]) -> None:
    head = f"POST /v1/logs HTTP/1.1\r\nAuthorization: bearer {TOKEN}\r\nContent-Type: {JSON}\r\nContent-Length: 2\r\n"
    answer = raw(receiver, (head + "\r\n{}").encode() * 3)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert len(got) == 3


@pytest.mark.parametrize(
    ("version", "connection"), [("HTTP/1.1", "close"), ("HTTP/1.0", "x"), ("HTTP/1.1", "te, Close")]
)
def test_a_connection_closes_when_the_client_wishes(receiver: Receiver, version: str, connection: str) -> None:
    head = (
        f"POST /v1/logs {version}\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {JSON}\r\n"
        f"Connection: {connection}\r\nContent-Length: 2\r\n\r\n{{}}"
    )
    answer = raw(receiver, head.encode() * 2)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 1
    assert b"Connection: close\r\n" in answer


def test_a_client_that_waits_for_100_is_told_to_go_on(receiver: Receiver) -> None:
    head = f"POST /v1/logs HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {JSON}\r\nContent-Length: 2\r\n"
    with socket.create_connection(host_port(receiver), timeout=10) as sock:
        sock.sendall((head + "Expect: 100-continue\r\n\r\n").encode())
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"{}")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")


def test_what_a_sink_rejects_is_told() -> None:
    with receiving(lambda _: Rejection(3, "no form")) as receiver:
        assert json.loads(ask(receiver, b"{}")[2]) == {
            "partialSuccess": {"rejectedLogRecords": "3", "errorMessage": "no form"}
        }
        assert json.loads(ask(receiver, b"{}", path="/v1/traces")[2])["partialSuccess"]["rejectedSpans"] == "3"
        answer = ExportLogsServiceResponse.FromString(ask(receiver, b"", Content_Type=PROTOBUF)[2])
        assert (answer.partial_success.rejected_log_records, answer.partial_success.error_message) == (3, "no form")


BOMB = gzip.compress(bytes(30 * 1024 * 1024))


@pytest.mark.parametrize(
    ("status", "code", "options"),
    [
        (400, 3, {"body": b"{"}),
        (400, 3, {"body": b""}),
        (400, 3, {"body": b"[]"}),
        (400, 3, {"body": b"\xff\xfe{}"}),
        (400, 3, {"body": b"[" * 200_000}),
        (400, 3, {"body": b"\xff\xff", "Content_Type": PROTOBUF}),
        (400, 3, {"body": b"no gzip", "Content_Encoding": "gzip"}),
        (400, 3, {"body": gzip.compress(b"{}")[:-5], "Content_Encoding": "gzip"}),
        (400, 3, {"body": b"{}", "Content_Length": "-2"}),
        (400, 3, {"body": b"{}", "Content_Length": "+2"}),
        (400, 3, {"body": b"{}", "Content_Length": "2", "Transfer_Encoding": "chunked"}),
        (401, 16, {"body": b"{}", "Authorization": "Bearer wrong"}),
        (401, 16, {"body": b"{}", "Authorization": f"Basic {TOKEN}"}),
        (401, 16, {"body": b"{}", "Authorization": "Bearer \xe9"}),
        (401, 16, {"body": b"", "Authorization": "", "Content_Type": PROTOBUF}),
        (404, 5, {"body": b"{}", "path": "/v1/profiles"}),
        (405, 12, {"body": b"", "method": "GET"}),
        (413, 8, {"body": b"", "Content_Length": str(20 * 1024 * 1024 + 1)}),
        (413, 8, {"body": BOMB, "Content_Encoding": "gzip"}),
        (413, 8, {"body": zlib.compress(bytes(30 * 1024 * 1024)), "Content_Encoding": "deflate"}),
        (415, 3, {"body": b"x", "Content_Type": "text/plain"}),
        (415, 3, {"body": b"{}", "Content_Encoding": "br"}),
        (431, 8, {"body": b"{}", "X_Long": "x" * 40_000}),
        (501, 12, {"body": b"{}", "Transfer_Encoding": "gzip"}),
    ],
)
def test_refusals(receiver: Receiver, got: list[Request], status: int, code: int, options: dict[str, Any]) -> None:
    found, headers, body = ask(receiver, **options)
    assert found == status
    if headers["Content-Type"] == PROTOBUF:
        message = Status.FromString(body)
        assert (options["Content_Type"], message.code) == (PROTOBUF, code)
        assert message.message
    else:
        assert sorted(json.loads(body)) == ["code", "message"]
        assert json.loads(body)["code"] == code
    assert got == []
    assert ask(receiver, b"{}")[0] == 200


def test_refusals_say_what_would_do(receiver: Receiver) -> None:
    assert ask(receiver, b"", method="PUT")[1]["Allow"] == "POST"
    assert ask(receiver, b"{}", Authorization="")[1]["WWW-Authenticate"] == "Bearer"
    assert ask(receiver, b"{}", Content_Encoding="zstd")[1]["Accept-Encoding"] == "gzip, deflate"


def test_an_oversized_chunked_body_is_cut(got: list[Request]) -> None:
    with receiving(got.append, limits=Limits(body=1000)) as receiver:
        assert ask(receiver, iter([b" " * 600, b" " * 600]))[0] == 413
        assert ask(receiver, b" " * 998 + b"{}")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /\r\n\r\n",
        b"POST /v1/logs HTTP/2.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n",
        b"\r\n\r\n",
        b"POST /v1/logs HTTP/1.1\r\n folded\r\n\r\n",
        b"POST /v1/logs HTTP/1.1\r\nA : b\r\n\r\n",
        b"POST /v1/logs HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_malformed_heads(receiver: Receiver, data: bytes) -> None:
    assert raw(receiver, data).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert ask(receiver, b"{}")[0] == 200


def test_a_request_that_breaks_off_is_dropped(receiver: Receiver, got: list[Request]) -> None:
    head = f"POST /v1/logs HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {JSON}\r\n"
    for data in ("", "POST /v1", head, head + "Content-Length: 9\r\n\r\n{}"):
        assert raw(receiver, data.encode()) == b""
    for data in ("", "5\r\n{}", "2\r\n{}\r\n", "2\r\n{}\r\n0\r\n"):
        assert raw(receiver, (head + "Transfer-Encoding: chunked\r\n\r\n" + data).encode()) == b""
    assert got == []
    assert ask(receiver, b"{}")[0] == 200


@pytest.mark.parametrize("begun", ["", "POST /v1/logs HTTP/1.1\r\nA: b\r\n"])
def test_a_silent_client_is_cut(got: list[Request], begun: str) -> None:
    with (
        receiving(got.append, limits=Limits(idle=0.1, request=0.1)) as receiver,
        socket.create_connection(host_port(receiver), timeout=10) as sock,
    ):
        sock.sendall(begun.encode())
        assert sock.recv(100) == b""


def test_a_client_that_trickles_is_cut(got: list[Request]) -> None:
    head = f"POST /v1/logs HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {JSON}\r\nContent-Length: 900\r\n"
    with (
        receiving(got.append, limits=Limits(request=0.3)) as receiver,
        socket.create_connection(host_port(receiver), timeout=0.05) as sock,
    ):
        sock.sendall((head + "\r\n").encode())
        answer = b""
        for _ in range(899):
            sock.sendall(b" ")
            try:
                answer = sock.recv(100)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_sink_that_fails_is_contained(capfd: pytest.CaptureFixture[str]) -> None:
    def sink(request: Request) -> None:
        raise SystemExit if request.body else ValueError("sink")

    with receiving(sink) as receiver:
        for body in (b"{}", b'{"a": 1}', b"{}"):
            status, _, answer = ask(receiver, body)
            assert (status, json.loads(answer)["code"]) == (500, 13)
    assert capfd.readouterr() == ("", "")


def test_a_busy_sink_is_429() -> None:
    def sink(_: Request) -> None:
        raise Busy(7)

    with receiving(sink) as receiver:
        status, headers, _ = ask(receiver, b"{}")
        assert (status, headers["Retry-After"]) == (429, "7")


def test_a_flood_is_answered_429_and_what_was_acknowledged_was_taken_in() -> None:
    gate, taken = threading.Event(), []

    def sink(request: Request) -> None:
        gate.wait()
        taken.append(request.body["n"])

    answers: list[tuple[int, int, str | None]] = []

    def client(number: int) -> None:
        body = json.dumps({"n": number}).encode() + b" " * 100_000
        status, headers, _ = ask(receiver, body)
        answers.append((number, status, headers.get("Retry-After")))
        if status == 429:
            gate.set()

    with receiving(sink, limits=Limits(pending=350_000)) as receiver:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {status for _, status, _ in answers} == {200, 429}
        assert sorted(taken) == sorted(number for number, status, _ in answers if status == 200)
        assert {retry for _, status, retry in answers if status == 429} == {"1"}
        assert ask(receiver, b'{"n": 9}' + b" " * 300_000)[0] == 200


def test_a_sink_that_hangs_is_503() -> None:
    gate = threading.Event()
    with receiving(lambda _: gate.wait() and None, limits=Limits(sink=0.05)) as receiver:
        status, headers, _ = ask(receiver, b"{}")
        assert (status, headers["Retry-After"]) == (503, "1")
        gate.set()


def test_too_many_connections_are_503(got: list[Request]) -> None:
    with (
        receiving(got.append, limits=Limits(connections=1)) as receiver,
        closing(http.client.HTTPConnection(*host_port(receiver), timeout=10)) as first,
    ):
        first.request("POST", "/v1/logs", b"{}", {"Content-Type": JSON, "Authorization": f"Bearer {TOKEN}"})
        assert first.getresponse().read() == b"{}"
        answer = raw(receiver, b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in answer


def test_the_sink_is_called_by_one_thread_in_order() -> None:
    names = set()
    numbers = []

    def sink(request: Request) -> None:
        names.add(threading.get_ident())
        numbers.append(request.body["n"])

    with receiving(sink) as receiver:
        for number in range(20):
            assert ask(receiver, json.dumps({"n": number}).encode())[0] == 200
    assert numbers == list(range(20))
    assert len(names) == 1


def test_close_leaves_no_thread_and_no_port(got: list[Request]) -> None:
    before = set(threading.enumerate())
    receiver = Receiver(got.append).start()
    address = host_port(receiver)
    with socket.create_connection(address, timeout=10) as idle, socket.create_connection(address, timeout=10) as half:
        half.sendall(b"POST /v1/logs HT")
        assert ask(receiver, b"{}")[0] == 200
        receiver.close()
        assert set(threading.enumerate()) == before
        assert idle.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=10)
    receiver.close()


def test_ipv6(got: list[Request]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    with receiving(got.append, host="::1") as receiver:
        assert receiver.address.startswith("[::1]:")
        assert ask(receiver, b"{}")[0] == 200


def test_loopback_is_the_default(receiver: Receiver) -> None:
    assert host_port(receiver)[0] == "127.0.0.1"


def test_an_address_is_known_after_the_start() -> None:
    with pytest.raises(RuntimeError, match="not been started"):
        _ = Receiver(print).address


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Receiver]:
    with receiving(lambda _: None, limits=Limits(request=1.0, body=4096, inflated=4096)) as receiver:
        yield receiver


pieces = st.sampled_from(
    [
        b"POST /v1/logs HTTP/1.1\r\n",
        b"Authorization: Bearer s3cret\r\n",
        b"Content-Type: application/json\r\n",
        b"Content-Type: application/x-protobuf\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Content-Encoding: deflate\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 99999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
        b"\r\n",
        b"5\r\nabcde\r\n",
        b"0\r\n\r\n",
        b"\x1f\x8b\x08\x00",
        b"\n",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(pieces | st.binary(max_size=40), max_size=14).map(b"".join))
def test_no_bytes_bring_it_down(fuzzed: Receiver, data: bytes) -> None:
    answer = raw(fuzzed, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert ask(fuzzed, b"{}")[0] == 200


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from([JSON, PROTOBUF]), st.sampled_from(["identity", "gzip", "deflate"]))
def test_any_body_is_taken_or_refused(fuzzed: Receiver, body: bytes, kind: str, coding: str) -> None:
    status, headers, _ = ask(fuzzed, body, Content_Type=kind, Content_Encoding=coding)
    assert status in {200, 400, 413}
    assert headers["Content-Type"] == kind
    assert ask(fuzzed, ExportLogsServiceRequest().SerializeToString(), Content_Type=PROTOBUF)[0] == 200
