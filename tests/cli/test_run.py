from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import Environment, make_environment

WAYS = "import sys; s = sys.modules.get('ckpt_sentry._startup'); print(*(s.ways() if s else ()))"


def test_the_agent_is_in_the_command(installed: Environment) -> None:
    done = installed.command("ckpt-sentry", "run", "--", installed.python, "-c", WAYS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "site run\n", "")


def test_without_the_two_dashes_and_with_options_of_the_command(installed: Environment) -> None:
    done = installed.command(
        "ckpt-sentry", "run", installed.python, "-c", "import sys; print(sys.argv)", "--help", "-h"
    )
    assert (done.returncode, done.stdout) == (0, "['-c', '--help', '-h']\n")


def test_the_variable_decides(installed: Environment) -> None:
    done = installed.command("ckpt-sentry", "run", "--", installed.python, "-c", WAYS, CKPT_SENTRY="0")
    assert (done.returncode, done.stdout) == (0, "\n")


def test_the_exit_code_is_the_commands(installed: Environment) -> None:
    assert installed.command("ckpt-sentry", "run", "--", installed.python, "-c", "raise SystemExit(5)").returncode == 5


def test_no_command_is_a_usage_error(installed: Environment) -> None:
    done = installed.command("ckpt-sentry", "run")
    assert done.returncode == 2
    assert "Missing argument '[--] COMMAND...'" in done.stderr


def test_an_install_that_site_does_not_scan(installed: Environment, tmp_path: Path) -> None:
    """
    As `pip install --target` leaves it: a folder on PYTHONPATH, whose `.pth` files nobody reads.
    """
    environment = make_environment(tmp_path / "env")
    target = tmp_path / "target"
    shutil.copytree(installed.site_packages / "ckpt_sentry", target / "ckpt_sentry")
    shutil.copy(installed.site_packages / "ckpt_sentry.pth", target)
    variables = {"PYTHONPATH": str(target)}
    assert environment.run("-c", WAYS, CKPT_SENTRY="1", **variables) == "\n"
    assert environment.run("-m", "ckpt_sentry", "run", "--", environment.python, "-c", WAYS, **variables) == "run\n"


@pytest.mark.parametrize("folder", ["with space", "ünïcode"])
def test_folders_with_odd_names(installed: Environment, tmp_path: Path, folder: str) -> None:
    environment = make_environment(tmp_path / folder)
    shutil.copytree(installed.site_packages / "ckpt_sentry", environment.site_packages / "ckpt_sentry")
    assert environment.run("-m", "ckpt_sentry", "run", "--", environment.python, "-c", WAYS) == "run\n"
