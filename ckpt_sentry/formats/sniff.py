"""
What a file really is, by its first and last bytes; its name counts for nothing but to say that the name is wrong.

A loader that is given a Git LFS pointer, a web page or half a file says "header too large" or "Unsupported operand
118". Here the bytes are looked at first.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from io import FileIO
from typing import Final, Literal

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.formats import safetensors
from ckpt_sentry.formats.elements import open_regular
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.formats.regular import regular
from ckpt_sentry.patching.guard import let_through

Kind = Literal[
    "safetensors",
    "torch_zip",
    "torch_legacy",
    "pickle",
    "dcp_folder",
    "dcp_shard",
    "folder",
    "index",
    "json",
    "lfs_pointer",
    "html_page",
    "empty",
    "truncated",
    "unknown",
]
Loader = Literal["file", "dcp"]
"""Who is to read the path: a loader of one state-dict file (by its extension), or `torch.distributed.checkpoint`."""

MAX_JSON: Final = 256 * 1024 * 1024
"""Bytes of an index that are read at most."""

_HEAD: Final = 1024
_ZIP_TAIL: Final = 65_557  # the end record (22 bytes) and the longest comment
_MAX_LISTED: Final = 10_000

_LFS: Final = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
_TORCH_MAGIC: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""LONG1 of 0x1950a86a20f9469cfc6c, with which `torch.save` began before its zip format (torch/serialization.py)."""

_OTHERS: Final[Mapping[bytes, str]] = {
    b"GGUF": "a GGUF file (llama.cpp)",
    b"\x89HDF": "an HDF5 file (Keras, h5py)",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "gzip-compressed",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"BZh": "bzip2-compressed",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF document",
}

_WORDS: Final[Mapping[Kind, str]] = {
    "safetensors": "a safetensors file",
    "torch_zip": "a torch.save file",
    "torch_legacy": "a torch.save file in the format before torch 1.6",
    "pickle": "a plain pickle, not written by torch.save",
    "dcp_folder": "a distributed checkpoint (DCP)",
    "dcp_shard": "one shard of a distributed checkpoint (DCP)",
    "folder": "a folder",
    "index": "the index of a sharded checkpoint",
    "json": "a JSON text",
    "lfs_pointer": "a Git LFS pointer",
    "html_page": "a web page",
    "empty": "empty",
    "truncated": "cut off",
    "unknown": "no known checkpoint format",
}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """
    What lies at a path. `size` is in bytes (0 for a folder); `detail` says more in words, or is empty; `error` is what
    is wrong with a safetensors header.
    """

    kind: Kind
    size: int
    detail: str = ""
    error: HeaderError | None = field(default=None, compare=False, repr=False)

    @property
    def words(self) -> str:
        """
        What it is, as it stands after "is".
        """
        if self.kind == "unknown" and self.detail:
            return self.detail
        return f"{_WORDS[self.kind]} ({self.detail})" if self.detail else _WORDS[self.kind]


def sniff(path: str | os.PathLike[str], tried: HeaderError | None = None) -> FileFacts:
    """
    Say what lies at a path.

    :param tried: what `safetensors.read` has just raised for it: a header may be large, and is read once.
    :raises OSError: it is not there or cannot be read.
    """
    path = os.fspath(path)
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        return _folder(path)
    if not stat.S_ISREG(status.st_mode):
        return FileFacts("unknown", 0, "no regular file")
    if status.st_size == 0:
        return FileFacts("empty", 0)
    with open_regular(path) as file:
        return _file(path, file, status.st_size, tried)


def _folder(path: str) -> FileFacts:
    if os.path.isfile(os.path.join(path, ".metadata")):
        return FileFacts("dcp_folder", 0)
    holds = set()
    with os.scandir(path) as listing:
        for _, item in zip(range(_MAX_LISTED), listing, strict=False):
            holds.add(os.path.splitext(item.name)[1])
    if ".distcp" in holds:
        return FileFacts("dcp_folder", 0, "shards without .metadata: the save never finished")
    known = sorted(holds & {".safetensors", ".bin", ".pt", ".pth", ".ckpt"})
    return FileFacts("folder", 0, f"with {', '.join(known)} files" if known else "")


