"""
What a `torch.save` file holds, from its pickle alone and without running it.

The zip format (torch ≥ 1.6) keeps the pickle in the record `*/data.pkl` and each storage in `*/data/KEY`, uncompressed;
the older one is five pickles (magic number, protocol, system, object, storage keys), then the storages
(torch/serialization.py, `_save` and `_legacy_load`). Globals get stand-ins here: those that `torch.load` itself allows
(torch/_weights_only_unpickler.py, `_get_allowed_globals`) build plain data, any other is named, never run.
"""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Mapping
from typing import Final, NamedTuple

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Shape
from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.formats import elements
from ckpt_sentry.formats.elements import Sample, Slot
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.formats.regular import regular
from ckpt_sentry.formats.torch_save import unpickle
from ckpt_sentry.formats.torch_save.torch_globals import ALLOWED, Storage, Tensor
from ckpt_sentry.formats.torch_save.unpickle import CostlyPickle, Opaque, UnreadablePickle
from ckpt_sentry.patching.guard import let_through

MAX_DIRECTORY: Final = 16 * 2**20
"""Bytes of a zip file's directory that are read at most (some 150,000 records)."""

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_FIRST_READS: Final = (2**20, 2**24, unpickle.MAX_BYTES)
_AGAIN: Final = "copy or download it again"

_USUAL_NAMES: Final = (
    "state_dict",
    "model",
    "module",
    "model_state_dict",
    "model_state",
    "params",
    "params_ema",
    "ema",
    "ema_state_dict",
    "model_ema",
    "net",
    "network",
    "weights",
)
"""Keys under which training scripts keep a model's state, the likeliest first."""

_MAX_DEPTH: Final = 3
_MAX_DICTS: Final = 10_000
_NAME_PART: Final = 300
"""Characters of a key in which a word is looked for."""
_MOST_INFLATED: Final = 64
"""How many times larger than in the file a compressed pickle may be; beyond lies no checkpoint."""


@dataclass(frozen=True, slots=True)
class PickleFacts:
    """
    What a `torch.save` file holds. `inventory` and `slots` are its top level, as `torch.load` returns it.

    Where that is a wrapping around a state dict, `nested_under` is its key ("a.b" for a deeper one), and `nested` and
    `nested_slots` are the state dict. `opaque` are the globals that `torch.load` does not allow by default. `holds` is
    the type of the top level: "dict", or the class of a module that was saved whole.
    """

    holds: str
    inventory: Inventory = field(default_factory=Inventory)
    slots: Mapping[str, Slot] = field(default_factory=dict)
    nested_under: str | None = None
    nested: Inventory | None = None
    nested_slots: Mapping[str, Slot] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()


class _Extent(NamedTuple):
    """
    Where a storage's bytes lie in the file: see `Slot`. `nbytes` is their number.
    """

    offset: int
    nbytes: int
    record: int | None = None


class _Raw(NamedTuple):
    """
    The object of a file, the globals that were not allowed, and where each storage lies.
    """

    value: object
    opaque: tuple[str, ...]
    extents: Mapping[str, _Extent]


def read(path: str | os.PathLike[str], under: str | None = None) -> PickleFacts:
    """
    Read what a `torch.save` file holds; no byte of a tensor is looked at, nothing in the file is run.

    `under` is where the state dict lies, where that is known: "weights", or "a.b" one level further down. It then
    stands for the file.

    :raises OSError: the file cannot be read.
    :raises HeaderError: `truncated_file` or `pickle_invalid`: no loader can read it; `no_state_dict`: there is none
        `under` that name; `not_compared`: a loader may read it, but here it would cost too much.
    """
    path = os.fspath(path)
    with elements.open_regular(path) as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    try:
        raw = _read_zip(path) if is_zip else _read_legacy(path)
    except CostlyPickle as error:
        text = f"{_name(path)} could not be compared: its pickle {error.reason}"
        raise HeaderError("not_compared", text, level="info") from None
    except UnreadablePickle as error:
        text = f"the pickle in {_name(path)} {error.reason}"
        raise HeaderError("pickle_invalid", text, _AGAIN) from None
    return _facts(path, raw) if under is None else _facts_under(path, raw, under)


def sample(path: str | os.PathLike[str], key: str, count: int = elements.SAMPLE_COUNT) -> Sample:
    """
    Read at most `count` values of one tensor of the state dict, nested or not.

    :raises KeyError: the file has no such tensor. Else as `read` and `elements.Sampler.sample`.
    """
    facts = read(path)
    return elements.sample((facts.nested_slots or facts.slots)[key], count)


def _name(path: str) -> str:
    return shown(os.path.basename(path))


