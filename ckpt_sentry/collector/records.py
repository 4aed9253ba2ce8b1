"""
Records on disk: OTLP requests as JSON lines, which is also what the Collector's `file` exporter writes.

Each writing process has a file of its own, `<run>-<node>-<pid>.jsonl`, in `CKPT_SENTRY_DIR` (shared by runs) or in one
private folder a run under `$XDG_STATE_HOME/ckpt_sentry`. A record is written by one call, so a line is whole or, where
the disk filled up or the machine stopped, the damaged end of a file; readers pass over it and count it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.collector.left_out import LeftOut
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.formats.regular import own, regular
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import Event, LoadFinished, LoadsLeftOut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KEPT_RUNS: Final = 100
"""Run folders that stay under the state folder; older ones are deleted when a new run begins to write."""

MOST_LOADS: Final = 1_000
"""Loads of a run that are read: the newest."""

MAX_LINE: Final = 32 * 1024 * 1024
"""Bytes of a line beyond which a reader passes over it, and a writer refuses: a request is at most 20 MiB."""

_OTHER_SIGNALS: Final = (b'{"resourceSpans":', b'{"resourceMetrics":')
"""How lines begin in which there is no event."""

MAX_PASSED_OVER: Final = 8 * MAX_LINE
"""Bytes of lines beyond `MAX_LINE` after which the rest of a file is left alone: it may be one hole of terabytes."""

_EXPORTED: Final = b'"telemetry.sdk.name"'
"""In what an exporter of OpenTelemetry has sent: it arrives when its thread gets to it, so arrival is no order."""

_RUN_OF: Final = re.compile(rb'"key":"ckpt_sentry\.run_id","value":\{"stringValue":"([^"\\]*)"\}')
_LOAD_OF: Final = re.compile(rb'"key":"ckpt_sentry\.load_id","value":\{"stringValue":"([^"\\]*)"\}')
_AT_OF: Final = re.compile(rb'"timeUnixNano":"([0-9]{1,20})"')
"""What an event is of, as we and the Collector write it: to look for this takes a fiftieth of reading the event."""

_SUFFIX: Final = ".jsonl"
_SENT_SUFFIX: Final = ".sent"
"""How far a file of records has been forwarded; see `forward`."""

_NAME_LIMIT: Final = 80
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+|^\.+")


@dataclass(frozen=True, slots=True)
class Place:
    """
    A folder for the records of a run. A private one is readable by its owner alone; a shared one follows the umask.
    """

    folder: Path
    private: bool


@dataclass(frozen=True, slots=True)
class SourcedEvents:
    """
    The events of one line, in order, and the file that they come from; with the line, where its place in the file says
    nothing of when they happened.
    """

    source: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """
    A run that has left records. Times are seconds since the epoch; `loads` counts distinct load ids.
    """

    run_id: str
    started_at: float
    ended_at: float
    loads: int


def state_root(environ: Mapping[str, str] = os.environ) -> Path:
    """
    `$XDG_STATE_HOME/ckpt_sentry`; a relative value is ignored, as the XDG base directory specification says.
    """
    base = Path(environ.get("XDG_STATE_HOME", ""))
    root = base if base.is_absolute() else _expanded(Path(environ.get("HOME") or "~")) / ".local" / "state"
    return root / "ckpt_sentry"


def _expanded(path: Path) -> Path:
    """
    The path without "~". Where that home is not known (a user id without a name, and no HOME) nothing can be written.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        return Path(os.devnull) / path


def place(directory: str | None, run_id: str, environ: Mapping[str, str] = os.environ) -> Place:
    """
    Where a run writes: `directory` (`CKPT_SENTRY_DIR`) as it is, or the run's own folder under the state folder.
    """
    if directory:
        return Place(_expanded(Path(directory)), private=False)
    return Place(state_root(environ) / safe_name(run_id), private=True)


