from __future__ import annotations

import importlib

import click
import pytest
from click.testing import CliRunner

from ckpt_sentry import __version__
from ckpt_sentry.cli import COMMANDS, main
from tests.conftest import Environment


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_every_command(option: str) -> None:
    result = CliRunner().invoke(main, [option])
    assert result.exit_code == 0
    assert [name for name in COMMANDS if f"\n  {name}" not in result.output] == []


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"ckpt-sentry, version {__version__}\n")


def test_an_unknown_command() -> None:
    result = CliRunner().invoke(main, ["reprot"])
    assert result.exit_code == 2
    assert "No such command 'reprot'." in result.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_module_and_its_help(name: str) -> None:
    command = importlib.import_module(f"ckpt_sentry.cli.{name}").command
    assert isinstance(command, click.Command)
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_help_loads_neither_torch_nor_a_command(installed: Environment) -> None:
    program = (
        "import sys; from ckpt_sentry.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print({name for name in sys.modules if name.startswith(('torch', 'opentelemetry', 'ckpt_sentry.'))})"
    )
    assert installed.run("-c", program).splitlines()[-1] == "{'ckpt_sentry.cli'}"


def test_python_m(installed: Environment) -> None:
    assert installed.run("-m", "ckpt_sentry", "--version") == f"ckpt-sentry, version {__version__}\n"
