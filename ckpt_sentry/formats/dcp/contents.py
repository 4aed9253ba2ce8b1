"""
Whether the parts of a distributed checkpoint are still what `torch.save` wrote: bounded work, and nothing is unpickled.

Each part in a file of `FileSystemWriter` is a zip archive with a directory at its end and a checksum for each entry.
What has gone through other formats or transforms is not judged.
"""

from __future__ import annotations

import io
import os
import struct
import time
import zipfile
from collections.abc import Iterable, Sequence
from typing import IO, Final, TypeVar

from ckpt_sentry.core.report import Shape
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.formats.dcp.files import needed_sizes
from ckpt_sentry.formats.dcp.metadata import DcpMetadata, Stored
from ckpt_sentry.formats.regular import regular

MAX_PARTS: Final = 512
MAX_SECONDS: Final = 1.0
MAX_LISTED_BYTES: Final = 8 * 2**20
"""Bytes of the archives' directories."""
MAX_BYTES: Final = 64 * 2**20
"""Bytes of the entries, which their checksums need."""

_PASSES: Final = 16
_BLOCK: Final = 2**20
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
"""How a plain pickle and a `torch.save` of old begin: what a planner of its own may store of an object."""
_HEAD: Final = 9
"""Bytes that tell the format: a safetensors part begins with the length of its header, and that with a brace."""
_BROKEN: Final = (zipfile.BadZipFile, ValueError, RuntimeError, EOFError, OverflowError, LookupError, struct.error)
"""What `zipfile` raises for bytes that are no archive, or no longer."""

_NO_PLACE: Final = (ValueError, OverflowError)
"""What a file raises for an offset that no file can have."""

_T = TypeVar("_T")
Part = tuple[str, Shape | None]
"""A key, and where the chunk begins in its tensor (None: the entry is no tensor)."""


@dataclass(frozen=True, slots=True)
class Damage:
    """
    The parts that are not what was saved; `whole` says that every part was looked at to its last byte.
    """

    parts: tuple[Part, ...] = ()
    whole: bool = True


class _EnoughError(Exception):
    """
    The time or the bytes are used up.
    """


@dataclass(slots=True)
class _Allowance:
    until: float
    left: int

    def take(self, wanted: int) -> None:
        if wanted > self.left or time.monotonic() > self.until:
            raise _EnoughError
        self.left -= wanted


class _Slice(io.RawIOBase):
    """
    A part of a file as a file of its own, which can be read as far as the allowance goes.
    """

    def __init__(self, file: IO[bytes], stored: Stored, allowance: _Allowance) -> None:
        self._file = file
        self._start, self._length = stored.offset, stored.length
        self._allowance = allowance
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._length - self._at)
        wanted = rest if size < 0 else min(size, rest)
        self._allowance.take(wanted)
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        self._at += len(data)
        return data


def damage(path: str, metadata: DcpMetadata, first: Iterable[Part] = ()) -> Damage:
    """
    Look at the parts of the checkpoint in the folder `path`, those in `first` before the others.

    The directories of up to `MAX_PARTS` parts spread over all files come first, then the entries, up to `MAX_BYTES`;
    all in `MAX_SECONDS`. What cannot be read is passed over.
    """
    until = time.monotonic() + MAX_SECONDS
    judged = _judged(metadata)
    chosen = _chosen(judged, first)
    listed, contents = _Allowance(until, MAX_LISTED_BYTES), _Allowance(until, MAX_BYTES)
    whole = len(chosen) == len(judged)
    broken: set[Part] = set()
    for allowance, look in ((listed, _lists), (contents, _holds)):
        for part in chosen:
            if part in broken:
                continue
            try:
                with open(os.path.join(path, judged[part].file), "rb", opener=regular) as file:
                    if not look(_Slice(file, judged[part], allowance)):
                        broken.add(part)
            except (_EnoughError, OSError, *_NO_PLACE):
                whole = False
    return Damage(tuple(sorted(broken, key=lambda part: (part[0], part[1] or ()))), whole)


def _judged(metadata: DcpMetadata) -> dict[Part, Stored]:
    """
    The parts that `torch.save` wrote, by all that the metadata tells, in the order of files and places.
    """
    inside = needed_sizes(metadata)
    ours = {
        part: stored
        for part, stored in metadata.storage.items()
        if not stored.transforms and stored.file in inside and not stored.file.endswith(".safetensors")
    }
    return dict(sorted(ours.items(), key=lambda item: (item[1].file, item[1].offset)))


def _chosen(judged: dict[Part, Stored], first: Iterable[Part]) -> list[Part]:
    """
    The parts to look at: the first of `first`, spread over the rest of them, spread over all others.
    """
    wanted = [part for part in dict.fromkeys(first) if part in judged]
    own = set(wanted)
    others = [part for part in judged if part not in own]
    beginning = wanted[:1]
    asked = _spread([part for part in judged if part in own and part not in beginning], MAX_PARTS - 1)
    return [*beginning, *asked, *_spread(others, MAX_PARTS - len(beginning) - len(asked))]


def _spread(items: Sequence[_T], most: int) -> list[_T]:
    """
    At most so many of the items, evenly spread, in an order that soon has been everywhere.
    """
    count = min(most, len(items))
    some = [items[place * len(items) // count] for place in range(count)]
    return [item for start in range(_PASSES) for item in some[start::_PASSES]]


def _lists(stored: _Slice) -> bool:
    """
    Whether a part begins and ends like an archive, or is of another format.
    """
    head = stored.read(_HEAD)
    if not head.startswith(_ZIP):
        return _is_other_format(head)
    try:
        with zipfile.ZipFile(stored) as archive:
            return bool(archive.infolist())
    except _BROKEN:
        return False


def _is_other_format(head: bytes) -> bool:
    return head.startswith(_PICKLE) or (len(head) == _HEAD and head.endswith(b"{") and head[5:8] == bytes(3))


def _holds(stored: _Slice) -> bool:
    """
    Whether the entries of an archive are those that its directory tells of, by their checksums.
    """
    if not stored.read(_HEAD).startswith(_ZIP):
        return True
    try:
        with zipfile.ZipFile(stored) as archive:
            for entry in archive.infolist():
                # `torch.save` does not compress, and writes no checksum where it has been told so.
                if entry.compress_type == zipfile.ZIP_STORED and entry.CRC:
                    _read(archive, entry)
            return True
    except _BROKEN:
        return False


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    with archive.open(entry) as file:
        while file.read(_BLOCK):
            pass
