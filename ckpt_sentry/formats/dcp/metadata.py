"""
The `.metadata` of a torch.distributed.checkpoint, as plain data, without torch.

The layout is that of `torch/distributed/checkpoint/metadata.py` and `filesystem.py` (`_StorageInfo`), from torch 2.2
on. Fields and classes that are not known are passed over, since Megatron and others derive their own.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.core.report import CheckpointSummary, Shape
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.formats.regular import regular
from ckpt_sentry.formats.torch_save import unpickle

if TYPE_CHECKING:
    from typing import TypeGuard

FILE_NAME: Final = ".metadata"
"""`filesystem.py`: `_metadata_fn`. A rank that saved alone writes `__R.metadata` instead."""
SHARD_NAME: Final = re.compile(r"__([0-9]+)_[0-9]+\.distcp\Z")
RANK_METADATA_NAME: Final = re.compile(r"__([0-9]+)\.metadata\Z")
MAX_BYTES: Final = 256 * 2**20

_MAX_RANK: Final = 64
_MAX_PATH: Final = 65_536
_INT64: Final = range(-(2**63), 2**63)

_DTYPES: Final = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "qint8", "quint8", "qint32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)


class Chunk(NamedTuple):
    """
    A part of a tensor as one rank held it: where it begins in the tensor and how large it is, in elements.
    """

    offsets: Shape
    sizes: Shape


class Stored(NamedTuple):
    """
    Where an entry or a chunk lies: the file, relative to the checkpoint, and its place in it, in bytes.

    `transforms` names the stream extensions (compression, encryption) that it went through.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """
    What a checkpoint says of itself.

    `storage` is keyed by name and chunk offset (None: the entry is no tensor). `paths` maps a flattened key to its
    path in the nested state dict, where the planner recorded it. `unknown` names the classes met that are not DCP's.
    """

    entries: Mapping[str, Entry]
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    storage: Mapping[tuple[str, Shape | None], Stored] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    saved_path: str | None = None
    version: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """
        The files that hold the data, relative to the checkpoint, sorted by rank and number.
        """
        return tuple(sorted({stored.file for stored in self.storage.values()}, key=by_number))

    @property
    def saved_by(self) -> tuple[int, ...]:
        """
        The ranks that wrote something, by the names of their files.
        """
        found = (SHARD_NAME.search(name) for name in self.files)
        return tuple(sorted({int(match[1]) for match in found if match}))

    @property
    def bytes(self) -> int:
        return sum(stored.length for stored in self.storage.values())

    @property
    def elements(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries.values() if entry.shape is not None)

    def summary(self) -> CheckpointSummary:
        return CheckpointSummary(
            keys=len(self.entries),
            elements=self.elements,
            bytes=self.bytes,
            files=len(self.files),
            saved_path=self.saved_path,
            saved_by=len(self.saved_by) or None,
        )

    def not_stored(self) -> tuple[str, ...]:
        """
        The keys of which some part is in no file: a save that lost a writer thread leaves such metadata.
        """
        lost = []
        for key, entry in self.entries.items():
            wanted = (None,) if entry.shape is None else (chunk.offsets for chunk in self.chunks.get(key, ()))
            if any((key, offset) not in self.storage for offset in wanted):
                lost.append(key)
        return tuple(sorted(lost))


def by_number(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """
    A sort key under which `__10_0.distcp` comes after `__9_0.distcp`.
    """
    parts = re.split(r"([0-9]{1,18})", name)
    return [(0, int(part), "") if index % 2 else (1, 0, part) for index, part in enumerate(parts)], name


def read(path: str | os.PathLike[str], *, rank: int | None = None, max_bytes: int = MAX_BYTES) -> DcpMetadata:
    """
    Read the metadata of the checkpoint in the folder `path`: the global one, or the one that `rank` wrote for itself.

    :raises OSError: the file is not there or cannot be read.
    :raises UnreadablePickle: it is truncated, corrupt, too large or not DCP's.
    """
    name = FILE_NAME if rank is None else f"__{rank}{FILE_NAME}"
    with open(os.path.join(path, name), "rb", opener=regular) as file:
        return parse(file.read(max_bytes + 1), max_bytes=max_bytes)


def parse(data: bytes, *, max_bytes: int = MAX_BYTES) -> DcpMetadata:
    """
    Read metadata from the bytes of its file.

    :raises UnreadablePickle: the bytes are truncated, corrupt, too large or not DCP's.
    """
    loaded = unpickle.load(data, ALLOWED, max_bytes=max_bytes)
    try:
        return convert(loaded.value, unknown=loaded.unknown, charge=loaded.charge)
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, unpickle.UnreadablePickle):
            raise
        raise unpickle.UnreadablePickle("holds metadata of an unexpected form") from error


def _free(_elements: int) -> None:
    """
    Torch's own objects are there already: what it takes to walk through them is no question of trust.
    """


