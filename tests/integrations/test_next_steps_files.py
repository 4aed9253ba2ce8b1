"""
What a report of accelerate's loaders says to do next is done, to the letter, and the load becomes right.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import (
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.utils import set_module_tensor_to_device
from safetensors.torch import load_file, save_file
from torch import nn

from tests.agents import Agent, hooked
from tests.integrations.nets import Net, equal, values

pytestmark = pytest.mark.filterwarnings("ignore")

PT = {"format": "pt"}


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate.checkpointing"):
        yield


def advised(agent: Agent, path: Path | str, code: str, model: nn.Module | None = None, **options: Any) -> str:
    """
    The next step after a load that goes wrong, or not as it should.
    """
    with contextlib.suppress(Exception):
        load_checkpoint_in_model(Net() if model is None else model, str(path), **options)
    return step(agent, code)


def step(agent: Agent, code: str) -> str:
    (found,) = (one for one in agent.last().findings if one.code == code)
    assert found.next is not None
    return found.next


def loads(agent: Agent, path: Path | str, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """
    Load a file, and demand that it is loaded rightly.
    """
    model = Net() if model is None else model
    load_checkpoint_in_model(model, str(path), **options)
    assert agent.last().verdict == "ok"
    assert equal(model, values())
    return model


def named(text: str) -> Path:
    (path,) = re.findall(r"/[^ ,;?]*", text)
    return Path(path)


@pytest.mark.parametrize("extension", [".bin", ".pt"])
def test_a_file_of_safetensors_by_another_name(agent: Agent, tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"model{extension}"
    save_file(values(), path, metadata=PT)
    assert advised(agent, path, "wrong_extension") == "rename it to .safetensors"
    loads(agent, path.rename(path.with_suffix(".safetensors")))


def test_a_file_of_torch_save_by_another_name(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save(values(), path)
    assert advised(agent, path, "wrong_extension") == "rename it to .bin"
    loads(agent, path.rename(path.with_suffix(".bin")))


def test_a_distributed_checkpoint(agent: Agent, tmp_path: Path) -> None:
    dcp.save(values(), checkpoint_id=tmp_path / "d")
    said = advised(agent, tmp_path / "d", "dcp_checkpoint")
    (command,) = re.findall(r"^load it with torch\.distributed\.checkpoint\.load, or convert it: python (.*)$", said)
    line = command.replace("FOLDER", str(tmp_path / "d")).replace("FILE", str(tmp_path / "model.bin"))
    subprocess.run([sys.executable, *line.split()], check=True, capture_output=True)
    loads(agent, tmp_path / "model.bin")


def test_a_distributed_checkpoint_one_folder_down(agent: Agent, tmp_path: Path) -> None:
    dcp.save(values(), checkpoint_id=tmp_path / "d")
    said = advised(agent, tmp_path, "no_checkpoint_files")
    assert said == f"load {tmp_path}/d with torch.distributed.checkpoint.load"
    wanted = values(2)
    dcp.load(wanted, checkpoint_id=tmp_path / "d")
    assert all(torch.equal(wanted[key], value) for key, value in values().items())


def test_a_folder_with_a_file_of_another_name(agent: Agent, tmp_path: Path) -> None:
    save_file(values(), tmp_path / "weights.safetensors", metadata=PT)
    said = advised(agent, tmp_path, "no_checkpoint_files")
    assert said == f"pass the file itself: {tmp_path}/weights.safetensors"
    loads(agent, named(said))
    save_file({"state": torch.ones(1)}, tmp_path / "optimizer.safetensors", metadata=PT)
    assert advised(agent, tmp_path, "no_checkpoint_files") == "pass the file that is meant, not the folder"


def test_another_metadata(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(values(), path, metadata={"format": "np"})
    said = advised(agent, path, "metadata_format")
    (call,) = re.findall(r"^save it again with safetensors\.torch\.(.*)$", said)
    eval(call.replace("…", "load_file(path), path"), {"save_file": save_file, "load_file": load_file, "path": path})
    loads(agent, path)


def test_several_indexes(agent: Agent, tmp_path: Path) -> None:
    save_file(values(), tmp_path / "a.safetensors", metadata=PT)
    for name in ("one.index.json", "two.index.json"):
        (tmp_path / name).write_text(json.dumps({"weight_map": dict.fromkeys(values(), "a.safetensors")}))
    assert advised(agent, tmp_path, "several_indexes") == "pass the path of the one you want"
    loads(agent, tmp_path / "two.index.json")


def test_an_index_that_does_not_fit(agent: Agent, tmp_path: Path) -> None:
    save_file(values(), tmp_path / "a.safetensors", metadata=PT)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed.weight": "a.safetensors", "gone.weight": "a.safetensors"}}))
    found = [one for one in reports(agent, tmp_path) if one.code == "index_incomplete"]
    assert {one.next for one in found} == {"save the checkpoint again, or rebuild the index from the shards"}
    rebuilt = dict.fromkeys(load_file(tmp_path / "a.safetensors"), "a.safetensors")
    index.write_text(json.dumps({"weight_map": rebuilt}))
    loads(agent, tmp_path)
    assert not any(one.code == "index_incomplete" for one in agent.last().findings)


def reports(agent: Agent, path: Path) -> tuple[Any, ...]:
    with contextlib.suppress(Exception):
        load_checkpoint_in_model(Net(), str(path))
    return agent.last().findings


def test_an_index_with_a_key_in_two_shards(agent: Agent, tmp_path: Path) -> None:
    saved = values()
    save_file(saved, tmp_path / "a.safetensors", metadata=PT)
    save_file({"head.weight": values(2)["head.weight"]}, tmp_path / "b.safetensors", metadata=PT)
    shards = {key: "b.safetensors" if key == "head.weight" else "a.safetensors" for key in saved}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    found = [one for one in reports(agent, tmp_path) if one.code == "duplicate_keys"]
    assert {one.next for one in found} == {"save the checkpoint again, or rebuild the index from the shards"}
    index.write_text(json.dumps({"weight_map": dict.fromkeys(saved, "a.safetensors")}))
    loads(agent, tmp_path)


def test_a_shard_that_is_gone(agent: Agent, tmp_path: Path) -> None:
    index = {"weight_map": dict.fromkeys(values(), "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert advised(agent, tmp_path, "shard_missing") == "copy or download them again"
    save_file(values(), tmp_path / "a.safetensors", metadata=PT)
    loads(agent, tmp_path)


def test_the_file_that_is_not_read(agent: Agent, tmp_path: Path) -> None:
    torch.save(values(2), tmp_path / "pytorch_model.bin")
    save_file(values(), tmp_path / "model.safetensors", metadata=PT)
    said = advised(agent, tmp_path, "wrong_file_preferred")
    assert said == f"pass {tmp_path}/model.safetensors, or remove the file that is out of date"
    loads(agent, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").unlink()
    loads(agent, tmp_path)


def test_a_state_dict_one_level_down(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"epoch": 3, "model": values()}, path)
    said = advised(agent, path, "nested_state_dict")
    (where,) = re.findall(r"^pass torch\.load\(…\)(\['model'\]) on, or save that alone$", said)
    model = Net()
    model.load_state_dict(eval(f"torch.load(path){where}", {"torch": torch, "path": path}))
    assert equal(model, values())
    torch.save(torch.load(path)["model"], path)
    loads(agent, path)


class Trusted:
    """
    What `torch.load` does not know.
    """


def test_more_than_tensors(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({**values(), "config": Trusted()}, path)
    said = advised(agent, path, "unsafe_globals")
    (name,) = re.findall(r"^save the state dict alone, or allow what you trust with torch\.(.*)$", said)
    assert name == "serialization.add_safe_globals"
    torch.serialization.add_safe_globals([Trusted])
    try:
        load_checkpoint_in_model(Net(), str(path))
        torch.save({key: value for key, value in torch.load(path).items() if key != "config"}, path)
    finally:
        torch.serialization.clear_safe_globals()
    loads(agent, path)


def test_a_whole_module(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    model = Net()
    model.load_state_dict(values())
    torch.save(model, path)
    assert advised(agent, path, "no_state_dict") == "save model.state_dict() instead"
    torch.save(model.state_dict(), path)
    loads(agent, path)


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "lfs_pointer", "git lfs pull"),
        (
            b"<!DOCTYPE html><html></html>",
            "html_page",
            "log in (or accept the licence) and download it again",
        ),
        (b"", "empty_file", "copy or download it again"),
        (b"\x40\0\0\0\0\0\0\0{", "truncated_file", "copy or download it again"),
    ],
)
def test_a_file_that_is_something_else(agent: Agent, tmp_path: Path, content: bytes, code: str, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert advised(agent, path, code) == said
    save_file(values(), path, metadata=PT)
    loads(agent, path)


def whole(tmp_path: Path) -> Path:
    save_file(values(), tmp_path / "model.safetensors", metadata=PT)
    return tmp_path / "model.safetensors"


def test_a_map_with_names_that_are_not_the_models(agent: Agent, tmp_path: Path) -> None:
    path = whole(tmp_path)
    bad = {"embedding": "cpu", "embed": "cpu", "layers": "cpu", "head": "cpu"}
    assert advised(agent, path, "device_map_unknown_name", device_map=bad) == (
        "Name the modules as model.named_modules() does."
    )
    loads(agent, path, device_map={name: "cpu" for name, _ in Net().named_children()})
    assert "device_map_unknown_name" not in [one.code for one in agent.last().findings]


def test_a_map_that_leaves_something_out(agent: Agent, tmp_path: Path) -> None:
    path, short = whole(tmp_path), {"embed": "cpu", "layers": "cpu"}
    said = advised(agent, path, "device_map_uncovered", device_map=short)
    assert said == 'Add an entry for each, or "" for all the rest.'
    loads(agent, path, device_map={**short, "head": "cpu"})
    loads(agent, path, device_map={**short, "": "cpu"})


def test_a_map_with_nothing_but_the_disk(agent: Agent, tmp_path: Path) -> None:
    path, model = whole(tmp_path), Net()
    with contextlib.suppress(Exception):
        load_checkpoint_in_model(model, str(path), device_map={"": "disk"}, offload_folder=str(tmp_path / "off"))
    (text,) = (one.text for one in agent.last().findings if one.code == "device_map_bad_value")
    assert text.endswith("use accelerate.disk_offload.")
    load_checkpoint_in_model(model, str(path))
    disk_offload(model, str(tmp_path / "disk"), execution_device=torch.device("cpu"))
    assert torch.allclose(model.head(torch.ones(8)), values()["head.weight"].sum(1), atol=1e-5)


def test_a_type_without_a_map(agent: Agent, tmp_path: Path) -> None:
    path = whole(tmp_path)
    said = advised(agent, path, "dtype_ignored", dtype=torch.bfloat16)
    ways = re.fullmatch(r"Pass (device_map=.*), or call (model\.to\(.*\)) first\.", said)
    assert ways is not None
    model = Net()
    eval(f"load(model, path, dtype=torch.bfloat16, {ways[1]})", names(model, path))
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    model = Net()
    eval(ways[2], names(model, path))
    load_checkpoint_in_model(model, str(path))
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    assert torch.equal(model.head.weight, values()["head.weight"].to(torch.bfloat16))


def names(model: nn.Module, path: Path) -> dict[str, Any]:
    return {"load": load_checkpoint_in_model, "model": model, "path": str(path), "torch": torch}


@pytest.mark.parametrize("way", [0, 1])
def test_a_model_on_meta_without_a_map(agent: Agent, tmp_path: Path, way: int) -> None:
    path = whole(tmp_path)
    with init_empty_weights():
        model: nn.Module = Net()
    said = advised(agent, path, "meta_left", model)
    ways = re.fullmatch(r"Pass (device_map=.*), or ('auto'): without a map nothing leaves the meta device\.", said)
    assert ways is not None
    option = (ways[1], f"device_map={ways[2]}")[way]
    if way:
        load_checkpoint_and_dispatch(model, str(path), device_map="auto")
    else:
        eval(f"load(model, path, {option})", names(model, path))
    assert equal(model, values())


def test_what_the_checkpoint_lacks_is_given_a_value(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({key: value for key, value in values().items() if "head" not in key}, path, metadata=PT)
    agent.mode("observe")
    with init_empty_weights():
        model = Net()
    said = advised(agent, path, "meta_left", model, device_map={"": "cpu"})
    (call,) = re.findall(r"accelerate\.utils\.(set_module_tensor_to_device\(.*\))", said)
    words = {"set_module_tensor_to_device": set_module_tensor_to_device, "model": model}
    value = values()["head.weight"]
    eval(call.replace("name, device, value=…", "'head.weight', 'cpu', value=value"), {**words, "value": value})
    assert equal(model, values())


def test_a_folder_that_dispatch_finds_filled(agent: Agent, tmp_path: Path) -> None:
    split = {"embed": "disk", "layers": "cpu", "head": "cpu"}
    agent.mode("observe")
    for seed in (2, 1):
        model = Net()
        model.load_state_dict(values(seed))
        dispatch_model(model, split, main_device="cpu", offload_dir=str(tmp_path / "off"))
    assert step(agent, "stale_offload_folder").startswith("Pass an empty offload_dir: ")
    count = len(agent.reports())
    model = Net()
    model.load_state_dict(values())
    dispatch_model(model, split, main_device="cpu", offload_dir=str(tmp_path / "empty"))
    assert all(one.framework != "accelerate" for one in agent.reports()[count:])
    assert torch.equal(model.embed(torch.tensor(3)), values()["embed.weight"][3])


def test_a_folder_that_cannot_be_written_to(agent: Agent, tmp_path: Path) -> None:
    path, split = whole(tmp_path), {"embed": "disk", "layers": "cpu", "head": "cpu"}
    (tmp_path / "file").touch()
    said = advised(agent, path, "offload_folder_unwritable", device_map=split, offload_folder=str(tmp_path / "file"))
    assert said == "Pass a folder on a disk with room for the weights."
    model = Net()
    load_checkpoint_and_dispatch(model, str(path), device_map=split, offload_folder=str(tmp_path / "off"))
    assert agent.last().verdict == "ok"
    assert torch.equal(model.embed(torch.tensor(3)), values()["embed.weight"][3])


class Tied(Net):
    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("way", [0, 1])
def test_a_tie_that_the_load_breaks(agent: Agent, tmp_path: Path, way: int) -> None:
    path = tmp_path / "model.safetensors"
    saved = {key: value for key, value in values(tied=True).items() if key != "embed.weight"}
    save_file(saved, path, metadata=PT)
    model = Tied(tied=True)
    with contextlib.suppress(Exception):
        load_checkpoint_in_model(model, str(path), device_map={"": "cpu"})
    if not any(one.code == "tied_weights_lost" for one in agent.last().findings):
        pytest.skip("this accelerate keeps the tie")
    assert step(agent, "tied_weights_lost") == (
        "Load with device_map=None, or build the model under init_empty_weights() and call model.tie_weights()."
    )
    if way:
        with init_empty_weights():
            model = Tied(tied=True)
        model.tie_weights()
        load_checkpoint_in_model(model, str(path), device_map={"": "cpu"})
    else:
        model = Tied(tied=True)
        load_checkpoint_in_model(model, str(path), device_map=None)
    assert equal(model, saved)
    assert torch.equal(model.embed.weight, saved["head.weight"])
    assert agent.last().verdict == "ok"
