"""
The training step in a key of a distributed checkpoint: one small read of the one slice that holds it.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry.formats.regular import regular
from ckpt_sentry.formats.step import STEP_KEYS, Step, as_step
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.formats.dcp.metadata import DcpMetadata, Stored
    from ckpt_sentry.formats.torch_save import unpickle
else:
    unpickle = later("ckpt_sentry.formats.torch_save.unpickle")

_MAX_ENTRY_BYTES: Final = 64 * 2**10


def peek_step(path: str | os.PathLike[str], metadata: DcpMetadata) -> Step | None:
    """
    The step that one key of the distributed checkpoint in the folder `path` holds: one small read, never a pickle run.

    None as well where two such keys disagree. Never raises.
    """
    found: dict[str, int] = {}
    for key in STEP_KEYS:
        stored = _only_place(metadata, key)
        value = None if stored is None else as_step(_peek(os.fspath(path), stored))
        if value is not None:
            found[key] = value
    if len(set(found.values())) != 1:
        return None
    key, value = next(iter(found.items()))
    return Step(value, f'key "{key}"')


def _only_place(metadata: DcpMetadata, key: str) -> Stored | None:
    entry = metadata.entries.get(key)
    if entry is None or (entry.shape is not None and entry.elements != 1):
        return None
    stored = metadata.storage.get((key, None if entry.shape is None else (0,) * len(entry.shape)))
    if stored is None or stored.transforms or not 0 < stored.length <= _MAX_ENTRY_BYTES or stored.offset < 0:
        return None
    # The name comes from the file: it must not lead out of the checkpoint.
    return None if os.path.isabs(stored.file) or ".." in re.split(r"[/\\]", stored.file) else stored


def _peek(folder: str, stored: Stored) -> object:
    try:
        with open(os.path.join(folder, stored.file), "rb", opener=regular) as file:
            file.seek(stored.offset)
            data = file.read(stored.length)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _number(archive)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile) as failure:
        let_through(failure)
        return None


class _Storage(NamedTuple):
    signed: bool
    size: int
    data: bytes
    byteorder: str


def _number(archive: zipfile.ZipFile) -> object:
    # The layout of torch.save (torch/serialization.py): NAME/data.pkl, NAME/data/KEY, NAME/byteorder.
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if any(info.file_size > _MAX_ENTRY_BYTES for info in members.values()):
        return None
    byteorder = archive.read(members["byteorder"]).decode("ascii") if "byteorder" in members else "little"

    def storage(identity: object) -> object:
        match identity:
            case ("storage", (bool() as signed, int() as size), str() as key, *_):
                return _Storage(signed, size, archive.read(members[f"data/{key}"]), byteorder)
        return None

    value = unpickle.load(archive.read(members["data.pkl"]), _numbers(), persistent=storage).value
    return value if type(value) is int else None


def _first_integer(storage: object, offset: object = 0, *_rest: object) -> object:
    # torch._utils._rebuild_tensor_v2(storage, storage_offset, size, stride, …) of a tensor with one element.
    if not isinstance(storage, _Storage) or not isinstance(offset, int) or storage.byteorder not in ("little", "big"):
        return None
    piece = storage.data[offset * storage.size : (offset + 1) * storage.size]
    if offset < 0 or len(piece) != storage.size:
        return None
    return int.from_bytes(piece, "little" if storage.byteorder == "little" else "big", signed=storage.signed)


@cache
def _numbers() -> unpickle.Allowed:
    """
    What a file of a few whole numbers is made of.
    """
    return {
        ("torch", "LongStorage"): (True, 8),
        ("torch", "IntStorage"): (True, 4),
        ("torch", "ShortStorage"): (True, 2),
        ("torch", "CharStorage"): (True, 1),
        ("torch", "ByteStorage"): (False, 1),
        ("torch._utils", "_rebuild_tensor_v2"): _first_integer,
        ("collections", "OrderedDict"): unpickle.mapping,
    }
