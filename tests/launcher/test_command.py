from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_sentry.launcher import command

PYTHON = sys.executable


def test_environment_of_the_command() -> None:
    bootstrap = str(command.BOOTSTRAP)
    assert command.environment({"A": "b"}) == {
        "A": "b",
        "CKPT_SENTRY": "1",
        "CKPT_SENTRY_BOOTSTRAP": sys.prefix,
        "PYTHONPATH": bootstrap,
    }
    again = command.environment({"CKPT_SENTRY": "strict", "PYTHONPATH": f"/a{os.pathsep}{bootstrap}{os.pathsep}/b"})
    assert (again["CKPT_SENTRY"], again["PYTHONPATH"]) == ("strict", os.pathsep.join([bootstrap, "/a", "/b"]))


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_code(code: int) -> None:
    assert command.run([PYTHON, "-c", f"raise SystemExit({code})"], os.environ) == code


def test_exit_by_a_signal() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert command.run([PYTHON, "-c", program], os.environ) == 128 + signal.SIGKILL


def test_no_such_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.run(["no-such-command"], os.environ) == 127
    assert capfd.readouterr().err == (
        "ckpt-sentry run: there is no command 'no-such-command': check its name, the PATH and its #! line\n"
    )


def test_not_executable(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    assert command.run([str(tmp_path / "text")], os.environ) == 126
    assert capfd.readouterr().err == f"ckpt-sentry run: {str(tmp_path / 'text')!r} cannot be run: Permission denied\n"


def test_handlers_are_given_back() -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in numbers]
    command.run([PYTHON, "-c", "pass"], os.environ)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"])
def test_signals_reach_the_command(name: str) -> None:
    """
    The command prints which signal it got and leaves by an exit code of its own.
    """
    program = (
        "import signal, sys\n"
        f"signal.signal(signal.{name}, lambda number, _: (print(number, flush=True), sys.exit(9)))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    parent = subprocess.Popen(
        [PYTHON, "-m", "ckpt_sentry", "run", "--", PYTHON, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(getattr(signal, name))
    rest, _ = parent.communicate(timeout=60)
    assert (parent.returncode, rest) == (9, f"{getattr(signal, name).value}\n")
