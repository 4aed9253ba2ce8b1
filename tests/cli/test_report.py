from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ckpt_sentry import config
from ckpt_sentry.cli.report import command
from ckpt_sentry.collector import overview
from ckpt_sentry.collector.records import Place, Records
from ckpt_sentry.core.report import Finding, KeyList, LoadError
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import Event, LoadsLeftOut
from tests.collector.jobs import RUN, failing, finished, over, started

MISSING = Finding("missing_keys", "warning", "40 keys are missing from the checkpoint")
PARTIAL = {
    "verdict": "partial",
    "findings": (MISSING,),
    "missing": KeyList(40, tuple(f"odd{number}name" for number in range(40))),
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("CKPT_SENTRY") or name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config.reset()


def write(folder: Path, *events: Event, pid: int = 1) -> Path:
    ours = Records(Place(folder, private=False), run_id=events[0].identity.run_id, node="n", pid=pid)
    for event in events:
        assert ours.append(otlp_json.encode([event]))
    return ours.path


def in_run(event: Event, run_id: str, at: float) -> Event:
    return replace(event, identity=replace(event.identity, run_id=run_id), at=at)


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_one_good_load(tmp_path: Path) -> None:
    write(tmp_path, started(0, 1), finished(0, 1))
    got = report(tmp_path)
    assert got.exit_code == 0
    assert got.stdout == (
        "ckpt_sentry ✓ dcp.load · in 1.0 s\n"
        "  checkpoint  /data/run7/step-1200 · DCP · step 1200 (folder name)\n"
        "  time        whole 1.0 s\n"
    )


def test_all_loads_of_a_run_oldest_first_the_good_ones_in_a_line(tmp_path: Path) -> None:
    later = {"load_id": "b" * 32, "started_at": 200.0, "ended_at": 201.0}
    write(tmp_path, finished(0, 1, **later, **PARTIAL), finished(0, 1))
    lines = report(tmp_path).stdout.splitlines()
    assert lines[0] == "ckpt_sentry ✓ dcp.load  step 1200 · in 1.0 s"
    assert lines[1] == ""
    assert lines[2] == "ckpt_sentry ! dcp.load loaded a part of the model only after 1.0 s"
    assert [line.strip() for line in lines if "odd" in line] == [f"odd{number}name" for number in range(40)]
    last = report(tmp_path, "--last").stdout
    assert last.startswith("ckpt_sentry ! ")
    assert report(tmp_path, "--all").stdout.startswith("ckpt_sentry ✓ dcp.load · in 1.0 s\n  checkpoint")


def test_json(tmp_path: Path) -> None:
    write(tmp_path, finished(0, 1, **PARTIAL))
    got = report(tmp_path, "--json")
    document = json.loads(got.stdout)
    assert document["schema"] == "ckpt_sentry.report/1"
    assert [load["verdict"] for load in document["loads"]] == ["partial"]


def test_ranks_that_wrote_for_themselves_are_merged_by_clock(tmp_path: Path) -> None:
    error = LoadError("OSError", "[Errno 5] Input/output error", "read")
    for rank, at in ((0, 103.0), (1, 101.0)):
        write(tmp_path, started(rank, 2), failing(rank, error, 2, at=at), pid=rank)
    (load,) = json.loads(report(tmp_path, "--json").stdout)["loads"]
    assert (load["error"]["first_rank"], load["error"]["order_by"]) == (1, "clock")
    assert "rank 1 first by the machines' clocks, while reading" in report(tmp_path).stdout


def test_the_newest_run_unless_another_is_named(tmp_path: Path) -> None:
    for run_id, at in (("old-1", 50.0), ("new-2", 60.0)):
        event = finished(0, 1, path=f"/data/{run_id}")
        report_ = replace(event.report, identity=replace(event.identity, run_id=run_id))
        write(tmp_path, replace(in_run(event, run_id, at), report=report_))
    assert "/data/new-2" in report(tmp_path).stdout
    assert "/data/old-1" in report(tmp_path, "--run", "old").stdout
    assert [line.split()[0] for line in report(tmp_path, "--list").stdout.splitlines()] == ["new-2", "old-1"]
    unknown = report(tmp_path, "--run", "x")
    assert unknown.exit_code == 2
    assert unknown.stderr == (
        f"ckpt-sentry: x is neither a file, a folder nor a run in {tmp_path}; the newest there: new-2, old-1\n"
    )


@pytest.mark.parametrize("at", [1e300, -1e300, float("nan"), float("inf")])
def test_a_run_of_no_time_is_listed(tmp_path: Path, at: float) -> None:
    event = finished(0, 1)
    write(tmp_path, replace(in_run(event, "odd-1", 0.0), report=replace(event.report, started_at=at)))
    assert report(tmp_path, "--list").stdout.startswith("odd-1  ")


def test_a_run_by_its_id_in_the_folder_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, finished(0, 1))
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(tmp_path))
    config.reset()
    assert report(RUN).exit_code == 0
    assert report().stdout == report(RUN).stdout
    config.reset()


