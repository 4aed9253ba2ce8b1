from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from ckpt_sentry.formats import state_file


def test_the_format_goes_by_the_extension(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    torch.save(tensors, tmp_path / "x.bin")

    for name, form in (("x.safetensors", "safetensors"), ("x.bin", "torch_save")):
        found = state_file.read(tmp_path / name)
        assert (found.format, found.readable, found.findings) == (form, True, ())
        assert found.inventory.entries == {"a": ((2,), "float32")}
        assert found.bytes == (tmp_path / name).stat().st_size


def test_what_the_file_is_goes_before_what_its_reader_says(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")

    (found,) = state_file.read(tmp_path / "x.safetensors").findings

    assert (found.code, found.text) == ("wrong_extension", "x.safetensors is a torch.save file")


def test_classes_that_torch_refuses_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "args": argparse.Namespace(x=1)}, tmp_path / "x.bin")

    found = state_file.read(tmp_path / "x.bin")

    assert found.readable
    assert [(item.code, item.level, item.text) for item in found.findings] == [
        (
            "unsafe_globals",
            "warning",
            "x.bin holds more than tensors (argparse.Namespace): torch.load refuses it unless told to trust these",
        )
    ]


def test_a_state_dict_that_is_known_to_lie_below_a_key(tmp_path: Path) -> None:
    path = tmp_path / "box.pt"
    torch.save({"weights": {"a": torch.ones(2)}, "model": {"b": torch.ones(3), "c": torch.ones(3)}, "n": 1}, path)
    found = state_file.read(path, under="weights")
    assert (found.readable, found.findings, found.nested) == (True, (), None)
    assert {key: entry.shape for key, entry in found.inventory.entries.items()} == {"a": (2,)}
    for under in ("n", "gone", "weights.a"):
        absent = state_file.read(path, under=under)
        assert (absent.readable, [one.code for one in absent.findings]) == (False, ["no_state_dict"])
