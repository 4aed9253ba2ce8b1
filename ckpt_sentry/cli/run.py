"""
`ckpt-sentry run -- COMMAND…`: the agent in every Python process that the command starts, and one report for all.
"""

from __future__ import annotations

import os
import sys

import click

from ckpt_sentry import config
from ckpt_sentry.integrations.launchers.torchrun_workers import signal_name
from ckpt_sentry.launcher import command as launch
from ckpt_sentry.launcher.coordinator import Coordinator, has_coordinator
from ckpt_sentry.patching.guard import contained


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
    ckpt-sentry run -- python spawn.py

    This process listens to all ranks that COMMAND starts on this machine and prints one report for each of their
    loads. CKPT_SENTRY is set to 1 unless it is set already.
    """
    environ = launch.environment(os.environ)
    coordinator = _coordinator(config.Settings.from_env(environ))
    if coordinator is not None:
        coordinator.enter(environ)
    code = launch.run(command_line, environ)
    if coordinator is not None:
        _close(coordinator, code)
    sys.exit(code)


@contained("run.coordinator")
def _coordinator(settings: config.Settings) -> Coordinator | None:
    if settings.mode == "off" or has_coordinator():
        return None
    return Coordinator(None, None, knows_ends=False)


@contained("run.close")
def _close(coordinator: Coordinator, code: int) -> None:
    """
    Say what is left to be said. Launchers say by their own exit code by which signal a worker was killed, as shells do.
    """
    killed = code - launch.KILLED
    coordinator.close(ok=code == 0, signal=signal_name(killed) if killed > 0 else None)
