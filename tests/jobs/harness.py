"""
Runs real programs with and without the agent and reads what it recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAMS = Path(__file__).parent.parent / "programs"
TIMEOUT = 120
"""Seconds after which a program counts as hung."""


@dataclass(frozen=True)
class Outcome:
    """
    What a program did, and where its records are.
    """

    code: int
    out: str
    err: str
    records: Path

    def loads(self) -> list[dict[str, Any]]:
        """
        The loads in `ckpt-sentry report --json`.
        """
        done = command("report", "--json", str(self.records))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["loads"]

    def text(self) -> str:
        """
        What `ckpt-sentry report` prints.
        """
        done = command("report", str(self.records))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def block(self) -> list[str]:
        """
        The agent's own lines on standard error: from its mark to the end of the indented part.
        """
        lines, inside = [], False
        for line in self.err.splitlines():
            inside = line.startswith("ckpt_sentry ") or (inside and line.startswith("  "))
            if inside:
                lines.append(line)
        return lines


def environment(**settings: str) -> dict[str, str]:
    """
    The environment of a program: this one's without any setting of the agent or of a launcher.
    """
    drop = ("CKPT_SENTRY", "OTEL_", "PYTEST_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "TRACEPARENT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"} | settings


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """
    Run `ckpt-sentry`.
    """
    line = [sys.executable, "-m", "ckpt_sentry", *words]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, check=False, timeout=TIMEOUT)


def run(
    program: str, *words: str, folder: Path, ranks: int = 1, flags: tuple[str, ...] = (), **settings: str
) -> Outcome:
    """
    Run a program of `tests/programs`, under torchrun where there are several ranks.
    """
    records = folder / "records"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    line = [sys.executable, *flags, *launcher, str(PROGRAMS / program), *words]
    environ = environment(**{"CKPT_SENTRY": "1", "CKPT_SENTRY_DIR": str(records)} | settings)
    return finish(line, environ, records)


def finish(line: Sequence[str], environ: Mapping[str, str], records: Path) -> Outcome:
    """
    Run a command line to its end; where that does not come, it is killed with all that it has started.

    A launcher's workers are no members of its group, and would keep its pipes open.
    """
    process = subprocess.Popen(
        line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        message = f"no end after {TIMEOUT} s: {err[-2000:]}"
        raise AssertionError(message) from None
    return Outcome(process.returncode, out, err, records)


def descendants(pid: int) -> list[int]:
    """
    All processes that a process has started, and they in turn, as far as they still hang together.
    """
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [(int(child), int(parent)) for child, parent in map(str.split, listing.splitlines())]
    found, wanted = [], [pid]
    while wanted:
        children = [child for child, parent in parents if parent == wanted[0]]
        wanted = [*wanted[1:], *children]
        found += children
    return found


def chaos(program: str, records: Path, **settings: str) -> dict[str, Any]:
    """
    What a program that breaks each function of the agent in turn has found (see `tests/chaos.py`).
    """
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program)],
        env=environment(**{"CKPT_SENTRY_DIR": str(records)} | settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