def test_no_load_is_said_clearly(tmp_path: Path) -> None:
    path = write(tmp_path, over(ok=True))
    assert report(path).stdout == f"No load was recorded in this run ({path}).\n"
    got = report(path, "--json")
    assert (got.exit_code, json.loads(got.stdout)) == (0, {"schema": "ckpt_sentry.report/1", "loads": []})


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    got = report(tmp_path)
    assert (got.exit_code, got.stdout) == (2, "")
    assert got.stderr.startswith(f"ckpt-sentry: no records in {tmp_path}. ")
    assert json.loads(report(tmp_path, "--json").stdout)["loads"] == []


def test_a_place_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    got = report(tmp_path / "none")
    assert (got.exit_code, got.stderr) == (2, f"ckpt-sentry: {tmp_path / 'none'}: no such file or folder\n")
    got = report()
    assert got.exit_code == 2
    assert "Run the job with CKPT_SENTRY=1 first" in got.stderr


def test_damaged_lines_are_passed_over_and_said(tmp_path: Path) -> None:
    path = write(tmp_path, finished(0, 1))
    with path.open("ab") as file:
        file.write(b'{"resourceLogs": [{"resou\nnot json\n')
    got = report(tmp_path, "--json")
    assert (got.exit_code, got.stderr) == (0, "ckpt-sentry: 2 damaged lines passed over\n")
    assert len(json.loads(got.stdout)["loads"]) == 1


@pytest.mark.parametrize("words", ["report {} --all", "report {} --list", "report {} --json", "status", "--help"])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, words: str) -> None:
    write(tmp_path, finished(0, 1, **PARTIAL))
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_sentry", *words.format(tmp_path).split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_the_list_of_runs_as_json(tmp_path: Path) -> None:
    write(tmp_path, finished(0, 1))
    got = report(tmp_path, "--list", "--json")
    told = {"verdict": "ok", "step": 1200, "path": "/data/run7/step-1200", "whole": True}
    assert json.loads(got.stdout) == {
        "schema": "ckpt_sentry.runs/1",
        "runs": [{"run_id": RUN, "started_at": 100.0, "ended_at": 101.0, "loads": 1, **told}],
    }


def test_the_list_tells_how_the_runs_went(tmp_path: Path) -> None:
    for run_id, at, facts in (
        ("good-1", 50.0, {}),
        ("bad-2", 60.0, {"verdict": "failed", "step": None, "error": LoadError("OSError", "gone")}),
    ):
        event = finished(0, 1, **facts)
        named = replace(event.report, identity=replace(event.identity, run_id=run_id))
        write(tmp_path, replace(in_run(event, run_id, at), report=named))
    write(tmp_path, in_run(over(ok=True), "idle-3", 40.0))
    rows = [line.split() for line in report(tmp_path, "--list").stdout.splitlines()]
    assert [(row[0], *row[3:]) for row in rows] == [
        ("bad-2", "failed", "1", "load", "/data/run7/step-1200"),
        ("good-1", "ok", "1", "load", "step", "1200"),
        ("idle-3", "-", "0", "loads"),
    ]


def test_the_list_says_what_it_did_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, started(0, 1), finished(0, 1, verdict="failed"))
    monkeypatch.setattr(overview, "MAX_FILE", 100)
    assert report(tmp_path, "--list").stdout.split()[3:] == ["?", "1", "load", "or", "more"]
    (run,) = json.loads(report(tmp_path, "--list", "--json").stdout)["runs"]
    assert (run["verdict"], run["whole"]) == (None, False)


def test_good_loads_that_are_only_counted_are_told(tmp_path: Path) -> None:
    left_out = LoadsLeftOut(
        identity=started(0, 1).identity, at=100.0, since=50.0, framework="dcp", entry_point="dcp.load", count=9_983
    )
    write(tmp_path, started(0, 1), finished(0, 1), left_out)
    got = report(tmp_path)
    assert got.stderr == "ckpt-sentry: 9,983 more good loads, of which the records keep the number only\n"
    assert json.loads(report(tmp_path, "--json").stdout)["left_out"] == {"loads": 9_983}
    assert "9,984 loads" in report(tmp_path, "--list").stdout


def test_a_name_of_a_million_characters_is_cut(tmp_path: Path) -> None:
    write(tmp_path, started(0, 1), finished(0, 1, verdict="partial", missing=KeyList(1, ("k" * 1_000_000,))))
    for got in (report(tmp_path, "--all"), report(tmp_path, "--json")):
        assert "(+999700 characters)" in got.stdout.replace("\n", " ").replace("  ", "")
        assert len(got.stdout) < 50_000
