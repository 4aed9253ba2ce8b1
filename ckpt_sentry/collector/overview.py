"""
The runs that left records, and how each went: what a list of them says, with bounded reading.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.collector import records
from ckpt_sentry.collector.aggregate import Aggregator
from ckpt_sentry.collector.records import MAX_LINE, Reading, Run
from ckpt_sentry.collector.summary import SEVERITY
from ckpt_sentry.dataclasses_ import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_sentry.core.report import Verdict

MAX_FILE: Final = 2**20
"""Bytes of a file of records that is read as a whole; of a larger one only the beginning and the end are."""
MAX_ALL: Final = 32 * 2**20
"""Bytes of all files that are read as a whole, the newest files first."""
EDGE: Final = 2**16
"""Bytes at the beginning and at the end of any other file."""


@dataclass(frozen=True, slots=True)
class Overview:
    """
    A run in a list: its worst verdict (None: no load, or not `whole`), and the step and path of its last load.

    `whole` is False where its records were not all read: `run.loads` are then those that were seen.
    """

    run: Run
    verdict: Verdict | None = None
    step: int | None = None
    path: str | None = None
    whole: bool = True


@dataclass(slots=True)
class _Edges(Reading):
    """
    The events at the beginning and at the end of files, with the first line of each whatever its length.
    """

    def _lines(self, file: Any) -> Iterator[bytes]:
        yield file.readline(MAX_LINE)
        begun = file.tell()
        head = file.read(max(0, EDGE - begun))
        yield from head[: head.rfind(b"\n") + 1].splitlines()
        size = file.seek(0, os.SEEK_END)
        if size - EDGE > max(begun, EDGE):
            file.seek(size - EDGE)
            # The rest of a line that began before.
            file.readline(EDGE)
        else:
            file.seek(begun + head.rfind(b"\n") + 1)
        yield from file.read(EDGE).splitlines()


def overviews(source: Path) -> tuple[Overview, ...]:
    """
    The runs in `source`, the newest first. Raises as `records.read` does.
    """
    files = records.record_files(source)
    whole = _read_whole(files)
    tally = records.Tally()
    told: dict[str, Aggregator] = defaultdict(Aggregator)
    cut: set[str] = set()
    for path in files:
        for sourced in Reading((path,), None) if path in whole else _Edges((path,), None):
            for event in sourced.events:
                tally.add(event)
                if path in whole:
                    told[event.identity.run_id].add(event, source=sourced.source)
                else:
                    cut.add(event.identity.run_id)
    return tuple(
        Overview(run, whole=False) if run.run_id in cut else _overview(run, told[run.run_id]) for run in tally.runs()
    )


def _overview(run: Run, told: Aggregator) -> Overview:
    loads = told.loads(settled=True)
    if not loads:
        return Overview(run)
    worst = max((one.verdict for one in loads), key=SEVERITY.__getitem__)
    return Overview(run, worst, loads[-1].step, loads[-1].path)


def _read_whole(files: tuple[Path, ...]) -> frozenset[Path]:
    """
    The files that are read as a whole: those that are small, from the newest on, as far as `MAX_ALL` goes.
    """
    found: set[Path] = set()
    left = MAX_ALL
    for _, size, path in sorted(filter(None, map(_written, files)), reverse=True):
        left -= min(size, MAX_FILE)
        if size <= MAX_FILE and left >= 0:
            found.add(path)
    return frozenset(found)


def _written(path: Path) -> tuple[float, int, Path] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime, info.st_size, path
