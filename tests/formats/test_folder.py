from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import load_checkpoint_in_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from ckpt_sentry.formats import elements, folder
from ckpt_sentry.formats.folder import Choice


def state(value: float) -> dict[str, torch.Tensor]:
    return {"0.weight": torch.full((3, 2), value), "0.bias": torch.full((3,), value), "1.bias": torch.full((4,), value)}


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3), nn.Linear(3, 4))


def safe(path: Path, tensors: dict[str, torch.Tensor], metadata: Any = (("format", "pt"),)) -> Path:
    save_file(tensors, path, metadata=None if metadata is None else dict(metadata))
    return path


def sharded(where: Path, **shards: dict[str, torch.Tensor]) -> Path:
    for name, tensors in shards.items():
        safe(where / f"{name}.safetensors", tensors)
    path = where / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {k: f"{n}.safetensors" for n, held in shards.items() for k in held}}))
    return path


def codes(choice: Choice) -> list[str]:
    return [f"{found.code} {found.level}" for found in choice.findings]


def bin_beside_safetensors(where: Path) -> None:
    torch.save(state(1), where / "pytorch_model.bin")
    safe(where / "model.safetensors", state(2))


def single_beside_index(where: Path) -> None:
    safe(where / "model.safetensors", state(3))
    sharded(where, a=state(4))


def bin_beside_index(where: Path) -> None:
    torch.save(state(5), where / "pytorch_model.bin")
    sharded(where, a=state(6))


def only_index(where: Path) -> None:
    sharded(where, b=state(7), a={"0.bias": torch.full((3,), 8.0)})


def two_indexes(where: Path) -> None:
    sharded(where, a=state(1))
    (where / "other.index.json").write_text("{}")


def other_names(where: Path) -> None:
    safe(where / "weights.safetensors", state(1))


def no_format(where: Path) -> None:
    safe(where / "model.safetensors", state(1), {"who": "me"})


def other_format(where: Path) -> None:
    safe(where / "model.safetensors", state(1), {"format": "mlx"})


def without_metadata(where: Path) -> None:
    safe(where / "model.safetensors", state(9), None)


def whole_module(where: Path) -> None:
    torch.save(Model(), where / "pytorch_model.bin")


def missing_shard(where: Path) -> None:
    sharded(where, a=state(1), b={"x": torch.ones(1)})
    (where / "b.safetensors").unlink()


def empty_index(where: Path) -> None:
    (where / "model.safetensors.index.json").write_text("{}")


def bad_index(where: Path) -> None:
    (where / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1}}')


def empty_folder(_: Path) -> None:
    pass


def nested(where: Path) -> None:
    torch.save({"state_dict": state(1)}, where / "pytorch_model.bin")