def default_source(directory: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """
    Where one reads when nothing is named.
    """
    return _expanded(Path(directory)) if directory else state_root(environ)


def safe_name(name: str) -> str:
    """
    A file name of letters, digits, ".", "_" and "-", at most 80 long and no dot first.

    A name that had to be changed ends in a digest, so that different names stay different.
    """
    safe = _UNSAFE.sub("_", name)[:_NAME_LIMIT]
    if safe == name and safe:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe[: _NAME_LIMIT - 9]}-{digest}"


class Records:
    """
    The file of this process. Nothing is created before the first record, and no file stays open between records.
    """

    def __init__(self, where: Place, *, run_id: str, node: str, pid: int) -> None:
        self._place = where
        self._begun = False
        self._ragged = False
        self._end = self._own_from = 0
        self.problem: str | None = None
        """Why the last record could not be written, if so, and what to do."""
        self.path = where.folder / f"{safe_name(run_id)}-{safe_name(node or 'node')}-{pid}{_SUFFIX}"

    def append(self, request: Mapping[str, Any]) -> bool:
        """
        Write an OTLP request as one line; False if the disk would not take it. Never raises OSError.
        """
        return self.append_line(json.dumps(request, separators=(",", ":")).encode() + b"\n")

    def append_line(self, line: bytes) -> bool:
        """
        The same for a line that ends in a line break.
        """
        return len(line) <= MAX_LINE and self._write(line, None)

    def replace_end(self, size: int, data: bytes) -> bool:
        """
        Put `data` (whole lines, no more than there were) in the place of the last `size` bytes that were written.

        False where that cannot be done: the disk would not take it, or another has written since.
        """
        place = self._end - size
        return not self._ragged and len(data) <= size and place >= self._own_from and self._write(data, place)

    def _write(self, data: bytes, place: int | None) -> bool:
        """
        Write whole lines at the end (None), or at a place where the file then ends; whether the disk took them.
        """
        self.problem = None
        try:
            if not self._begun:
                self._begin()
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if place is None else 0)
            descriptor = own(self.path, flags, 0o600 if self._place.private else 0o666)
            try:
                whole = self._write_to(descriptor, data, place)
            finally:
                os.close(descriptor)
        except OSError as error:
            let_through(error)
            self.problem = _unwritable(self._place.folder, error.strerror or str(error))
            return False
        if self._ragged:
            self.problem = _unwritable(self._place.folder, os.strerror(errno.ENOSPC))
        return whole

    def _write_to(self, descriptor: int, data: bytes, place: int | None) -> bool:
        before = os.fstat(descriptor).st_size
        if before != self._end:
            # Another has written since: what was there before is not ours to replace.
            self._own_from = before
            if place is not None:
                return False
        if place is None:
            # A line that was cut short before must not swallow this one.
            data = b"\n" + data if self._ragged else data
            written = os.write(descriptor, data)
        else:
            written = os.pwrite(descriptor, data, place)
            os.ftruncate(descriptor, place + written)
        self._ragged = written != len(data)
        self._end = os.fstat(descriptor).st_size
        return not self._ragged

    def _begin(self) -> None:
        folder = self._place.folder
        folder.mkdir(mode=0o700 if self._place.private else 0o777, parents=True, exist_ok=True)
        if self._place.private and not _is_own_folder(folder):
            raise OSError(errno.EPERM, "it is a link or another user's")
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb", opener=own) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                self._ragged = file.read(1) != b"\n"
        if self._place.private:
            prune(folder.parent, spare=folder)
        self._begun = True


def _is_own_folder(folder: Path) -> bool:
    """
    Whether a folder that is meant for its owner alone is one: in a shared place another may have put it there.
    """
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and (not hasattr(os, "geteuid") or found.st_uid == os.geteuid())


def _unwritable(folder: Path, why: str) -> str:
    return f"Set CKPT_SENTRY_DIR to a folder that can be written: no record is kept in {folder} ({why})."


def prune(root: Path, *, keep: int = KEPT_RUNS, spare: Path | None = None) -> int:
    """
    Delete the oldest run folders under a state folder beyond `keep`; the number deleted. Never raises OSError.

    Only folders that hold nothing but records are touched; links are not followed. `spare` counts, and stays.
    """
    folders: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and path != spare:
                folders.append((_last_written(path), path))
    folders.sort(reverse=True)
    return sum(_delete(path) for _, path in folders[max(0, keep - (spare is not None)) :])


