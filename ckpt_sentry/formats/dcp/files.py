"""
What is on disk where a distributed checkpoint should be: one listing, and one `stat` for each file in question.

Everything here is asked as the process is: with its effective user, from its host. Nothing raises OSError; what cannot
be seen is left out and said.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.formats.dcp.metadata import DcpMetadata, by_number
else:
    DcpMetadata = later("ckpt_sentry.formats.dcp.metadata:DcpMetadata")
    by_number = later("ckpt_sentry.formats.dcp.metadata:by_number")

MAX_LISTED: Final = 10_000
MAX_STATS: Final = 4096
MAX_SECONDS: Final = 2.0
"""A network file system may take a millisecond for each file, or hang: sizes are looked at for this long."""


@dataclass(frozen=True, slots=True)
class Listing:
    """
    The names in a folder, at most `MAX_LISTED` of them; `cut` says that there are more.
    """

    files: frozenset[str]
    folders: frozenset[str]
    cut: bool = False

    @property
    def names(self) -> frozenset[str]:
        return self.files | self.folders


@dataclass(frozen=True, slots=True)
class Denied:
    """
    A file or folder that this process may not use: `right` is "read", "list" or "enter".
    """

    path: str
    right: str
    mode: int | None
    owner: int | None
    group: int | None


@dataclass(frozen=True, slots=True)
class ShardSize:
    """
    A file that is shorter than the metadata needs it to be, in bytes.
    """

    file: str
    size: int
    needed: int


@dataclass(frozen=True, slots=True)
class Shards:
    """
    The data files of a checkpoint against its metadata: `files` in all, of which the sizes of `checked` were seen.
    """

    files: int
    checked: int
    missing: tuple[str, ...] = ()
    short: tuple[ShardSize, ...] = ()
    denied: tuple[Denied, ...] = ()


def listing(folder: str, most: int = MAX_LISTED) -> Listing | None:
    """
    The names in a folder, at most so many, or None where it cannot be listed.
    """
    files: set[str] = set()
    folders: set[str] = set()
    cut = False
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count == most:
                    cut = True
                    break
                (folders if _is_folder(entry) else files).add(entry.name)
    except OSError as failure:
        let_through(failure)
        return None
    return Listing(frozenset(files), frozenset(folders), cut)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as failure:
        let_through(failure)
        return False


def may(path: str, right: int) -> bool:
    """
    Whether the effective user has the right (`os.R_OK`, `os.X_OK`), as the file system sees it.
    """
    try:
        return os.access(path, right, effective_ids=os.access in os.supports_effective_ids)
    except (OSError, NotImplementedError) as failure:
        let_through(failure)
        return True


def denied(path: str, *, folder_right: str = "enter") -> Denied | None:
    """
    What keeps this process from `path`: the highest folder on the way that it may not enter, else the path itself.

    `folder_right` ("enter" or "list") is what is wanted of `path` if it is a folder.
    """
    path = absolute(path)
    for parent in reversed(list(_parents(path))):
        if not may(parent, os.X_OK) and os.path.isdir(parent):
            return _denied(parent, "enter")
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:
        return _denied(path, "read")
    except OSError as failure:
        let_through(failure)
        return None
    if not is_folder:
        return None if may(path, os.R_OK) else _denied(path, "read")
    if not may(path, os.X_OK):
        return _denied(path, "enter")
    return _denied(path, "list") if folder_right == "list" and not may(path, os.R_OK) else None


def refused(path: str) -> Denied:
    """
    A file that the system has refused to open, whatever its mode says (an exported root, an access-control list).
    """
    return denied(path) or _denied(absolute(path), "read")


def absolute(path: str) -> str:
    """
    The path from the root; as it is where the working folder is gone.
    """
    try:
        return os.path.abspath(path)
    except OSError as failure:
        let_through(failure)
        return path


def _denied(path: str, right: str) -> Denied:
    try:
        found = os.stat(path)
    except OSError as failure:
        let_through(failure)
        return Denied(path, right, None, None, None)
    return Denied(path, right, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


def _parents(path: str) -> Iterable[str]:
    while (parent := os.path.dirname(path)) != path:
        yield parent
        path = parent


def nearest_existing(path: str) -> tuple[str, str, str]:
    """
    The deepest ancestor that exists, the name that is missing in it, and what would have come below, if anything.
    """
    path = absolute(path)
    below: list[str] = []
    while True:
        parent, name = os.path.split(path)
        if parent in ("", path) or os.path.lexists(parent):
            return parent, name, os.path.join(*reversed(below)) if below else ""
        below.append(name)
        path = parent


def needed_sizes(metadata: DcpMetadata) -> dict[str, int]:
    """
    The bytes that each file has to have, by the last entry in it. Names that lead out of the folder are left out.
    """
    sizes: dict[str, int] = {}
    for stored in metadata.storage.values():
        end = stored.offset + stored.length
        if end > sizes.get(stored.file, -1):
            sizes[stored.file] = end
    return {file: size for file, size in sizes.items() if _stays_inside(file)}


def _stays_inside(file: str) -> bool:
    return bool(file) and not os.path.isabs(file) and ".." not in file.split("/") and "\0" not in file


def examine(folder: str, needed: Mapping[str, int], found: Listing | None, first: Iterable[str] = ()) -> Shards:
    """
    Compare the files that the metadata needs with those in the folder, the suspects in `first` before the others.

    What is gone is seen in the listing alone; each other file costs one `stat`, up to `MAX_STATS` files and
    `MAX_SECONDS`.
    """
    order = [file for file in first if file in needed]
    order += sorted(needed.keys() - set(order), key=by_number)
    surely_gone = set()
    if found is not None and not found.cut:
        surely_gone = {file for file in order if "/" not in file and file not in found.files}
    gone, short, refusals, checked = set(surely_gone), [], [], 0
    give_up_at = time.monotonic() + MAX_SECONDS
    for file in order:
        if file in surely_gone:
            continue
        if checked >= MAX_STATS or (checked and time.monotonic() > give_up_at):
            break
        checked += 1
        path = os.path.join(folder, file)
        try:
            info = os.stat(path)
        except FileNotFoundError:
            gone.add(file)
            continue
        except OSError as failure:
            let_through(failure)
            continue
        if info.st_size < needed[file]:
            short.append(ShardSize(file, info.st_size, needed[file]))
        if not _mode_allows(info) and not may(path, os.R_OK):
            refusals.append(_denied(path, "read"))
    return Shards(
        files=len(needed),
        checked=checked,
        missing=tuple(sorted(gone, key=by_number)),
        short=tuple(sorted(short, key=lambda one: by_number(one.file))),
        denied=tuple(refusals),
    )


def _mode_allows(info: os.stat_result) -> bool:
    # Spares the question to the file system where the mode alone says yes.
    user = os.geteuid()
    if user == 0:
        return True
    if info.st_uid == user:
        return bool(info.st_mode & stat.S_IRUSR)
    if info.st_gid == os.getegid() or info.st_gid in os.getgroups():
        return bool(info.st_mode & stat.S_IRGRP)
    return bool(info.st_mode & stat.S_IROTH)
