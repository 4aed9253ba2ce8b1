"""
`ckpt-sentry run -- COMMAND…`: the agent in every Python process that the command starts.
"""

from __future__ import annotations

import os
import sys

import click

from ckpt_sentry import launch


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a command with the agent in every Python process of it.",
)
@click.argument("command_line", metavar="[--] COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(command_line: tuple[str, ...]) -> None:
    """Run COMMAND with the agent in every Python process of it, and exit as it does.

    \b
    ckpt-sentry run -- torchrun --nproc-per-node 4 train.py
    ckpt-sentry run -- mpirun -n 4 python train.py

    CKPT_SENTRY is set to 1 unless it is set already.
    """
    sys.exit(launch.launch(command_line, launch.environment(os.environ)))
