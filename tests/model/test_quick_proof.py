"""
The quick comparison takes what it can compare bit for bit, and leaves everything else to the thorough one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpt_sentry.formats import safetensors
from ckpt_sentry.formats.elements import Sampler
from ckpt_sentry.model import quick_proof

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]


def compare(file: Path, held: Mapping[str, torch.Tensor], count: int = 16) -> Mapping[str, bool]:
    slots = safetensors.read(file).slots
    with Sampler() as sampler:
        return quick_proof.equal(((name, value, slots[name]) for name, value in held.items()), sampler, count)


@pytest.mark.parametrize("count", [16, 64])
def test_what_is_equal_is_shown_by_values_that_vary(tmp_path: Path, count: int) -> None:
    values = {f"{dtype}.{size}": torch.arange(size).to(dtype) for dtype in DTYPES for size in (1, 7, 16, 17, 64, 5000)}
    values |= {"mask": torch.tensor([True, False]), "ones": torch.ones(300), "scalar": torch.tensor(3.0)}
    save_file(values, tmp_path / "x.safetensors")
    held = {name: torch.nn.Parameter(value) if value.is_floating_point() else value for name, value in values.items()}
    assert compare(tmp_path / "x.safetensors", held, count) == {name: name != "ones" for name in values}


@given(
    size=st.integers(1, 3000),
    wrong=st.sets(st.integers(0, 11)),
    place=st.sampled_from([0, -1]),
    count=st.sampled_from([16, 64]),
)
def test_those_that_differ_are_left_out_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, size: int, wrong: set[int], place: int, count: int
) -> None:
    file = tmp_path_factory.mktemp("saved") / "x.safetensors"
    values = {f"{nth}": torch.randn(size) for nth in range(12)}
    save_file(values, file)
    for nth in wrong:
        values[f"{nth}"][place] += 1
    assert compare(file, values, count).keys() == {f"{nth}" for nth in range(12) if nth not in wrong}


def test_what_does_not_lie_in_memory_as_in_the_file_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    value = torch.arange(12.0).reshape(3, 4)
    save_file({name: value.clone() for name in "abcdef"}, file)
    held = {
        "a": value.to("meta"),
        "b": value.double(),
        "c": value.T.contiguous().T,
        "d": value.reshape(4, 3),
        "e": value.to_sparse(),
        "f": value,
    }
    assert compare(file, held) == {"f": True}


def test_what_holds_a_nan_is_left_out(tmp_path: Path) -> None:
    values = {"nan": torch.tensor([1.0, float("nan")]), "well": torch.tensor([1.0, 2.0])}
    save_file(values, tmp_path / "x.safetensors")
    assert compare(tmp_path / "x.safetensors", values) == {"well": True}


def test_a_file_that_was_cut_since_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    values = {"a": torch.randn(500), "z": torch.randn(500)}
    save_file(values, file)
    slots = safetensors.read(file).slots
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 4)
    with Sampler() as sampler:
        claims = ((name, value, slots[name]) for name, value in values.items())
        assert quick_proof.equal(claims, sampler, 16) == {"a": True}


def test_nothing_is_nothing() -> None:
    with Sampler() as sampler:
        assert quick_proof.equal((), sampler, 16) == {}
