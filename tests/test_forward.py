from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from ckpt_sentry import forward
from ckpt_sentry.collector.receiver import Receiver, Request
from ckpt_sentry.collector.records import Place, Records
from ckpt_sentry.forward import Forwarder, Spool
from ckpt_sentry.telemetry import otlp_json
from tests.collector.jobs import entered, started

WAIT = 20.0


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(forward, "RETRY_SECONDS", 0.01)


def records(folder: Path, pid: int = 1) -> Records:
    return Records(Place(folder, private=False), run_id="run7", node="node0", pid=pid)


class Far:
    """
    A collector: the phases that have arrived, in order.
    """

    def __init__(self) -> None:
        self.arrived: Queue[str] = Queue()

    def start(self, port: int = 0, token: str | None = None) -> Receiver:
        return Receiver(self._take, port=port, token=token).start()

    def _take(self, request: Request) -> None:
        events, _ = otlp_json.decode(request.body)
        for event in events:
            self.arrived.put(getattr(event, "phase", event.name))

    def next(self, count: int) -> list[str]:
        return [self.arrived.get(timeout=WAIT) for _ in range(count)]


def line(phase: str) -> dict[str, Any]:
    return otlp_json.encode((entered(0, phase),))


def test_what_is_in_the_records_arrives_in_order_and_once(tmp_path: Path) -> None:
    far, kept = Far(), records(tmp_path)
    kept.append(line("plan"))
    with far.start() as receiver:
        forwarder = Forwarder(kept, receiver.address, None)
        for phase in ("read", "barrier", "restore"):
            kept.append(line(phase))
        assert far.next(4) == ["plan", "read", "barrier", "restore"]
        forwarder.close()
    assert far.arrived.empty()
    assert Spool(kept.path).next() is None


def test_a_collector_that_is_away_is_caught_up_with(tmp_path: Path) -> None:
    far, kept = Far(), records(tmp_path)
    first = far.start()
    forwarder = Forwarder(kept, first.address, None)
    kept.append(line("plan"))
    assert far.next(1) == ["plan"]
    port = int(first.address.rpartition(":")[2])
    first.close()
    for phase in ("read", "barrier"):
        kept.append(line(phase))
    with far.start(port):
        assert far.next(2) == ["read", "barrier"]
        forwarder.close()


def test_a_launcher_that_is_started_again_sends_what_the_last_could_not(tmp_path: Path) -> None:
    gone = records(tmp_path, pid=2**22 + 1)
    for phase in ("plan", "read"):
        gone.append(line(phase))
    first = Spool(gone.path).next()
    assert first is not None
    Spool(gone.path).acknowledge(first[1])
    far, kept = Far(), records(tmp_path)
    kept.append(line("barrier"))
    with far.start() as receiver:
        forwarder = Forwarder(kept, receiver.address, None)
        assert far.next(2) == ["read", "barrier"]
        forwarder.close()


def test_other_runs_and_launchers_that_live_are_left_alone(tmp_path: Path) -> None:
    other = Records(Place(tmp_path, private=False), run_id="run8", node="node0", pid=2**22 + 1)
    living = records(tmp_path, pid=threading.get_native_id())
    for one in (other, living):
        one.append(line("plan"))
    assert forward._left_behind(records(tmp_path).path) == []


def test_lines_that_hold_nothing_of_ours_are_passed_over(tmp_path: Path) -> None:
    far, kept = Far(), records(tmp_path)
    kept.append({"resourceMetrics": []})
    kept.append({"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": "other"}]}]}]})
    with kept.path.open("a") as file:
        file.write("no json\n")
    kept.append(line("plan"))
    with far.start() as receiver:
        forwarder = Forwarder(kept, receiver.address, None)
        assert far.next(1) == ["plan"]
        forwarder.close()


def test_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"a":')
    spool = Spool(path)
    assert spool.next() is None
    path.write_bytes(b'{"a": 1}\n')
    assert spool.next() == (b'{"a": 1}\n', 9)


def test_a_wrong_token_keeps_everything_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forward, "CLOSE_SECONDS", 0.5)
    far, kept = Far(), records(tmp_path)
    kept.append(line("plan"))
    with far.start(token="right") as receiver:
        forwarder = Forwarder(kept, receiver.address, "wrong")
        forwarder.close()
    assert far.arrived.empty()
    assert Spool(kept.path).next() is not None
    assert "has not taken everything" in caplog.text


def test_no_collector_no_forwarder(tmp_path: Path) -> None:
    assert Forwarder.to_collector(records(tmp_path)) is None


def test_token_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  sesame\n")
    assert forward.read_token(str(file)) == "sesame"
    assert forward.read_token(None) is None
    with pytest.raises(FileNotFoundError):
        forward.read_token(str(tmp_path / "none"))


def test_started_events_pass_too(tmp_path: Path) -> None:
    far, kept = Far(), records(tmp_path)
    kept.append(otlp_json.encode((started(0),)))
    with far.start() as receiver:
        forwarder = Forwarder(kept, receiver.address, None)
        assert far.next(1) == ["ckpt_sentry.load.started"]
        forwarder.close()


@pytest.mark.parametrize("link", [True, False])
def test_the_mark_is_no_link_and_no_pipe(tmp_path: Path, link: bool) -> None:  # noqa: FBT001
    kept, theirs = records(tmp_path), tmp_path / "theirs"
    kept.append(line("plan"))
    theirs.write_text("12")
    mark = kept.path.with_name(kept.path.name + forward.SUFFIX)
    if link:
        mark.symlink_to(theirs)
    else:
        os.mkfifo(mark)
    spool = Spool(kept.path)
    assert spool.offset == 0
    spool.acknowledge(7)
    assert theirs.read_text() == "12"
