"""
`ckpt-sentry status`: how the agent gets into a process here, its settings, and what became of each patch.

Reads only; nothing of torch is imported unless `--probe` asks for it.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import platform
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

from ckpt_sentry import __version__, _startup, config
from ckpt_sentry.cli import probe
from ckpt_sentry.cli.probe import Trial
from ckpt_sentry.collector import records
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.launcher import command as launch
from ckpt_sentry.masking import clean, mask_text
from ckpt_sentry.patching import ledger

SCHEMA = "ckpt_sentry.status/1"
HOSTS = ("torch", "accelerate", "transformers", "safetensors", "structlog", "opentelemetry-sdk")
_PTH = "ckpt_sentry.pth"
_GROUP = "opentelemetry_instrumentor"
_LONGEST_VALUE = 60
_LIKENESS = 0.8
"""How alike two names are that may be the same one misspelt, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Way:
    """
    One way into a process. "in force": it has started the agent in this very process; "ready": it would, `detail` says
    when; "missing": it cannot here, `detail` says why.
    """

    name: str
    state: Literal["in force", "ready", "missing"]
    detail: str


@dataclass(frozen=True, slots=True)
class Status:
    """
    Everything that the command shows. `patches` is None where neither the agent is on nor a probe was asked for,
    `passed` and `trials` (see `probe.Probe`) where no probe was.
    """

    version: str
    python: str
    prefix: str
    mode: str
    hosts: dict[str, str | None]
    ways: tuple[Way, ...]
    settings: tuple[config.Origin, ...]
    problems: tuple[str, ...]
    patches: tuple[ledger.PatchStatus, ...] | None
    passed: frozenset[str] | None = None
    trials: tuple[Trial, ...] | None = None


