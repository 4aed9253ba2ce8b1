"""
Where single elements of a tensor lie in a file, and how their bytes become numbers.

A proof compares a few values of a model with the checkpoint's. So that both sides look at the same elements, the choice
of indices is a pure function (`sample_indices`), and reading costs a handful of `pread`s, whatever the tensor's size.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry.core.report import Shape
from ckpt_sentry.formats.regular import regular

if TYPE_CHECKING:
    from typing_extensions import Self

SAMPLE_COUNT: Final = 64
"""Elements that a proof looks at in each tensor."""

_LOCAL_HEADER: Final = struct.Struct("<26xHH")
_RUN: Final = 8
_GAP: Final = 512
"""Bytes between two elements up to which one read for both is cheaper than two."""


class Sample(NamedTuple):
    """
    Flat (row-major) indices into a tensor, ascending, and the values there.
    """

    indices: tuple[int, ...]
    values: tuple[float, ...]


class Slot(NamedTuple):
    """
    Where a tensor's elements lie: `offset` in bytes, `strides` in elements (None for a contiguous tensor).

    `offset` counts from the start of the file, or, where `record` is given, from the data of the uncompressed zip
    record whose local header lies at `record`. It is None where the elements cannot be reached in place: compressed,
    sparse, quantized, big-endian.
    """

    file: str
    dtype: str
    shape: Shape
    offset: int | None
    strides: tuple[int, ...] | None = None
    record: int | None = None


def open_regular(path: str) -> FileIO:
    """
    Open a file for reading, unbuffered; never a pipe or a device, which could block for ever.

    :raises OSError: it cannot be opened, or is no regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "no regular file", path)
    return open(path, "rb", buffering=0, opener=regular)


