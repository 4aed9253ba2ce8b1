from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.collector import records
from ckpt_sentry.collector.records import Place, Records, Run
from ckpt_sentry.core.report import Identity
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import Event, PhaseEntered, RunEnded


def event(run_id: str = "run", at: float = 1.0, load_id: str = "a" * 32, rank: int = 0) -> Event:
    return PhaseEntered(identity=Identity(run_id, rank), at=at, load_id=load_id, phase="plan")


def writer(folder: Path, run_id: str = "run", *, private: bool = False, pid: int = 7) -> Records:
    return Records(Place(folder, private=private), run_id=run_id, node="n1", pid=pid)


def write(folder: Path, *events: Event, pid: int = 7) -> Path:
    ours = writer(folder, events[0].identity.run_id, pid=pid)
    for one in events:
        assert ours.append(otlp_json.encode([one]))
    return ours.path


def events_in(reading: records.Reading) -> list[Event]:
    return [one for sourced in reading for one in sourced.events]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, event(at=1.0), event(at=2.0))
    assert path == tmp_path / "run-n1-7.jsonl"
    reading = records.read(path)
    assert [(sourced.source, sourced.events) for sourced in reading] == [
        (str(path), (event(at=1.0),)),
        (str(path), (event(at=2.0),)),
    ]
    assert (reading.damaged, reading.refused, reading.unreadable) == (0, 0, [])


def test_each_line_is_a_request(tmp_path: Path) -> None:
    path = write(tmp_path, event(), event())
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [otlp_json.encode([event()])] * 2


def test_nothing_is_created_before_the_first_record(tmp_path: Path) -> None:
    ours = writer(tmp_path / "new", private=True)
    assert list(tmp_path.iterdir()) == []
    assert ours.append({})
    assert mode(tmp_path / "new") == 0o700
    assert mode(ours.path) == 0o600


def test_a_shared_folder_follows_the_umask(tmp_path: Path) -> None:
    os.umask(0o002)
    ours = writer(tmp_path / "new")
    assert ours.append({})
    assert mode(tmp_path / "new") == 0o775
    assert mode(ours.path) == 0o664


def test_where_records_lie(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    assert records.place(None, "run", state) == Place(tmp_path / "ckpt_sentry" / "run", private=True)
    assert records.place(str(tmp_path), "run", state) == Place(tmp_path, private=False)
    assert records.default_source(None, state) == tmp_path / "ckpt_sentry"
    assert records.default_source("x", state) == Path("x")
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"}
    assert records.state_root(home) == tmp_path / ".local" / "state" / "ckpt_sentry"


def test_without_a_home_nothing_is_written_and_nothing_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    for where in (records.place(None, "run", {}), records.place("~no-such-user/x", "run", {})):
        assert where.folder.is_relative_to(os.devnull)
        assert not Records(where, run_id="run", node="n", pid=1).append({})


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("run7-a1b2", "run7-a1b2"),
        ("../../etc/passwd", "__.._etc_passwd-"),
        ("a b", "a_b-"),
        (".hidden", "_hidden-"),
        ("", "-"),
        ("x" * 200, "x" * 71 + "-"),
    ],
)
def test_safe_names(name: str, safe: str) -> None:
    found = records.safe_name(name)
    assert found.startswith(safe)
    assert len(found) in {len(safe), len(safe) + 8}


@given(st.text(), st.text())
def test_safe_names_are_file_names_and_stay_different(one: str, other: str) -> None:
    names = records.safe_name(one), records.safe_name(other)
    assert all(name not in {"", ".", ".."} and "/" not in name and name.isascii() for name in names)
    assert all(len(name) <= 80 for name in names)
    assert (names[0] == names[1]) == (one == other)


def test_a_disk_that_fails_is_told_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ours = writer(tmp_path / "file" / "folder")
    assert not ours.append({})
    assert ours.problem == (
        "Set CKPT_SENTRY_DIR to a folder that can be written: "
        f"no record is kept in {tmp_path}/file/folder (Not a directory)."
    )
    (tmp_path / "file").unlink()
    assert ours.append({})
    assert ours.problem is None
    (tmp_path / "run-n1-7.jsonl").mkdir()
    assert not writer(tmp_path).append({})