def _file(path: str, file: FileIO, size: int, tried: HeaderError | None) -> FileFacts:
    head = file.read(_HEAD)
    if head.startswith(_LFS):
        promised = re.search(rb"\nsize (\d{1,18})\s", head)
        return FileFacts("lfs_pointer", size, f"for a file of {int(promised[1]):,} bytes" if promised else "")
    if head.startswith(b"PK\x03\x04"):
        return _zip(path, file, head, size)
    if limits := safetensors.bounds(head, size):
        return _safetensors(path, limits, tried)
    if head[0] == 0x80 and head[1:2] <= b"\x05":  # noqa: PLR2004 PROTO and its highest version
        if path.endswith(".distcp"):
            return FileFacts("dcp_shard", size)
        return FileFacts("torch_legacy" if _TORCH_MAGIC in head[:32] else "pickle", size)
    return _text(path, head, size) or _other(path, head, size)


def _zip(path: str, file: FileIO, head: bytes, size: int) -> FileFacts:
    file.seek(max(0, size - _ZIP_TAIL))
    tail = file.read(_ZIP_TAIL)
    if b"PK\x05\x06" not in tail:
        return FileFacts("truncated", size, "a torch.save file without its end")
    if path.endswith(".distcp"):
        return FileFacts("dcp_shard", size)
    # torch writes data.pkl first; the directory at the end names it too, whatever the order.
    if b"/data.pkl" in head or b"/data.pkl" in tail:
        return FileFacts("torch_zip", size, "TorchScript" if b"/constants.pkl" in tail else "")
    return FileFacts("unknown", size, "a zip archive that torch did not write")


def _safetensors(path: str, limits: safetensors.Bounds, tried: HeaderError | None) -> FileFacts:
    if not limits.complete:
        return FileFacts("truncated", limits.size, "a safetensors file that ends inside its header")
    error = tried or _header_error(path)
    if error is not None and error.code == "truncated_file":
        return FileFacts("truncated", limits.size, "a safetensors file without its end")
    if limits.header > safetensors.MAX_HEADER:
        return FileFacts("safetensors", limits.size, f"with a header of {limits.header:,} bytes", error)
    is_bad = error is not None and error.level == "error"
    return FileFacts("safetensors", limits.size, "with a bad header" if is_bad else "", error)


def _header_error(path: str) -> HeaderError | None:
    try:
        safetensors.read(path)
    except HeaderError as error:
        return error.with_traceback(None)
    return None


def _text(path: str, head: bytes, size: int) -> FileFacts | None:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<?xml", b"<!--")):
        title = re.search(rb"<title[^>]*>([^<]{1,120})", head, re.IGNORECASE)
        return FileFacts("html_page", size, f'titled "{shown(_decode(title[1]))}"' if title else "")
    if start.startswith((b"{", b"[")) and size <= MAX_JSON:
        return _json(path, size)
    return None


def _decode(raw: bytes) -> str:
    return " ".join(raw.decode(errors="replace").split())


def _json(path: str, size: int) -> FileFacts | None:
    try:
        with open(path, "rb", opener=regular) as file:
            document = json.load(file)
    except (ValueError, RecursionError):
        return FileFacts("unknown", size, "a JSON text that is cut off or damaged") if path.endswith(".json") else None
    is_index = isinstance(document, dict) and isinstance(document.get("weight_map"), dict)
    return FileFacts("index" if is_index else "json", size)


def _other(path: str, head: bytes, size: int) -> FileFacts:
    if head[257:262] == b"ustar":
        return FileFacts("unknown", size, "a tar archive")
    if not head.strip(b"\0"):
        return FileFacts("unknown", size, "nothing but zero bytes at its start")
    for magic, words in _OTHERS.items():
        if head.startswith(magic):
            return FileFacts("unknown", size, words)
    if path.endswith(".safetensors") and size <= 8:  # noqa: PLR2004 the length field
        return FileFacts("truncated", size, "shorter than any safetensors file")
    return FileFacts("unknown", size)