def _last_written(folder: Path) -> float:
    try:
        own = folder.stat().st_mtime
        return max((file.stat().st_mtime for file in folder.iterdir()), default=own)
    except OSError:
        return 0.0


def _delete(folder: Path) -> bool:
    try:
        files = list(folder.iterdir())
        if any(file.suffix not in (_SUFFIX, _SENT_SUFFIX) or file.is_symlink() or not file.is_file() for file in files):
            return False
        for file in files:
            file.unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return False
    return True


class _TooMuchError(Exception):
    """
    A file goes on with what is no record.
    """


@dataclass(frozen=True, slots=True)
class Choice:
    """
    A run and its newest loads; `forgotten` older ones are not among them.
    """

    run_id: str
    loads: frozenset[bytes]
    forgotten: int

    def wants(self, line: bytes) -> bool:
        """
        Whether a line may hold something of them, or of the run as a whole.
        """
        of = _RUN_OF.findall(line)
        if of and self.run_id.encode("utf-8", "surrogatepass") not in of:
            return False
        loads = _LOAD_OF.findall(line)
        return not loads or len(loads) < line.count(b'"eventName":') or not self.loads.isdisjoint(loads)


class Survey:
    """
    What records hold, from a quick look at each line: runs, when the last of each was heard, and their loads in order.
    """

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        self._loads: dict[str, dict[bytes, None]] = {}

    def look_at(self, path: Path) -> None:
        """
        Look at the lines of a file; one that cannot be read holds nothing.
        """
        reading = Reading((path,), None)
        with contextlib.suppress(OSError, _TooMuchError), open(path, "rb", opener=regular) as file:
            for line in reading._lines(file):  # noqa: SLF001
                if not self._quick(line):
                    for event in reading._events(line):  # noqa: SLF001
                        self._add(event.identity.run_id, event.at, (otlp_json.load_id(event) or "").encode())

    def _quick(self, line: bytes) -> bool:
        """
        Take in a line of events of one run by its looks; False where it has to be read.
        """
        runs, times = set(_RUN_OF.findall(line)), _AT_OF.findall(line)
        if len(runs) != 1 or not times:
            return b"ckpt_sentry" not in line
        try:
            run_id = runs.pop().decode()
        except UnicodeDecodeError:
            return False
        for load_id in _LOAD_OF.findall(line) or (b"",):
            self._add(run_id, max(map(int, times)) / 1e9, load_id)
        return True

    def _add(self, run_id: str, at: float, load_id: bytes) -> None:
        self._ended[run_id] = max(self._ended.get(run_id, at), at)
        if load_id:
            self._loads.setdefault(run_id, {})[load_id] = None

    def runs(self) -> tuple[str, ...]:
        """
        The runs, the newest first.
        """
        return tuple(sorted(self._ended, key=lambda run_id: (-self._ended[run_id], run_id)))

    def newest(self) -> str | None:
        """
        The run of which something was heard last.
        """
        return next(iter(self.runs()), None)

    def choice(self, run_id: str | None) -> Choice | None:
        """
        The loads of a run that are worth reading: the newest `MOST_LOADS` of them; None where nothing is known of it.
        """
        loads = [*self._loads.get(run_id or "", {})]
        if run_id not in self._ended:
            return None
        return Choice(run_id, frozenset(loads[-MOST_LOADS:]), max(0, len(loads) - MOST_LOADS))