@click.command("status", short_help="Show how the agent gets into a process, its settings and its patches.")
@click.option("--probe", "is_probe", is_flag=True, help="Import the host libraries and make tiny loads through them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, is_probe: bool, as_json: bool) -> None:
    """Show how the agent gets into a process here, its settings, and each patch.

    A patch is applied, absent (this version of the library has no such function), version-gated, failed, or waiting
    for its library to be imported. After a probe an applied one is seen, if a tiny load came through it, and each of
    these loads compared or not: whether the agent said of it what it had to.
    """
    found = probed(collect(None)) if is_probe else collect(registered())
    click.echo(json.dumps(clean(document(found)), indent=2) if as_json else mask_text(text(found)))


def collect(patches: tuple[ledger.PatchStatus, ...] | None) -> Status:
    """
    Look at this process and its environment.
    """
    settings = config.Settings.from_env()
    return Status(
        version=__version__,
        python=platform.python_version(),
        prefix=sys.prefix,
        mode=settings.mode,
        hosts={name: _version(name) for name in HOSTS},
        ways=ways(),
        settings=tuple(map(_explained, config.origins())),
        problems=(*settings.problems, *misspelt(os.environ)),
        patches=patches,
    )


def _explained(origin: config.Origin) -> config.Origin:
    """
    A setting with the folder that is meant by the default, and with the word in the environment that is not known.
    """
    if origin.name == f"{config.PREFIX}_DIR" and origin.source == "default":
        return replace(origin, value=str(records.default_source(None)))
    text = os.environ.get(origin.name)
    if text is None or origin.source == "environment":
        return origin
    return replace(origin, source=f'environment: "{text[:_LONGEST_VALUE]}" is unknown')


def misspelt(environ: Mapping[str, str]) -> tuple[str, ...]:
    """
    A sentence for each variable that looks like ours with a slip of the pen: nothing reads it.
    """
    ours = config.PREFIX
    names = [variable.name for variable in config.VARIABLES if not variable.internal]
    found = []
    for name in sorted(environ):
        if name == ours or name.startswith(f"{ours}_"):
            continue
        nearest = difflib.get_close_matches(name.upper(), names, 1, _LIKENESS)
        if nearest and _is_like(name.upper()):
            found.append(f"{name[:_LONGEST_VALUE]} is set, which nothing reads; did you mean {nearest[0]}?")
    return tuple(found)


def _is_like(name: str) -> bool:
    """
    Whether a name begins like ours: the first two words of it, whatever follows.
    """
    beginning = "_".join(name.split("_")[:2])
    return difflib.SequenceMatcher(None, beginning, config.PREFIX).ratio() >= _LIKENESS


def registered() -> tuple[ledger.PatchStatus, ...] | None:
    """
    The patches of this process as they are; None where the agent is off.
    """
    return ledger.status() if ledger.installed() else None


def probed(status: Status) -> Status:
    """
    The same status with what a probe has found.
    """
    try:
        found = probe.probe()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return replace(status, problems=(*status.problems, f"the probe did not come to its end: {error}"))
    return replace(status, patches=found.patches, passed=found.passed, trials=found.trials)


def ways() -> tuple[Way, ...]:
    """
    The four ways, as they stand in this interpreter.
    """
    return (_site_way(), _run_way(), _code_way(), _opentelemetry_way())


def _site_way() -> Way:
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    found = next((folder for folder in folders if Path(folder, _PTH).is_file()), None)
    if found is None:
        return Way("site", "missing", f"no {_PTH} in a folder that Python scans at start-up: use `ckpt-sentry run`")
    state: Literal["in force", "ready"] = "in force" if _startup.SITE in _startup.ways() else "ready"
    return Way("site", state, f"{Path(found, _PTH)}, where CKPT_SENTRY is set")


def _run_way() -> Way:
    if _startup.RUN in _startup.ways():
        return Way("run", "in force", f"{launch.BOOTSTRAP} is on PYTHONPATH")
    return Way("run", "ready", "`ckpt-sentry run -- COMMAND`")


def _code_way() -> Way:
    return Way("code", "ready", "`ckpt_sentry.install()`")


def _opentelemetry_way() -> Way:
    if _version("opentelemetry-instrumentation") is None:
        return Way("opentelemetry", "missing", "opentelemetry-instrumentation is not installed")
    if not any(entry.name == "ckpt_sentry" for entry in importlib.metadata.entry_points(group=_GROUP)):
        return Way("opentelemetry", "missing", f"ckpt-sentry is not installed with its entry point {_GROUP}")
    state: Literal["in force", "ready"] = "in force" if _startup.OPENTELEMETRY in _startup.ways() else "ready"
    return Way("opentelemetry", state, "`opentelemetry-instrument COMMAND`")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def document(status: Status) -> dict[str, object]:
    """
    The status as plain data for `--json`.
    """
    patches = None if status.patches is None else [_row(status, patch) for patch in status.patches]
    trials = None if status.trials is None else [trial._asdict() for trial in status.trials]
    found = {"schema": SCHEMA, **asdict(status), "patches": patches, "trials": trials}
    del found["passed"]
    return found


def _row(status: Status, patch: ledger.PatchStatus) -> dict[str, object]:
    """
    A patch as data. `seen` is None where no probe has looked.
    """
    return {**patch._asdict(), "seen": None if status.passed is None else patch.attribute in status.passed}


def text(status: Status) -> str:
    """
    The status for people: one section after the other, columns aligned.
    """
    hosts = " · ".join(f"{name} {version}" for name, version in status.hosts.items() if version is not None)
    off = " (set CKPT_SENTRY=1)" if status.mode == "off" and not os.environ.get(config.PREFIX) else ""
    lines = [
        f"ckpt-sentry {status.version} · Python {status.python} · {status.prefix}",
        hosts,
        "",
        f"mode      {status.mode}{off}",
        *_section("ways", [(way.name, way.state, way.detail) for way in status.ways]),
        *_section(
            "settings",
            [(item.name, *map(config.printable, (item.value, item.source))) for item in status.settings],
        ),
    ]
    lines += _section("problems", [(config.printable(problem),) for problem in status.problems])
    if status.patches is None:
        lines += [
            "",
            "patches",
            "  none, for the agent is off here; `ckpt-sentry status --probe` shows what there would be",
        ]
    else:
        # Several targets may wait for one library.
        rows = dict.fromkeys((patch.attribute, _state(status, patch), patch.detail) for patch in status.patches)
        lines += _section("patches", list(rows))
    lines += _section("tiny loads", [tuple(trial) for trial in status.trials or ()])
    return "\n".join(lines)


def _state(status: Status, patch: ledger.PatchStatus) -> str:
    """
    The state of a patch, and whether a tiny load came through it.
    """
    return f"{patch.state}, seen" if patch.attribute in (status.passed or ()) else patch.state


def _section(title: str, rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return ["", title, *(f"  {line}".rstrip() for line in aligned)]
