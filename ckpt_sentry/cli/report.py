"""
`ckpt-sentry report`: what the loads of a run came to, read from its records.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from ckpt_sentry import config
from ckpt_sentry.collector import overview, records
from ckpt_sentry.collector.aggregate import Aggregate, Aggregator
from ckpt_sentry.collector.summary import SEVERITY
from ckpt_sentry.render import json_, terminal, text
from ckpt_sentry.render.cells import cut, visible
from ckpt_sentry.render.page import Line
from ckpt_sentry.render.words import count

RUNS_SCHEMA = "ckpt_sentry.runs/1"
_SOME_RUNS = 5
_LONGEST_PATH = 80
_WIDEST = max(map(len, SEVERITY))


@click.command("report", short_help="Show what the loads of a run came to.")
@click.argument("source", required=False, metavar="[DIR|FILE|RUN]")
@click.option("--run", "run_id", metavar="ID", help="The run, or the beginning of its id; else the newest.")
@click.option("--last", is_flag=True, help="Show the last load of the run alone.")
@click.option("--all", "everything", is_flag=True, help="Cut no list, and show good loads at length too.")
@click.option("--list", "list_runs", is_flag=True, help="List the runs that left records, and how each went.")
@click.option("--json", "as_json", is_flag=True, help="Print the report, or the list of runs, as JSON.")
def command(  # noqa: PLR0913 - click passes each option as one
    *, source: str | None, run_id: str | None, last: bool, everything: bool, list_runs: bool, as_json: bool
) -> None:
    """Show what the loads of a run came to: the newest run in a folder or file of records, or the one named.

    Without an argument the records of CKPT_SENTRY_DIR are read, else those in the user's state folder. A file that the
    OpenTelemetry Collector's file exporter wrote does as well.
    """
    where, run_id = _place(source, run_id)
    try:
        if list_runs:
            _list(where, as_json=as_json)
            return
        chosen = _run_id(where, run_id)
        loads, left_out = _loads(where, chosen)
    except BrokenPipeError:
        raise
    except OSError as error:
        _fail(f"{visible(str(where))} cannot be read: {error.strerror or error}")
    if last:
        loads = loads[-1:]
    if as_json:
        click.echo(json_.text(json_.document(loads, left_out=left_out)), nl=False)
        return
    if not loads:
        _print_nothing(where, chosen)
        return
    _print(loads, everything=everything)
    if left_out and not last:
        click.echo(
            f"ckpt-sentry: {count(left_out, 'more good load')}, of which the records keep the number only", err=True
        )


def _place(source: str | None, run_id: str | None) -> tuple[Path, str | None]:
    """
    Where to read and which run: an argument that is no file or folder is taken for the id of a run.
    """
    default = records.default_source(config.settings().dir)
    if source is None:
        if not default.exists():
            _fail(f"no records: {visible(str(default))} does not exist. Run the job with CKPT_SENTRY=1 first")
        return default, run_id
    path = Path(source).expanduser()
    if path.exists():
        return path, run_id
    if run_id is not None or os.sep in source or not default.exists():
        _fail(f"{visible(source)}: no such file or folder")
    return default, source


def _run_id(where: Path, wanted: str | None) -> str | None:
    """
    The whole id of the wanted run; None for the newest.
    """
    if wanted is None:
        return None
    known = records.known_runs(where)
    found = [wanted] if wanted in known else [run_id for run_id in known if run_id.startswith(wanted)]
    if len(found) != 1:
        what = "is the beginning of several runs" if found else "is neither a file, a folder nor a run"
        some = ", ".join(map(visible, (found or known)[:_SOME_RUNS])) or "none"
        _fail(f"{visible(wanted)} {what} in {visible(str(where))}; the newest there: {some}")
    return found[0]


def _loads(where: Path, run_id: str | None) -> tuple[tuple[Aggregate, ...], int]:
    """
    The loads of a run, and how many more good ones its records only count.
    """
    reading = records.read(where, run_id=run_id)
    aggregator = Aggregator()
    for sourced in reading:
        for event in sourced.events:
            aggregator.add(event, source=sourced.source)
    forgotten = aggregator.forgotten + (reading.chosen.forgotten if reading.chosen else 0)
    _print_damage(reading, forgotten)
    return aggregator.loads(settled=True), aggregator.left_out.of(None)


def _print_damage(reading: records.Reading, forgotten: int) -> None:
    notes = []
    if reading.damaged:
        notes.append(f"{count(reading.damaged, 'damaged line')} passed over")
    if reading.refused:
        notes.append(f"{count(reading.refused, 'record')} could not be understood")
    notes += [f"{visible(str(path))} could not be read" for path in reading.unreadable]
    notes += [f"{visible(str(path))} is no file of records: it was not read to its end" for path in reading.given_up]
    if forgotten:
        notes.append(f"only the newest loads are shown: {forgotten:,} older ones are left out")
    for note in notes:
        click.echo(f"ckpt-sentry: {note}", err=True)


def _print_nothing(where: Path, run_id: str | None) -> None:
    if not records.record_files(where):
        _fail(f"no records in {visible(str(where))}. Was the job run with CKPT_SENTRY=1 and this CKPT_SENTRY_DIR?")
    which = f"run {visible(run_id)}" if run_id else "this run"
    click.echo(f"No load was recorded in {which} ({visible(str(where))}).")


def _print(loads: tuple[Aggregate, ...], *, everything: bool) -> None:
    cells, glyphs = terminal.width(sys.stdout), terminal.glyphs_for(sys.stdout)
    rows = None if everything else 200
    lines: list[Line] = []
    for one in loads:
        brief = one.verdict == "ok" and not one.findings and not everything and len(loads) > 1
        if brief:
            lines.append(text.line(one, cells, glyphs))
        else:
            lines += [(), *text.full(one, cells, glyphs, rows)] if lines else text.full(one, cells, glyphs, rows)
    if not terminal.write(lines, sys.stdout):
        # The reader is gone (`| head`): nothing may be written any more, at the end of the process neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _list(where: Path, *, as_json: bool) -> None:
    found = overview.overviews(where)
    if as_json:
        click.echo(json.dumps({"schema": RUNS_SCHEMA, "runs": [_plain(one) for one in found]}, indent=2))
        return
    if not found:
        _fail(f"no records in {visible(str(where))}")
    for one in found:
        click.echo("  ".join(_row(one)))


def _row(one: overview.Overview) -> list[str]:
    """
    A run for people: "?" for a verdict that would take long to find out.
    """
    verdict = one.verdict or ("-" if one.whole else "?")
    last = f"step {one.step}" if one.step is not None else visible(one.path or "")
    loads = count(one.run.loads, "load") + ("" if one.whole else " or more")
    facts = (
        visible(one.run.run_id),
        _moment(one.run.started_at),
        verdict.ljust(_WIDEST),
        loads,
        cut(last, _LONGEST_PATH),
    )
    return list(filter(None, facts))


def _plain(one: overview.Overview) -> dict[str, object]:
    # JSON knows neither NaN nor infinity.
    times = {"started_at": one.run.started_at, "ended_at": one.run.ended_at}
    finite = {name: at if math.isfinite(at) else None for name, at in times.items()}
    last = {"verdict": one.verdict, "step": one.step, "path": one.path, "whole": one.whole}
    return {"run_id": one.run.run_id, **finite, "loads": one.run.loads, **last}


def _moment(at: float) -> str:
    """
    A time for people; records may say any number.
    """
    try:
        return f"{dt.datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "-" * len("2026-01-01 00:00:00")


def _fail(message: str) -> NoReturn:
    click.echo(f"ckpt-sentry: {message}", err=True)
    sys.exit(2)