@dataclass(slots=True)
class Reading:
    """
    The events of one run, file by file, each file in the order in which it was written.

    Iterate once; `damaged` then counts the lines that are no OTLP request (cut off, or larger than `MAX_LINE`),
    `refused` the records of ours that could not be restored, `unreadable` names files that could not be opened, and
    `given_up` those that were not read to their end. With `chosen`, events of other loads are passed over.
    """

    files: tuple[Path, ...]
    run_id: str | None
    chosen: Choice | None = None
    damaged: int = 0
    refused: int = 0
    unreadable: list[Path] = field(default_factory=list)
    given_up: list[Path] = field(default_factory=list)

    def __iter__(self) -> Iterator[SourcedEvents]:
        for path in self.files:
            try:
                with open(path, "rb", opener=regular) as file:
                    for number, line in enumerate(self._lines(file)):
                        events = self._events(line) if self.chosen is None or self.chosen.wants(line) else ()
                        if events:
                            yield SourcedEvents(f"{path}:{number}" if _EXPORTED in line else str(path), events)
            except OSError:
                self.unreadable.append(path)
            except _TooMuchError:
                self.given_up.append(path)

    def _lines(self, file: Any) -> Iterator[bytes]:
        passed = 0
        while line := file.readline(MAX_LINE + 1):
            # A Collector writes a whole trace as one line, however long.
            other = line.startswith(_OTHER_SIGNALS)
            if len(line) > MAX_LINE:
                self.damaged += not other
                while line and not line.endswith(b"\n"):
                    passed += len(line)
                    if passed > MAX_PASSED_OVER:
                        raise _TooMuchError
                    line = file.readline(MAX_LINE)
            elif line.strip() and not other:
                yield line

    def _events(self, line: bytes) -> tuple[Event, ...]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            self.damaged += 1
            return ()
        if not isinstance(request, dict):
            self.damaged += 1
            return ()
        events, refused = otlp_json.decode(request)
        self.refused += refused
        if self.run_id is None:
            return tuple(events)
        return tuple(event for event in events if event.identity.run_id == self.run_id)


def read(source: Path, *, run_id: str | None = None) -> Reading:
    """
    The events of one run, the newest unless `run_id` says which.

    `source` is a file of OTLP JSON lines (ours or the Collector's), a folder of such files, or a state folder with a
    folder for each run. Raises FileNotFoundError if it is not there. A source without records gives no events.
    """
    files = record_files(source)
    survey = Survey()
    for path in files:
        survey.look_at(path)
    if run_id is None:
        run_id = survey.newest()
    return Reading(files, run_id, survey.choice(run_id))


def known_runs(source: Path) -> tuple[str, ...]:
    """
    The ids of the runs that left records in `source`, the newest first. Raises as `read` does.
    """
    survey = Survey()
    for path in record_files(source):
        survey.look_at(path)
    return survey.runs()


def runs(source: Path) -> tuple[Run, ...]:
    """
    The runs that left records in `source`, the newest first. Raises as `read` does.
    """
    tally = Tally()
    for sourced in Reading(record_files(source), None):
        for event in sourced.events:
            tally.add(event)
    return tally.runs()


@dataclass(frozen=True, slots=True)
class Tally:
    """
    The runs that events are of: from when to when, and which loads.
    """

    _spans: dict[str, tuple[float, float, set[str]]] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)

    def add(self, event: Event) -> None:
        """
        Take in one event.
        """
        run_id = event.identity.run_id
        start, end, loads = self._spans.get(run_id) or (event.at, event.at, set())
        load_id = otlp_json.load_id(event)
        loads.update(() if load_id is None else (load_id,))
        if isinstance(event, LoadsLeftOut):
            self.left_out.add(event)
        first = event.report.started_at if isinstance(event, LoadFinished) else event.at
        self._spans[run_id] = (min(start, first), max(end, event.at), loads)

    def runs(self) -> tuple[Run, ...]:
        """
        The runs so far, the newest first.
        """
        found = (
            Run(run_id, start, end, len(loads) + self.left_out.of(run_id))
            for run_id, (start, end, loads) in self._spans.items()
        )
        return tuple(sorted(found, key=lambda run: (-run.ended_at, run.run_id)))


def record_files(source: Path) -> tuple[Path, ...]:
    """
    The files of records in `source`, sorted: itself, or those in the folder and in its folders.
    """
    if not source.is_dir():
        if not source.exists():
            message = f"{source}: no such file or folder"
            raise FileNotFoundError(message)
        return (source,)
    found = (path for pattern in ("*.json*", f"*/*{_SUFFIX}") for path in source.glob(pattern))
    return tuple(sorted({path for path in found if path.is_file()}))