FOLDERS = {
    bin_beside_safetensors: ["wrong_file_preferred warning"],
    single_beside_index: ["wrong_file_preferred warning"],
    bin_beside_index: ["wrong_file_preferred warning"],
    only_index: ["duplicate_keys warning"],
    two_indexes: ["several_indexes error"],
    other_names: ["no_checkpoint_files error"],
    no_format: ["metadata_format error"],
    other_format: ["metadata_format error"],
    without_metadata: [],
    whole_module: ["no_state_dict error", "unsafe_globals warning"],
    missing_shard: ["shard_missing error"],
    empty_index: [],
    bad_index: ["index_invalid error"],
    empty_folder: ["no_checkpoint_files error"],
    nested: ["nested_state_dict error"],
}


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_the_choice_is_accelerates_own(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    model = Model()
    before = {key: value.clone() for key, value in model.state_dict().items()}

    choice = folder.choose(tmp_path)

    assert codes(choice) == FOLDERS[make]
    try:
        load_checkpoint_in_model(model, str(tmp_path), device_map={"": "cpu"})
    except Exception:
        assert not choice.loadable
        return
    assert choice.loadable
    after = model.state_dict()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == before.keys() & choice.slots.keys()
    for key in changed:
        indices, values = elements.sample(choice.slots[key])
        assert list(values) == after[key].flatten()[list(indices)].tolist()


def test_a_good_folder(tmp_path: Path) -> None:
    sharded(tmp_path, b={"0.weight": torch.ones(3, 2)}, a={"0.bias": torch.ones(3)})

    choice = folder.choose(tmp_path)

    assert (choice.kind, choice.loadable, choice.format, choice.findings) == ("index", True, "safetensors", ())
    assert choice.files == (str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"))
    assert choice.index == str(tmp_path / "model.safetensors.index.json")
    assert choice.sources == {
        "0.bias": str(tmp_path / "a.safetensors"),
        "0.weight": str(tmp_path / "b.safetensors"),
    }
    assert choice.bytes == sum(os.path.getsize(file) for file in choice.files)
    assert folder.choose(tmp_path / "model.safetensors.index.json").inventory == choice.inventory


def test_the_same_content_twice_is_only_information(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    torch.save({**state(1), "x": tied, "y": tied}, tmp_path / "pytorch_model.bin")
    safe(tmp_path / "model.safetensors", {**state(1), "x": tied})

    choice = folder.choose(tmp_path)

    assert codes(choice) == ["wrong_file_preferred info"]
    assert "both hold the same" in choice.findings[0].text
    assert choice.inventory.ties == {"y": "x"}


def test_a_newer_file_that_is_ignored_is_called_newer(tmp_path: Path) -> None:
    bin_beside_safetensors(tmp_path)
    os.utime(tmp_path / "pytorch_model.bin", (1, 1))

    (found,) = folder.choose(tmp_path).findings

    assert found.text == (
        "accelerate reads pytorch_model.bin and ignores the newer model.safetensors beside it; their contents differ"
    )
    assert str(tmp_path / "model.safetensors") in str(found.next)


def test_a_broken_file_beside_a_good_one(tmp_path: Path) -> None:
    bin_beside_safetensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert codes(folder.choose(tmp_path)) == ["wrong_file_preferred info"]

    bin_beside_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    choice = folder.choose(tmp_path)
    assert codes(choice) == ["lfs_pointer error", "wrong_file_preferred warning"]
    assert not choice.loadable


def test_a_wrapped_state_dict(tmp_path: Path) -> None:
    torch.save({"model": state(2), "epoch": 1}, tmp_path / "pytorch_model.bin")

    choice = folder.choose(tmp_path / "pytorch_model.bin")

    assert choice.nested_under == "model"
    assert choice.nested is not None
    assert set(choice.nested.entries) == set(state(2))
    assert set(choice.inventory.entries) == {"model", "epoch"}
    assert choice.findings[0].text == (
        "the state dict (3 keys) is one level down in pytorch_model.bin, under 'model', beside epoch"
    )
    assert elements.sample(choice.nested_slots["1.bias"]).values == (2.0,) * 4


def test_dcp_where_a_file_is_wanted(tmp_path: Path) -> None:
    dcp.save({"model": state(1)}, checkpoint_id=tmp_path / "outer" / "pytorch_model_fsdp_0", no_dist=True)

    assert codes(folder.choose(tmp_path / "outer" / "pytorch_model_fsdp_0")) == ["dcp_checkpoint error"]
    assert codes(folder.choose(tmp_path / "outer" / "pytorch_model_fsdp_0" / "__0_0.distcp")) == [
        "dcp_checkpoint error"
    ]
    (found,) = folder.choose(tmp_path / "outer").findings
    assert found.code == "no_checkpoint_files"
    assert "pytorch_model_fsdp_0 is a distributed checkpoint (DCP)" in found.text


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pytorch_model.bin")

    assert codes(folder.choose(tmp_path / "nope")) == ["path_missing error"]
    assert codes(folder.choose("a\0b")) == ["file_unreadable error"]
    assert codes(folder.choose(tmp_path / "pipe")) == ["unknown_format error"]
    assert codes(folder.choose(tmp_path)) == ["unknown_format error"]


def test_config_json_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')

    choice = folder.choose(tmp_path / "config.json")

    assert codes(choice) == ["index_invalid error"]
    assert choice.findings[0].text == "config.json is no index: it does not map keys to files"


def test_no_tensor_byte_is_read_of_a_large_checkpoint(tmp_path: Path) -> None:
    weight_map = {}
    for number in range(16):
        info = {
            f"layers.{number}.{key}.weight": {
                "dtype": "BF16",
                "shape": [4096, 512],
                "data_offsets": [k << 22, k + 1 << 22],
            }
            for k, key in enumerate("abcdefghijklmnopqrstuvwxyzABCDEF")
        }
        header = json.dumps(info).encode()
        with (tmp_path / f"s{number}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (32 << 22))
        weight_map.update(dict.fromkeys(info, f"s{number}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened = os.open("/proc/self/io", os.O_RDONLY)

    def bytes_read() -> int:
        return int(os.pread(opened, 4096, 0).split()[1])

    before = bytes_read()
    choice = folder.choose(tmp_path)
    spent = bytes_read() - before
    os.close(opened)

    assert choice.loadable
    assert choice.inventory.nbytes == 2 << 30
    assert spent < 1 << 20


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"]),
    st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b'{"weight_map": {"a": "', b"{", b"\x02" + b"\0" * 7 + b"{}"]),
    st.binary(max_size=200),
)
def test_any_bytes_are_a_choice(tmp_path_factory: Any, name: str, start: bytes, data: bytes) -> None:
    where = tmp_path_factory.mktemp("any")
    (where / name).write_bytes(start + data)

    choice = folder.choose(where)

    assert choice.loadable or any(found.level == "error" for found in choice.findings)
    (where / name).unlink()


def test_torch_is_not_imported() -> None:
    import subprocess

    code = "import sys, ckpt_sentry.formats.folder; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
