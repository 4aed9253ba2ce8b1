from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_sentry.collector.aggregate import Aggregate
from ckpt_sentry.render import terminal, text
from tests.collector.jobs import finished, seen
from tests.render.test_text import shape_mismatch_on_rank_2


class Counting(io.StringIO):
    """
    A stream that counts its writes.
    """

    writes = 0

    def write(self, whole: str) -> int:
        self.writes += 1
        return super().write(whole)


@pytest.fixture
def one() -> Aggregate:
    return shape_mismatch_on_rank_2()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_a_block_is_one_write_of_plain_text(one: Aggregate) -> None:
    stream = Counting()
    assert terminal.show(one, stream)
    assert stream.writes == 1
    assert stream.getvalue() == text.plain(text.block(one))


def test_a_good_load_is_one_line() -> None:
    stream = Counting()
    assert terminal.show(seen(finished(0, 1)), stream)
    assert stream.getvalue().count("\n") == 1


def test_colour_is_forced_by_the_environment_and_changes_no_text(
    one: Aggregate, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.text import Text

    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Counting()
    assert terminal.show(one, stream)
    assert stream.writes == 1
    assert "\x1b[1;31m✗\x1b[0m" in stream.getvalue()
    assert Text.from_ansi(stream.getvalue()).plain.split() == text.plain(text.block(one)).split()


def test_no_color_wins(one: Aggregate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Counting()
    assert terminal.show(one, stream)
    assert "\x1b" not in stream.getvalue()


def test_markup_and_escape_codes_in_names_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Counting()
    assert terminal.show(seen(finished(0, 1, verdict="failed", path="[red]x[/red]\x1b[2J")), stream)
    assert "[red]x[/red]\\x1b[2J" in stream.getvalue()


def test_ascii_stream_gets_ascii(one: Aggregate) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    assert terminal.show(one, stream)
    assert raw.getvalue().isascii()
    assert raw.getvalue().startswith(b"ckpt_sentry x dcp.load")


def test_streams_that_cannot_be_written_are_no_error(one: Aggregate, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    assert not terminal.show(one, closed)
    monkeypatch.setattr(sys, "stderr", None)
    assert not terminal.show(one)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_stream_is_no_error(one: Aggregate) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = os.fdopen(descriptor, "w", encoding="utf-8")
    assert not terminal.show(one, stream)
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    stream.close()


def test_columns_decide_the_width(one: Aggregate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    stream = Counting()
    assert terminal.show(one, stream)
    assert stream.getvalue() == text.plain(text.block(one, 50))


def test_plain_output_does_not_import_rich() -> None:
    program = (
        "import io, sys\n"
        "from tests.collector.jobs import finished, seen\n"
        "from ckpt_sentry.render import terminal\n"
        "assert terminal.show(seen(finished(0, 1)), io.StringIO())\n"
        "assert 'rich' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(root)})


class Slow(io.StringIO):
    """
    A stream amid whose `slow` method a time limit of the host runs out.
    """

    def __init__(self, slow: str) -> None:
        super().__init__()
        self._slow = slow

    def isatty(self) -> bool:
        self._limit("isatty")
        return True

    def flush(self) -> None:
        self._limit("flush")

    def fileno(self) -> int:
        self._limit("fileno")
        return super().fileno()

    def _limit(self, method: str) -> None:
        if method == self._slow:
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("slow", ["isatty", "flush", "fileno"])
def test_a_time_limit_of_the_host_that_runs_out_amid_writing_is_the_hosts(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(_number: int, _frame: object) -> None:
        raise TimeoutError

    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    before = signal.signal(signal.SIGALRM, limit)
    try:
        with pytest.raises(TimeoutError):
            terminal.width(Slow(slow)) if slow == "fileno" else terminal.write([], Slow(slow))
    finally:
        signal.signal(signal.SIGALRM, before)