def _read_zip(path: str) -> _Raw:
    try:
        _check_directory(path)
        with open(path, "rb", opener=regular) as file, zipfile.ZipFile(file) as archive:
            return _read_archive(path, archive)
    except (UnreadablePickle, HeaderError):
        raise
    except Exception as error:
        let_through(error)
        if isinstance(error, OSError) and (error.errno != errno.EINVAL or error.filename is not None):
            raise
        # zipfile raises what its parsing happens to run into: BadZipFile, struct.error, NotImplementedError, and
        # OSError (EINVAL) where it looks for a place before the beginning of the file.
        raise HeaderError("pickle_invalid", f"the zip archive {_name(path)} is damaged", _AGAIN) from error


def _check_directory(path: str) -> None:
    with open(path, "rb", opener=regular) as file:
        # The private function that zipfile itself begins with: it finds the end record, zip64 or not.
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # noqa: SLF001
    if end is None:
        text = f"{_name(path)} is a torch.save file without its end, {os.path.getsize(path):,} bytes"
        raise HeaderError("truncated_file", text, _AGAIN)
    if end[5] > MAX_DIRECTORY:
        raise HeaderError("pickle_invalid", f"the zip directory of {_name(path)} is too large", None)


def _read_archive(path: str, archive: zipfile.ZipFile) -> _Raw:
    infos = archive.infolist()
    pickled = next((info for info in infos if info.filename.partition("/")[2] == "data.pkl"), None)
    if pickled is None:
        raise HeaderError("pickle_invalid", f"{_name(path)} is a zip archive without data.pkl: torch did not write it")
    if pickled.file_size > unpickle.MAX_BYTES:
        raise CostlyPickle(f"is larger than {unpickle.MAX_BYTES} bytes")
    if pickled.file_size > 2**20 + pickled.compress_size * _MOST_INFLATED:
        raise CostlyPickle("is compressed beyond what a checkpoint allows")
    with archive.open(pickled) as stream:
        data = stream.read(unpickle.MAX_BYTES + 1)
    loaded = unpickle.load(data, ALLOWED, persistent=Storage.from_id)
    root = pickled.filename[: -len("data.pkl")]
    order = next((info for info in infos if info.filename == f"{root}byteorder"), None)
    little = order is None or (order.file_size <= 16 and archive.read(order) == b"little")  # noqa: PLR2004 a word
    prefix = f"{root}data/"
    extents = {
        info.filename[len(prefix) :]: _Extent(0, info.file_size, info.header_offset)
        for info in infos
        if info.filename.startswith(prefix) and info.compress_type == zipfile.ZIP_STORED and little
    }
    return _Raw(loaded.value, loaded.unknown, extents)


def _read_legacy(path: str) -> _Raw:
    size = os.path.getsize(path)
    for limit in _FIRST_READS:
        with open(path, "rb", opener=regular) as file:
            data = file.read(limit)
        try:
            return _parse_legacy(path, data, size)
        except UnreadablePickle as error:
            # Cut off by the limit, not damaged: read more.
            if error.position < len(data) or len(data) == size:
                if error.position >= size and data[:1] == b"\x80":
                    text = f"{_name(path)} is a torch.save file without its end, {size:,} bytes"
                    raise HeaderError("truncated_file", text, _AGAIN) from error
                raise
    raise CostlyPickle(f"is larger than {unpickle.MAX_BYTES} bytes")


def _parse_legacy(path: str, data: bytes, size: int) -> _Raw:
    magic = unpickle.load(data, ALLOWED)
    if magic.value != _MAGIC:
        raise UnreadablePickle("was not written by torch.save")
    protocol = unpickle.load(data, ALLOWED, start=magic.end)
    if protocol.value != _PROTOCOL:
        raise UnreadablePickle("is of an unknown torch.save protocol")
    system = unpickle.load(data, ALLOWED, start=protocol.end)
    storages: dict[str, Storage] = {}

    def remember(saved: object) -> object:
        storage = Storage.from_id(saved)
        if isinstance(storage, Storage):
            storages.setdefault(storage.key, storage)
        return storage

    loaded = unpickle.load(data, ALLOWED, persistent=remember, start=system.end)
    keys = unpickle.load(data, ALLOWED, start=loaded.end)
    if not isinstance(keys.value, list):
        raise UnreadablePickle("has no list of storages")
    little = not isinstance(system.value, dict) or system.value.get("little_endian") is not False
    extents, cursor = {}, keys.end
    for key in keys.value:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise UnreadablePickle("lists a storage that no tensor uses")
        extents[storage.key] = _Extent(cursor + 8, storage.nbytes)
        cursor += 8 + storage.nbytes
    if cursor > size:
        raise HeaderError("truncated_file", f"{_name(path)} has {size:,} of {cursor:,} bytes", _AGAIN)
    return _Raw(loaded.value, loaded.unknown, extents if little else {})


def _facts(path: str, raw: _Raw) -> PickleFacts:
    top = _as_dict(raw.value)
    if top is None:
        return PickleFacts(_type(raw.value), opaque=raw.opaque)
    inventory, slots = _state(path, top, raw.extents)
    under, inner = _find_nested(top)
    nested, nested_slots = _state(path, inner, raw.extents) if inner is not None else (None, {})
    others = tuple(sorted(key for key in inventory.entries if key != (under or "").split(".")[0])) if under else ()
    return PickleFacts("dict", inventory, slots, under, nested, nested_slots, others, raw.opaque)


