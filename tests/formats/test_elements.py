from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.formats import elements
from ckpt_sentry.formats.elements import Sampler, Slot, sample_indices


@given(st.integers(0, 10**15), st.integers(0, 200))
def test_indices_are_distinct_ascending_and_reach_both_ends(numel: int, count: int) -> None:
    found = sample_indices(numel, count)

    assert len(found) == min(numel, count)
    assert list(found) == sorted(set(found))
    assert all(0 <= index < numel for index in found)
    if found and count > 1:
        assert (found[0], found[-1]) == (0, numel - 1)


def test_indices_of_a_square_matrix_do_not_stay_in_one_column() -> None:
    assert len({index % 4096 for index in sample_indices(4096 * 4096)}) == 64


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float8_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    size, decode = elements.DECODERS[str(dtype).removeprefix("torch.")]
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).double().tolist()

    assert size == 1
    for byte, value in enumerate(expected):
        found = decode(bytes([byte]))
        assert found == value or (math.isnan(found) and math.isnan(value))


@given(st.integers(0, 2**16 - 1))
def test_every_bfloat16_is_decoded_as_torch_does(bits: int) -> None:
    raw = struct.pack("<H", bits)
    value = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).double().item()
    found = elements.DECODERS["bfloat16"][1](raw)

    assert found == value or (math.isnan(found) and math.isnan(value))


def test_a_file_that_ends_early_is_an_end_of_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\0" * 10)

    with Sampler() as sampler, pytest.raises(EOFError):
        sampler.sample(Slot(str(tmp_path / "x"), "float32", (4,), 0))


def test_what_cannot_be_sampled_is_said(tmp_path: Path) -> None:
    slot = Slot(str(tmp_path / "x"), "qint8", (4,), 0)

    assert not elements.can_sample(slot)
    with pytest.raises(ValueError, match="qint8"):
        elements.sample(slot)


def test_a_sampler_opens_a_file_once_and_closes_it(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    slot = Slot(str(tmp_path / "x"), "float32", (2, 2), 0, strides=(1, 2))
    before = len(os.listdir("/proc/self/fd"))

    with Sampler() as sampler:
        assert sampler.sample(slot) == ((0, 1, 2, 3), (1.0, 3.0, 2.0, 4.0))
        assert sampler.sample(slot, 2) == ((0, 3), (1.0, 4.0))
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="no regular file"):
        elements.open_regular(str(tmp_path / "pipe"))
