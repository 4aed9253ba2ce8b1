from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_sentry.collector import records
from ckpt_sentry.telemetry.channel import Channel
from tests.collector.jobs import finished, over, started
from tests.integration.harness import command, environment

SECONDS = 20.0


@contextmanager
def collector(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """
    A running collector and its address.
    """
    line = [sys.executable, "-m", "ckpt_sentry", "collect", "--dir", str(folder), "--listen", "127.0.0.1:0", *words]
    with subprocess.Popen(line, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "listening on" in first
        try:
            yield process, first.split("listening on ")[1].split(",")[0]
        finally:
            if process.poll() is None:
                process.kill()


def stop(process: subprocess.Popen[str]) -> str:
    process.terminate()
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    return err


def test_a_load_of_two_nodes_is_one_line_and_in_the_records(tmp_path: Path) -> None:
    with collector(tmp_path) as (process, address), Channel(address) as channel:
        assert channel.send(finished(0, 2), SECONDS)
        assert channel.send(finished(1, 2), SECONDS)
        said = stop(process)
    assert said.startswith("ckpt_sentry ✓ dcp.load  step 1200 · 2 ranks")
    assert len(records.read(tmp_path).files) == 1


def test_what_was_acknowledged_survives_a_kill_and_is_not_said_again(tmp_path: Path) -> None:
    with collector(tmp_path) as (process, address), Channel(address) as channel:
        for event in (finished(0, 2), finished(1, 2), started(0, 2, load="b" * 32, at=200.0)):
            assert channel.send(event, SECONDS)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
    with collector(tmp_path) as (process, address), Channel(address) as channel:
        for rank in (0, 1):
            event = finished(rank, 2, load_id="b" * 32, started_at=200.0, ended_at=201.0, step=1300)
            assert channel.send(event, SECONDS)
        assert channel.send(over(ok=True), SECONDS)
        said = stop(process)
    assert [line.split("·")[0] for line in said.splitlines()] == ["ckpt_sentry ✓ dcp.load  step 1300 "]


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    with collector(tmp_path / "records", "--token-file", str(token)) as (process, address):
        with Channel(address, "wrong") as channel:
            assert not channel.send(finished(0, 1), SECONDS)
        with Channel(address, "sesame") as channel:
            assert channel.send(finished(0, 1), SECONDS)
        stop(process)


def test_an_address_for_others_needs_a_token(tmp_path: Path) -> None:
    done = command("collect", "--listen", "0.0.0.0:0", "--dir", str(tmp_path))
    assert done.returncode == 2
    assert "give a token (--token-file)" in done.stderr


def test_bad_words_are_said_in_one_line(tmp_path: Path) -> None:
    for words in (["--listen", "nowhere"], ["--token-file", str(tmp_path / "none")], ["--listen", "127.0.0.1:1x"]):
        done = command("collect", *words)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
