"""
The header of a safetensors file, read and checked as the library does, without the library.

The format (huggingface/safetensors, README): eight bytes, little-endian: the length N of the header; N bytes of JSON,
`{"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {…}}`; then the tensors, without holes,
offsets counted from the end of the header.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.formats import elements
from ckpt_sentry.formats.elements import Sample, Slot, sample_indices
from ckpt_sentry.formats.errors import HeaderError

__all__ = ["MAX_HEADER", "Header", "HeaderError", "bounds", "read", "sample", "sample_indices"]

MAX_HEADER: Final = 100_000_000
"""Bytes of header that the library accepts at most (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""

MAX_PARSED: Final = 32 * 2**20
"""Bytes of header that are read here at most: some 300,000 tensors."""

_AGAIN: Final = "copy or download it again"
_MAX_RANK: Final = 64
_FIELDS: Final = ("dtype", "shape", "data_offsets")
_FIELD_SET: Final = frozenset(_FIELDS)
_MAX_BYTES: Final = 1 << 64

DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "BOOL": ("bool", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "F64": ("float64", 64),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
}
"""torch's name and the bits of one element, by the header's name."""


@dataclass(frozen=True, slots=True)
class Header:
    """
    What a safetensors file says about itself. `metadata` is None where it has no `__metadata__`;
    `duplicates` are names that the JSON holds twice (the last one counts).
    """

    inventory: Inventory
    metadata: Mapping[str, str] | None
    slots: Mapping[str, Slot]
    duplicates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bounds:
    """
    The first eight bytes against the size of the file, both in bytes.
    """

    header: int
    size: int

    @property
    def complete(self) -> bool:
        return 8 + self.header <= self.size


def bounds(head: bytes, size: int) -> Bounds | None:
    """
    Read the length from the first bytes of a file (≥ 16 where there are as many); None if this is not safetensors.

    A header longer than the library accepts still is one; a length of more than ten times that is chance.
    """
    if len(head) <= 8:  # noqa: PLR2004 the length field
        return None
    length = struct.unpack("<Q", head[:8])[0]
    if not len(b"{}") <= length <= 10 * MAX_HEADER or not head[8:].lstrip(b" \t\r\n").startswith(b"{"):
        return None
    return Bounds(length, size)


def read(path: str | os.PathLike[str]) -> Header:
    """
    Read the header of a safetensors file; no byte of a tensor is read.

    :raises OSError: the file cannot be read.
    :raises HeaderError: `truncated_file`, `header_too_large` or `header_invalid`: the library would refuse it;
        `not_compared`: the library may take it, but a header of more than `MAX_PARSED` bytes is too much here.
    """
    path = os.fspath(path)
    name = shown(os.path.basename(path))
    with elements.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
        limits = bounds(head, size)
        if limits is None:
            _invalid(name, "does not begin with a header length and JSON")
        if limits.header > MAX_HEADER:
            raise HeaderError(
                "header_too_large",
                f"{name} is a safetensors file, but its header has {limits.header:,} bytes: the library reads at most "
                f"{MAX_HEADER:,}",
                "save it in several files, or with fewer and larger tensors",
            )
        if not limits.complete:
            raise HeaderError("truncated_file", f"{name} ends inside its header ({size:,} bytes)", _AGAIN)
        if limits.header > MAX_PARSED:
            text = f"{name} could not be compared: its header has {limits.header:,} bytes"
            raise HeaderError("not_compared", text, level="info")
        raw = head[8:][: limits.header]
        raw += file.read(limits.header - len(raw))
    return _parse(raw, path, name, size)


class _Info(NamedTuple):
    """
    What the header says of one tensor; its place in bytes, counted from the end of the header.
    """

    begin: Any
    end: Any
    dtype: Any
    shape: Any


def _parse(raw: bytes, path: str, name: str, size: int) -> Header:
    start = 8 + len(raw)
    document, duplicates = _json(raw, name)
    del raw
    metadata = document.pop("__metadata__", None)
    if "__metadata__" in duplicates or not (metadata is None or _is_text_map(metadata)):
        _invalid(name, "has bad metadata")
    for key, info in document.items():
        document[key] = _tensor(key, info, name)
    # What is wrong with so many as a header can name is said before anything is built of them.
    _check_offsets(document, name, size - start)
    slots = {key: Slot(path, info.dtype, info.shape, start + info.begin) for key, info in document.items()}
    entries = {key: Entry(slot.shape, slot.dtype) for key, slot in slots.items()}
    return Header(Inventory(entries, {}), metadata, slots, duplicates)


def _json(raw: bytes, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """
    The header's object, with an `_Info` for whatever describes a tensor, and the names that it has twice.

    One pass: a header may have 100 MB, and dictionaries for all that stands in it would take a multiple of that.
    """
    twice: list[tuple[str, ...]] = []

    def build(pairs: list[tuple[str, Any]]) -> object:
        if len(pairs) == len(_FIELDS):
            (first, dtype), (second, shape), (third, span) = pairs
            if first == "dtype" and second == "shape" and third == "data_offsets":
                return _info(dtype, shape, span)
        found = dict(pairs)
        twice.append(_repeated(pairs) if len(found) < len(pairs) else ())
        return _info(*map(found.get, _FIELDS)) if found.keys() >= _FIELD_SET else found

    document: Any = None
    valid = False
    # Nothing is raised from what the parser raises: that holds the whole text.
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(raw.decode(), object_pairs_hook=build, parse_constant=_no_constant)
        if isinstance(document, dict):
            "".join(document).encode()
        valid = True
    if not valid:
        _invalid(name, "is not valid JSON")
    if not isinstance(document, dict):
        _invalid(name, "is no object")
    # The outermost object is the last to be built: the one of the tensor names.
    *inner, names = twice
    if not _FIELD_SET.isdisjoint(key for keys in inner for key in keys):
        _invalid(name, "describes a tensor by a field that is there twice")
    return document, names


def _info(dtype: object, shape: object, span: object) -> _Info:
    begin, end = span if isinstance(span, list) and len(span) == 2 else (None, None)  # noqa: PLR2004
    return _Info(begin, end, dtype, tuple(shape) if isinstance(shape, list) else None)


def _repeated(pairs: list[tuple[str, Any]]) -> tuple[str, ...]:
    return tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_BYTES


def _tensor(key: str, info: object, name: str) -> _Info:
    if not isinstance(info, _Info):
        _invalid(name, f"describes {shown(key)} by no object with {', '.join(_FIELDS)}")
    begin, end, dtype, shape = info
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _invalid(name, f"gives {shown(key)} an unknown type")
    if not isinstance(shape, tuple) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        _invalid(name, f"gives {shown(key)} a bad shape")
    if not (_is_size(begin) and _is_size(end)):
        _invalid(name, f"gives {shown(key)} bad offsets")
    torch_name, bits = DTYPES[dtype]
    if elements.element_count(shape) * bits != (end - begin) * 8:
        _invalid(name, f"gives {shown(key)} offsets that do not fit its shape")
    if dtype == "F4" and shape:
        # torch packs two elements into one byte and counts the pairs.
        shape = (*shape[:-1], shape[-1] // 2)
    return _Info(begin, end, torch_name, shape)


def _check_offsets(infos: Mapping[str, _Info], name: str, available: int) -> None:
    cursor = cut = 0
    for key in sorted(infos, key=lambda key: infos[key][:2]):
        begin, end, *_ = infos[key]
        if begin != cursor:
            _invalid(name, f"has tensors that overlap or leave a hole at {shown(key)}")
        cursor = end
        cut += end > available
    if cursor > available:
        text = (
            f"{name} has {max(available, 0):,} of {cursor:,} bytes of tensors: {cut:,} of {len(infos):,} tensors "
            "are cut"
        )
        raise HeaderError("truncated_file", text, _AGAIN)
    if cursor < available:
        _invalid(name, f"leaves {available - cursor:,} bytes at the end of the file to no tensor")


def _invalid(name: str, why: str) -> NoReturn:
    raise HeaderError("header_invalid", f"the safetensors header of {name} {why}", _AGAIN)


def sample(path: str | os.PathLike[str], key: str, count: int = elements.SAMPLE_COUNT) -> Sample:
    """
    Read at most `count` values of one tensor (see `elements.Sampler.sample`).

    :raises KeyError: the file has no such tensor. Else as `read` and `elements.Sampler.sample`.
    """
    return elements.sample(read(path).slots[key], count)
