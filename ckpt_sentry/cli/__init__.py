"""
The command `ckpt-sentry`. Each subcommand is the `command` of the module of its name, loaded when it is called.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from ckpt_sentry import __version__

COMMANDS = {
    "explain": "Say what a finding or a verdict means.",
    "report": "Show what the loads of a run came to.",
    "run": "Run a command with the agent in every Python process of it.",
    "status": "Show how the agent gets into a process, its settings and its patches.",
}
"""Subcommand: its line in `--help`. One line here and one module in this folder make a subcommand."""


@contextlib.contextmanager
def _unread() -> Iterator[None]:
    """
    That the reader of what is printed is gone (`| head`) is no error.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Nothing may be written any more, at the end of the process neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


class Commands(click.Group):
    """
    A group that knows its subcommands by name and imports one when it is called.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """
        Read the command line; `--help` prints here already.
        """
        with _unread():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """
        Run a subcommand.
        """
        with _unread():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt-sentry")
def main() -> None:
    """Checkpoint loads, watched: which keys, which rank, what to do next."""
