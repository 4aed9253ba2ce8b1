"""
What `ckpt-sentry run` does with a command: start it with the agent in its environment, pass signals on, end as it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

BOOTSTRAP = Path(__file__).parents[1] / "_bootstrap"
"""The folder with the `sitecustomize` that starts the agent."""

NOT_EXECUTABLE = 126
NOT_FOUND = 127
KILLED = 128

_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
_FROM_TERMINAL = ("SIGINT", "SIGQUIT")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """
    The environment of the command: the agent switched on (unless `CKPT_SENTRY` is set already) and on PYTHONPATH.
    """
    made = dict(environ)
    made.setdefault("CKPT_SENTRY", "1")
    made["CKPT_SENTRY_BOOTSTRAP"] = sys.prefix
    rest = [entry for entry in made.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(BOOTSTRAP)]
    made["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *rest])
    return made


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """
    Run the command to its end and return its exit code, as a shell would: 128 + n if signal n ended it.

    127 and one sentence on standard error if there is no such command, 126 if it cannot be executed.
    """
    with _forwarding() as children:
        try:
            child = subprocess.Popen(command, env=dict(environ))
        except FileNotFoundError:
            return _refuse(f"there is no command {command[0]!r}: check its name, the PATH and its #! line", NOT_FOUND)
        except OSError as error:
            return _refuse(f"{command[0]!r} cannot be run: {error.strerror}", NOT_EXECUTABLE)
        children.append(child)
        code = child.wait()
    return KILLED - code if code < 0 else code


def _refuse(text: str, code: int) -> int:
    sys.stderr.write(f"ckpt-sentry run: {text}\n")
    return code


@contextmanager
def _forwarding() -> Iterator[list[subprocess.Popen[bytes]]]:
    """
    Pass signals on to the children in the list that is yielded, for as long as the block lasts.

    What the terminal sends reaches the whole foreground group by itself and is not sent twice. A signal that is ignored
    (as under `nohup`) stays so.
    """
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    def leave(_: int, __: FrameType | None) -> None:
        """
        The child got it as well.
        """

    before = {}
    for name in _FORWARDED:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            handler = leave if name in _FROM_TERMINAL and _in_foreground() else forward
            before[number] = signal.signal(number, handler)
    try:
        yield children
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