def convert(metadata: object, *, unknown: tuple[str, ...] = (), charge: Callable[[int], None] = _free) -> DcpMetadata:
    """
    Plain data from torch's own `Metadata` object, or from its unpickled stand-in.

    :param charge: accounts for elements that are walked through: keys may share what they refer to (`Machine.charge`).
    :raises UnreadablePickle: the object has no `state_dict_metadata`.
    """
    declared = _get(metadata, "state_dict_metadata")
    if not isinstance(declared, dict):
        kind = metadata.qualified if isinstance(metadata, unpickle.Opaque) else type(metadata).__name__
        raise unpickle.UnreadablePickle(f"holds a {kind}, not the metadata of torch.distributed.checkpoint")
    entries: dict[str, Entry] = {}
    chunks: dict[str, tuple[Chunk, ...]] = {}
    for key, value in declared.items():
        if not isinstance(key, str):
            continue
        size = _get(value, "size")
        entries[key] = Entry(None, None) if size is None else Entry(_shape(size), _dtype(_get(value, "properties")))
        if size is not None:
            found = _items(_get(value, "chunks"))
            charge(len(found) * (1 + len(entries[key].shape or ()) // 4))
            chunks[key] = tuple(Chunk(_shape(_get(chunk, "offsets")), _shape(_get(chunk, "sizes"))) for chunk in found)
    version = _get(metadata, "version")
    return DcpMetadata(
        entries=entries,
        chunks=chunks,
        storage=_storage(_get(metadata, "storage_data"), charge),
        paths=_paths(_get(metadata, "planner_data"), charge),
        saved_path=_saved_path(_get(metadata, "storage_meta")),
        version=version if isinstance(version, str) else None,
        unknown=unknown,
    )


def _get(value: object, name: str) -> object:
    if isinstance(value, unpickle.Opaque):
        return value.field(name)
    return getattr(value, name, None)


def _items(value: object) -> list[object] | tuple[object, ...]:
    return value if isinstance(value, list | tuple) else ()


def _shape(value: object) -> Shape:
    if not isinstance(value, list | tuple) or len(value) > _MAX_RANK:
        raise TypeError("a shape that is no sequence of a few sizes")
    shape = tuple(map(operator.index, value))
    if not all(size in _INT64 for size in shape):
        raise ValueError("a size beyond 64 bits")
    return shape


def _dtype(properties: object) -> str | None:
    # TensorProperties pickles as the tuple (dtype, layout, requires_grad, memory format, pin_memory).
    state = properties.state if isinstance(properties, unpickle.Opaque) else None
    dtype = state[0] if isinstance(state, tuple) and state else _get(properties, "dtype")
    return None if dtype is None else _word(dtype).removeprefix("torch.")


def _word(value: object) -> str:
    """
    A short value as text. What holds other values is named by its type alone: written out, it might have no end.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, unpickle.Opaque):
        return value.qualified
    if isinstance(value, list | tuple | dict) or (type(value) is int and value not in _INT64):
        return type(value).__name__
    return str(value)


def _storage(value: object, charge: Callable[[int], None]) -> dict[tuple[str, Shape | None], Stored]:
    found: dict[tuple[str, Shape | None], Stored] = {}
    for index, info in value.items() if isinstance(value, dict) else ():
        key, offset = _get(index, "fqn"), _get(index, "offset")
        file, start, length = (_get(info, name) for name in ("relative_path", "offset", "length"))
        if isinstance(key, str) and isinstance(file, str) and _is_place(start) and _is_place(length):
            described = _items(_get(info, "transform_descriptors"))
            charge(len(described))
            place = Stored(file, start, length, tuple(map(_word, described)))
            found[key, None if offset is None else _shape(offset)] = place
    return found


def _is_place(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value in _INT64


def _paths(value: object, charge: Callable[[int], None]) -> dict[str, tuple[str | int, ...]] | None:
    if not isinstance(value, dict):
        return None
    found: dict[str, tuple[str | int, ...]] = {}
    for key, path in value.items():
        if isinstance(key, str) and isinstance(path, list | tuple):
            charge(len(path))
            found[key] = tuple(part if isinstance(part, int) and part in _INT64 else _word(part) for part in path)
    return found


def _saved_path(storage_meta: object) -> str | None:
    saved = _get(storage_meta, "checkpoint_id")
    return os.fspath(saved) if isinstance(saved, str | os.PathLike) else None


def _size(sizes: object = ()) -> Shape:
    return _shape(sizes)


def _path(*parts: object) -> str:
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts) or sum(map(len, texts)) > _MAX_PATH:
        raise unpickle.CostlyPickle("holds a path that is none")
    return str(PurePosixPath(*texts))


def _layout(name: object = "") -> str:
    return _word(name)


_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS: Final = (
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *((f"{_DCP}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((_SHARDED, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
)
_PATH_MODULES = ("pathlib", "pathlib._local")
ALLOWED: Final[unpickle.Allowed] = {
    **{name: unpickle.record(*name) for name in _RECORDS},
    **{("torch", name): name for name in _DTYPES},
    **{(module, name): _path for module in _PATH_MODULES for name in ("PosixPath", "WindowsPath", "PurePosixPath")},
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): unpickle.mapping,
}