@pytest.mark.parametrize("kind", ["pipe", "read pipe", "link", "dangling link", "folder"])
def test_what_lies_in_the_place_of_the_record_is_left_alone_and_told(tmp_path: Path, kind: str) -> None:
    ours, theirs, reader = writer(tmp_path), tmp_path / "theirs", None
    theirs.write_text("content")
    if kind.endswith("pipe"):
        os.mkfifo(ours.path)
        reader = os.open(ours.path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read pipe" else None
    elif kind == "folder":
        ours.path.mkdir()
    else:
        ours.path.symlink_to("theirs" if kind == "link" else "nothing")
    assert not ours.append({})
    assert not ours.append({})
    assert ours.problem is not None
    assert "what lies at run-n1-7.jsonl is no regular file" in ours.problem
    assert theirs.read_text() == "content"
    assert not (tmp_path / "nothing").exists()
    if reader is not None:
        assert os.read(reader, 10) == b""
        os.close(reader)


def test_a_link_in_the_place_of_a_private_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "run").symlink_to("../theirs")
    ours = writer(tmp_path / "state" / "run", private=True)
    assert not ours.append({})
    assert "it is a link or another user's" in (ours.problem or "")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_state_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "state").symlink_to("real")
    where = records.place(None, "run", {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert Records(where, run_id="run", node="n1", pid=7).append(otlp_json.encode([event()]))
    assert events_in(records.read(tmp_path / "state" / "ckpt_sentry")) == [event()]


def test_a_pipe_among_the_records_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, event())
    os.mkfifo(tmp_path / "other.jsonl")
    assert records.record_files(tmp_path) == (path,)
    reading = records.Reading((path, tmp_path / "other.jsonl"), None)
    assert events_in(reading) == [event()]
    assert reading.unreadable == [tmp_path / "other.jsonl"]


def test_a_record_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE", 20)
    ours = writer(tmp_path)
    assert not ours.append({"a": "x" * 20})
    assert ours.append({"a": 1})


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from ckpt_sentry.collector.records import Place, Records
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ours = Records(Place(Path(sys.argv[1]), private=False), run_id="run", node="n1", pid=7)
first = ours.append({"a": "x" * 50})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (80, hard))
second = ours.append({"b": "x" * 50})
third = ours.append({"c": "x" * 50})
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(first, second, third, ours.append({"d": 1}))
"""


def test_a_line_that_was_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(records.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True False False True\n"
    lines = (tmp_path / "run-n1-7.jsonl").read_text().splitlines()
    assert [json.loads(lines[0]), json.loads(lines[-1])] == [{"a": "x" * 50}, {"d": 1}]
    reading = records.Reading((tmp_path / "run-n1-7.jsonl",), None)
    assert list(reading) == []
    assert reading.damaged == 1


def test_a_damaged_end_from_an_earlier_process_is_closed_first(tmp_path: Path) -> None:
    (tmp_path / "run-n1-7.jsonl").write_text('{"resourceLogs": [')
    path = write(tmp_path, event())
    reading = records.read(path)
    assert events_in(reading) == [event()]
    assert reading.damaged == 1


def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        ours = writer(tmp_path)
        for _ in range(50):
            ours.append(otlp_json.encode([event(rank=rank)]))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading = records.read(tmp_path)
    assert sorted(one.identity.rank for one in events_in(reading)) == sorted([0, 1, 2, 3] * 50)
    assert reading.damaged == 0


def test_damaged_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps(otlp_json.encode([event()]))
    bad = good.replace('"plan"', "7")
    path = tmp_path / "records.jsonl"
    path.write_bytes(f"{good}\n\n[]\n\xff\n{'x' * 3000}\n{bad}\n{good}\n{good[:50]}".encode("latin-1"))
    monkeypatch.setattr(records, "MAX_LINE", 2000)
    reading = records.read(path)
    assert events_in(reading) == [event()] * 2
    assert (reading.damaged, reading.refused) == (4, 1)


@given(st.binary(max_size=300))
def test_no_file_raises(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    path.write_bytes(data)
    assert events_in(records.read(path)) == []


def test_the_newest_run_is_read_unless_one_is_named(tmp_path: Path) -> None:
    write(tmp_path, event("new", at=30.0), pid=1)
    write(tmp_path, event("old", at=10.0), event("old", at=12.0, load_id="b" * 32), pid=2)
    write(tmp_path, event("new", at=5.0, rank=1), pid=3)
    assert records.runs(tmp_path) == (Run("new", 5.0, 30.0, 1), Run("old", 10.0, 12.0, 2))
    assert events_in(records.read(tmp_path)) == [event("new", at=30.0), event("new", at=5.0, rank=1)]
    assert len(events_in(records.read(tmp_path, run_id="old"))) == 2
    assert events_in(records.read(tmp_path, run_id="unknown")) == []


def test_a_run_without_loads(tmp_path: Path) -> None:
    write(tmp_path, RunEnded(identity=Identity("run"), at=3.0, ok=True))
    assert records.runs(tmp_path) == (Run("run", 3.0, 3.0, 0),)


def test_a_state_folder_holds_a_folder_for_each_run(tmp_path: Path) -> None:
    write(tmp_path / "a", event("a", at=1.0))
    write(tmp_path / "b", event("b", at=2.0))
    assert events_in(records.read(tmp_path)) == [event("b", at=2.0)]
    assert events_in(records.read(tmp_path / "a")) == [event("a", at=1.0)]


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        records.read(tmp_path / "nowhere")
    assert records.runs(tmp_path) == ()
    assert events_in(records.read(tmp_path)) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    reading = records.Reading((tmp_path / "gone.jsonl",), None)
    assert list(reading) == []
    assert reading.unreadable == [tmp_path / "gone.jsonl"]


def test_the_newest_run_folders_stay(tmp_path: Path) -> None:
    for number in range(6):
        path = write(tmp_path / f"run{number}", event(f"run{number}"))
        os.utime(path, (number, number))
        os.utime(path.parent, (number, number))
    (tmp_path / "run0" / "notes.txt").write_text("mine")
    os.utime(tmp_path / "run0" / "notes.txt", (0, 0))
    (tmp_path / "link").symlink_to(tmp_path / "run1")
    assert records.prune(tmp_path, keep=3, spare=tmp_path / "run2") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run0", "run2", "run4", "run5"]
    assert records.prune(tmp_path / "nowhere") == 0


def test_the_first_record_of_a_run_prunes(tmp_path: Path) -> None:
    for number in range(records.KEPT_RUNS + 1):
        path = write(tmp_path / f"run{number}", event(f"run{number}"))
        os.utime(path, (number, number))
    assert writer(tmp_path / "new", "new", private=True).append({})
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == records.KEPT_RUNS
    assert {"run0", "run1"}.isdisjoint(left)
    assert "new" in left


def test_a_line_of_another_signal_is_passed_over_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE", 4096)
    path = write(tmp_path, event())
    with path.open("a") as file:
        file.write('{"resourceSpans":[' + ",".join(["{}"] * 5000) + "]}\n")
        file.write('{"resourceMetrics":[]}\n')
    write(tmp_path, event(at=2.0))

    reading = records.read(path)

    assert events_in(reading) == [event(), event(at=2.0)]
    assert reading.damaged == 0


def test_the_place_of_a_line_from_an_exporter_is_no_order(tmp_path: Path) -> None:
    path = write(tmp_path, event())
    request = otlp_json.encode([event(rank=1)])
    request["resourceLogs"][0]["resource"]["attributes"] += otlp_json.key_values(
        {"telemetry.sdk.name": "opentelemetry"}
    )
    with path.open("a") as file:
        file.write((json.dumps(request) + "\n") * 2)

    assert [sourced.source for sourced in records.read(path)] == [str(path), f"{path}:1", f"{path}:2"]


def test_the_newest_loads_of_a_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_LOADS", 2)
    loads = [event(at=float(number), load_id=f"{number:032x}") for number in range(5)]
    write(tmp_path, *loads, RunEnded(identity=Identity("run"), at=9.0, ok=True))
    write(tmp_path, event("other", at=0.5), pid=8)
    reading = records.read(tmp_path)
    assert events_in(reading) == [*loads[3:], RunEnded(identity=Identity("run"), at=9.0, ok=True)]
    assert reading.chosen is not None
    assert reading.chosen.forgotten == 3
    assert records.known_runs(tmp_path) == ("run", "other")


@pytest.mark.parametrize("run_id", ["run", 'r"u', "r\\u", "ün", "\ud800"])
def test_a_quick_look_finds_what_reading_finds(tmp_path: Path, run_id: str) -> None:
    write(tmp_path, event(run_id, at=5.0), event(run_id, at=7.5))
    write(tmp_path, event("else", at=6.0), pid=9)
    assert records.known_runs(tmp_path) == (run_id, "else")
    assert events_in(records.read(tmp_path)) == [event(run_id, at=5.0), event(run_id, at=7.5)]


def test_a_file_that_is_one_hole_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE", 1_000_000)
    monkeypatch.setattr(records, "MAX_PASSED_OVER", 8_000_000)
    path = write(tmp_path, event())
    hole = tmp_path / "z.jsonl"
    hole.touch()
    os.truncate(hole, 20 * 2**30)
    reading = records.read(tmp_path)
    assert events_in(reading) == [event()]
    assert (reading.damaged, reading.given_up) == (1, [hole])
    assert records.record_files(tmp_path)[0] == path