def _facts_under(path: str, raw: _Raw, under: str) -> PickleFacts:
    inner = _as_dict(raw.value)
    for key in under.split("."):
        inner = None if inner is None else _as_dict(inner.get(key))
    if inner is None:
        raise HeaderError("no_state_dict", f"{_name(path)} holds no state dict under {shown(under)!r}")
    inventory, slots = _state(path, inner, raw.extents)
    return PickleFacts("dict", inventory, slots, opaque=raw.opaque)


def _as_dict(value: object) -> Mapping[object, object] | None:
    if isinstance(value, dict):
        return value
    return value.entries if isinstance(value, Opaque) else None


def _type(value: object) -> str:
    if isinstance(value, Opaque):
        return value.qualified
    return "tensor" if isinstance(value, Tensor) else type(value).__name__


def _key(key: object) -> str:
    return key if isinstance(key, str) else key.qualified if isinstance(key, Opaque) else str(key)


def _state(
    path: str, values: Mapping[object, object], extents: Mapping[str, _Extent]
) -> tuple[Inventory, dict[str, Slot]]:
    entries: dict[str, Entry] = {}
    slots: dict[str, Slot] = {}
    ties: dict[str, str] = {}
    owners: dict[tuple[str, int, Shape], str] = {}
    known: dict[int, tuple[Slot, str | None]] = {}
    for key, value in values.items():
        name = _key(key)
        if not isinstance(value, Tensor):
            entries[name] = Entry(None, _type(value))
            continue
        entries[name] = Entry(value.shape, value.dtype)
        if id(value) not in known:
            # A file may refer to one tensor by very many names.
            known[id(value)] = _slot(path, value, extents), _owner(value, name, owners)
        slots[name], owner = known[id(value)]
        if owner is not None and owner != name:
            ties[name] = owner
    return Inventory(entries, ties), slots


def _owner(tensor: Tensor, name: str, owners: dict[tuple[str, int, Shape], str]) -> str | None:
    """
    The first name of the same elements of a storage, this one where there was none; None for a tensor without any.
    """
    if tensor.storage is None or not elements.element_count(tensor.shape):
        return None
    return owners.setdefault((tensor.storage.key, tensor.offset, tensor.shape), name)


def _slot(path: str, tensor: Tensor, extents: Mapping[str, _Extent]) -> Slot:
    nowhere = Slot(path, tensor.dtype, tensor.shape, None)
    place = extents.get(tensor.storage.key) if tensor.storage is not None else None
    if place is None:
        return nowhere
    strides = tensor.strides
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    item = Entry((1,), tensor.dtype).nbytes
    if 0 not in tensor.shape and (last + 1) * item > place.nbytes:
        return nowhere
    offset = place.offset + tensor.offset * item
    shown_strides = None if strides == elements.contiguous_strides(tensor.shape) else strides
    return Slot(path, tensor.dtype, tensor.shape, offset, shown_strides, place.record)


def _find_nested(top: Mapping[object, object]) -> tuple[str | None, Mapping[object, object] | None]:
    """
    Find the state dict that a training script has wrapped: the nearest dict with tensors, the usual names first.

    Where the top level has tensors itself, only a usual name with more tensors than there counts.
    """
    own = _tensors(top)
    seen: set[int] = {id(top)}
    level: list[tuple[_Keys, Mapping[object, object]]] = [((), top)]
    for _ in range(1 if own else _MAX_DEPTH):
        level = [
            ((*path, key), inner)
            for path, values in level
            for key, value in values.items()
            if isinstance(key, str) and (inner := _as_dict(value)) is not None
            if key in _USUAL_NAMES or not (own or "optim" in key[:_NAME_PART].lower())
        ]
        # By identity, each once, under its likeliest name: a file may refer to one dict from very many extents.
        level.sort(key=lambda item: _rank(item[0]), reverse=True)
        unique = {id(inner): (path, inner) for path, inner in level if id(inner) not in seen}
        seen |= unique.keys()
        level = list(unique.values())[-_MAX_DICTS:]
        counted = [(_rank(path), -_tensors(inner), path, inner) for path, inner in level]
        found = [item for item in counted if -item[1] > own]
        if found:
            _, _, path, inner = min(found, key=lambda item: item[:3])
            return ".".join(path), inner
    return None, None


_Keys = tuple[str, ...]


def _tensors(values: Mapping[object, object]) -> int:
    return sum(isinstance(value, Tensor) for value in values.values())


def _rank(path: _Keys) -> int:
    return _USUAL_NAMES.index(path[-1]) if path[-1] in _USUAL_NAMES else len(_USUAL_NAMES)