_BY_EXTENSION: Final[Mapping[str, frozenset[Kind]]] = {
    ".safetensors": frozenset({"safetensors"}),
    ".bin": frozenset({"torch_zip", "torch_legacy"}),
    ".pt": frozenset({"torch_zip", "torch_legacy"}),
    ".pth": frozenset({"torch_zip", "torch_legacy"}),
    ".ckpt": frozenset({"torch_zip", "torch_legacy"}),
    ".json": frozenset({"json", "index"}),
    ".distcp": frozenset({"dcp_shard"}),
}
_CONTENTS: Final = frozenset[Kind]({"safetensors", "torch_zip", "torch_legacy", "pickle", "dcp_shard", "index", "json"})


def wrong_extension(path: str | os.PathLike[str], kind: Kind) -> bool:
    """
    Say whether a file of a known kind has a name from which a loader would take it for another one.

    Loaders go by ".safetensors" alone: a safetensors file must have it, whatever else the name is.
    """
    extension = os.path.splitext(os.fspath(path))[1]
    if kind not in _CONTENTS:
        return False
    if kind == "safetensors":
        return extension != ".safetensors"
    return kind not in _BY_EXTENSION.get(extension, frozenset({kind}))


def findings(
    path: str | os.PathLike[str], loader: Loader = "file", tried: HeaderError | None = None
) -> tuple[Finding, ...]:
    """
    Say what keeps a loader from reading a path; nothing where its bytes are what they should be. Never raises OSError.

    :param tried: as for `sniff`.
    """
    path = os.fspath(path)
    name = shown(os.path.basename(path.rstrip("/")) or path)
    try:
        facts = sniff(path, tried)
    except FileNotFoundError:
        return (Finding("path_missing", "error", f"{shown(path)} does not exist"),)
    except PermissionError:
        return (Finding("permission_denied", "error", f"{name} may not be read by this user", "check its permissions"),)
    except (OSError, ValueError) as error:
        let_through(error)
        reason = getattr(error, "strerror", None) or str(error)
        return (Finding("file_unreadable", "error", f"{shown(path)} cannot be opened: {shown(reason)}"),)
    found = _broken(name, facts) or (_for_dcp(name, facts) if loader == "dcp" else _for_file(path, name, facts))
    return (found,) if found else ()


def _broken(name: str, facts: FileFacts) -> Finding | None:
    again = "copy or download it again"
    match facts.kind:
        case "lfs_pointer":
            text = f"{name} is {facts.words}: its content was never downloaded"
            return Finding("lfs_pointer", "error", text, "git lfs pull")
        case "html_page":
            text = f"{name} is {facts.words}: a server answered with a page instead of the file"
            return Finding("html_page", "error", text, "log in (or accept the licence) and download it again")
        case "empty":
            return Finding("empty_file", "error", f"{name} has no content: 0 bytes", again)
        case "truncated":
            return Finding("truncated_file", "error", f"{name} is {facts.words}, {facts.size:,} bytes", again)
        case _:
            return None


def _for_file(path: str, name: str, facts: FileFacts) -> Finding | None:
    if facts.kind in {"dcp_folder", "dcp_shard"}:
        text = f"{name} is {facts.words}: this loader cannot read it"
        step = "load it with torch.distributed.checkpoint.load, or convert it: python -m " + _CONVERT
        return Finding("dcp_checkpoint", "error", text, step)
    if wrong_extension(path, facts.kind):
        return Finding("wrong_extension", "error", f"{name} is {facts.words}", _rename_to(facts.kind))
    if facts.kind == "safetensors":
        return None if facts.error is None else facts.error.finding()
    if facts.kind in {"unknown", "pickle"}:
        return Finding("unknown_format", "error", f"{name} is {facts.words}")
    return None


_CONVERT: Final = "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"


def _rename_to(kind: Kind) -> str:
    if kind == "safetensors":
        return "rename it to .safetensors"
    if kind in {"torch_zip", "torch_legacy"}:
        return "rename it to .bin"
    return "check where it came from"


def _for_dcp(name: str, facts: FileFacts) -> Finding | None:
    if facts.kind in {"torch_zip", "torch_legacy"}:
        step = "load it with torch.load, or convert it: python -m torch.distributed.checkpoint.format_utils "
        return Finding("torch_save_file", "error", f"{name} is {facts.words}, no DCP folder", f"{step}torch_to_dcp")
    if facts.kind == "safetensors":
        step = "load it with safetensors.torch.load_file"
        return Finding("safetensors_file", "error", f"{name} is {facts.words}, no DCP folder", step)
    return None