def element_count(shape: Shape) -> int:
    """
    Return the number of elements of a tensor of this shape.
    """
    return math.prod(shape)


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """
    Return the strides, in elements, of a row-major tensor of this shape.
    """
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def sample_indices(numel: int, count: int = SAMPLE_COUNT) -> tuple[int, ...]:
    """
    Return at most `count` distinct flat indices below `numel`, ascending, the first and the last among them.

    A large tensor is sampled in runs of 8 elements, so that a read brings in 8 of them. The runs are spread evenly over
    what is left beside the last run, not over `numel`: with sizes that are powers of two the latter would look at the
    same columns of a matrix again and again.
    """
    if count <= 0 or numel <= 0:
        return ()
    if numel <= count:
        return tuple(range(numel))
    if count == 1:
        return (0,)
    run = 1 if count % _RUN or count == _RUN else _RUN
    runs = count // run
    starts = (i * (numel - run) // (runs - 1) for i in range(runs))
    return tuple(start + i for start in starts for i in range(run))


def _unpack(code: str) -> Callable[[bytes], float]:
    return lambda raw: float(struct.unpack(code, raw)[0])


def _bfloat16(raw: bytes) -> float:
    return float(struct.unpack("<f", b"\0\0" + raw)[0])


def _float8_e5m2(raw: bytes) -> float:
    # The upper byte of a float16.
    return float(struct.unpack("<e", b"\0" + raw)[0])


def _float8_e4m3fn(raw: bytes) -> float:
    # One sign bit, four of exponent (bias 7), three of mantissa; no infinity, all ones is NaN (OCP 8-bit formats, 5.1).
    sign = -1.0 if raw[0] & 0x80 else 1.0
    exponent, mantissa = raw[0] >> 3 & 0xF, raw[0] & 0x7
    if exponent == 0xF and mantissa == 0x7:  # noqa: PLR2004 the format's own bit patterns
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


DECODERS: Final[Mapping[str, tuple[int, Callable[[bytes], float]]]] = {
    "float64": (8, _unpack("<d")),
    "float32": (4, _unpack("<f")),
    "float16": (2, _unpack("<e")),
    "bfloat16": (2, _bfloat16),
    "float8_e4m3fn": (1, _float8_e4m3fn),
    "float8_e5m2": (1, _float8_e5m2),
    "int64": (8, _unpack("<q")),
    "int32": (4, _unpack("<i")),
    "int16": (2, _unpack("<h")),
    "int8": (1, _unpack("<b")),
    "uint64": (8, _unpack("<Q")),
    "uint32": (4, _unpack("<I")),
    "uint16": (2, _unpack("<H")),
    "uint8": (1, _unpack("<B")),
    "bool": (1, lambda raw: float(raw != b"\0")),
}
"""Size in bytes and decoder (little-endian) of every dtype that can be sampled, by torch's name."""


def can_sample(slot: Slot) -> bool:
    """
    Say whether `Sampler.sample` can read from this slot.
    """
    return slot.offset is not None and slot.dtype in DECODERS


def is_flat(slot: Slot) -> bool:
    """
    Say whether the elements lie one after the other from the slot's offset on, counted from the start of the file.
    """
    contiguous = slot.strides is None or slot.strides == contiguous_strides(slot.shape)
    return contiguous and slot.record is None and slot.offset is not None


def _position(index: int, slot: Slot) -> int:
    if slot.strides is None:
        return index
    position = 0
    for size, stride in zip(reversed(slot.shape), reversed(slot.strides), strict=True):
        index, along = divmod(index, size)
        position += along * stride
    return position


class Sampler:
    """
    Reads samples from any number of files, and keeps each open until it is closed. A context manager; for one thread.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """
        Close all files.
        """
        while self._files:
            os.close(self._files.popitem()[1])

    def sample(self, slot: Slot, count: int = SAMPLE_COUNT) -> Sample:
        """
        Return the values at `sample_indices(numel, count)`.

        :raises ValueError: the slot cannot be sampled (see `can_sample`).
        :raises OSError: the file cannot be read.
        :raises EOFError: it ends before the element.
        """
        indices = sample_indices(element_count(slot.shape), count)
        if slot.offset is None or slot.dtype not in DECODERS:
            raise ValueError(f"elements of type {slot.dtype} cannot be read in place")
        size, decode = DECODERS[slot.dtype]
        places = [_position(index, slot) * size for index in indices]
        descriptor = self.open(slot.file)
        start = slot.offset + (0 if slot.record is None else _record_data(descriptor, slot.record))
        return Sample(indices, tuple(map(decode, _read(descriptor, start, places, size))))

    def open(self, file: str) -> int:
        """
        Return the descriptor of a file, which stays open until all are closed.

        :raises OSError: the file cannot be opened.
        """
        if file not in self._files:
            self._files[file] = regular(file, os.O_RDONLY)
        return self._files[file]


def _record_data(descriptor: int, record: int) -> int:
    # The local header's own lengths of name and extra field, which differ from the directory's (APPNOTE 4.3.7).
    header = os.pread(descriptor, _LOCAL_HEADER.size, record)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise EOFError("the zip record is not where the directory says")
    name_length, extra_length = _LOCAL_HEADER.unpack(header)
    return record + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def _read(descriptor: int, offset: int, places: Sequence[int], size: int) -> list[bytes]:
    found: dict[int, bytes] = {}
    for run in _runs(places):
        block = os.pread(descriptor, run[-1] + size - run[0], offset + run[0])
        found.update((place, block[place - run[0] : place - run[0] + size]) for place in run)
    chunks = [found[place] for place in places]
    if any(len(chunk) < size for chunk in chunks):
        raise EOFError("the file ends before the sampled element")
    return chunks


def _runs(places: Sequence[int]) -> list[list[int]]:
    # What lies close together is read at once.
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and place - runs[-1][-1] <= _GAP:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def sample(slot: Slot, count: int = SAMPLE_COUNT) -> Sample:
    """
    Read one sample, as `Sampler.sample` does.
    """
    with Sampler() as sampler:
        return sampler.sample(slot, count)
