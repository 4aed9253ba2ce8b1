from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_sentry.core.report import Finding
from ckpt_sentry.formats import index
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.formats.index import IndexFacts


def shard(folder: Path, name: str, *keys: str) -> None:
    save_file({key: torch.ones(2) for key in keys}, folder / name, metadata={"format": "pt"})


def write(folder: Path, weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def examined(path: Path) -> tuple[IndexFacts, list[str]]:
    found = index.read(path)
    facts = index.examine(found, index.shards(found))
    return facts, [f"{item.code} {item.level}: {item.text}" for item in index.findings(found, facts)]


def test_a_good_index(tmp_path: Path) -> None:
    shard(tmp_path, "b.safetensors", "x.b")
    shard(tmp_path, "a.safetensors", "x.a")
    path = write(tmp_path, {"x.b": "b.safetensors", "x.a": "a.safetensors"})

    assert index.read(path).files == ("a.safetensors", "b.safetensors")
    assert examined(path) == (IndexFacts(omitted={}, twice={}), [])


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", "x.a")
    path = write(tmp_path, {"x.a": "a.safetensors", "x.b": "b.safetensors", "x.c": "b.safetensors"})

    facts, said = examined(path)

    assert facts == IndexFacts(absent=("b.safetensors",), omitted={}, twice={})
    assert said == [
        (
            "shard_missing error: 1 of 2 shards that model.safetensors.index.json names are not there: "
            "b.safetensors (2 keys)"
        )
    ]


def test_keys_that_no_shard_holds(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", "x.a")
    path = write(tmp_path, {"x.a": "a.safetensors", "x.b.1": "a.safetensors", "x.b.0": "a.safetensors"})

    facts, said = examined(path)

    assert facts.not_held == ("x.b.0", "x.b.1")
    assert said == [
        "index_incomplete warning: model.safetensors.index.json lists 2 keys that no shard holds: x.b.{0-1}"
    ]


def test_keys_in_another_shard_are_facts_but_no_finding(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", "x.a", "x.more")
    shard(tmp_path, "b.safetensors", "x.b")
    path = write(tmp_path, {"x.a": "b.safetensors", "x.b": "a.safetensors"})

    facts, said = examined(path)

    assert (facts.misplaced, facts.unlisted, said) == (("x.a", "x.b"), ("x.more",), [])


def test_a_shard_that_the_index_leaves_out(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", "x.a")
    shard(tmp_path, "b.safetensors", "x.b", "x.c")
    path = write(tmp_path, {"x.a": "a.safetensors"})

    facts, said = examined(path)

    assert facts.omitted == {"b.safetensors": ("x.b", "x.c")}
    assert said == [
        (
            "index_incomplete warning: model.safetensors.index.json leaves out b.safetensors, with 2 keys that no "
            "other shard holds"
        )
    ]


def test_a_shard_by_its_name_alone(tmp_path: Path) -> None:
    shard(tmp_path, "model-1-of-2.safetensors", "embed.weight")
    shard(tmp_path, "model-2-of-2.safetensors", "head.weight")
    path = write(tmp_path, {"embed.weight": "model-1-of-2.safetensors"})

    assert examined(path)[0].omitted == {"model-2-of-2.safetensors": ("head.weight",)}


def test_another_checkpoint_beside_it_is_left_alone(tmp_path: Path) -> None:
    shard(tmp_path, "model-1.safetensors", "model.embed.weight")
    shard(tmp_path, "consolidated.safetensors", "tok_embeddings.weight")
    shard(tmp_path, "adapter_model.safetensors", "model.lora_A.weight")
    shard(tmp_path, "copy.safetensors", "model.embed.weight")
    path = write(tmp_path, {"model.embed.weight": "model-1.safetensors"})

    assert examined(path) == (IndexFacts(omitted={}, twice={}), [])


def test_a_key_in_two_shards(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", "x.a", "x.b")
    shard(tmp_path, "b.safetensors", "x.b")
    path = write(tmp_path, {"x.a": "a.safetensors", "x.b": "b.safetensors"})

    facts, said = examined(path)

    assert facts.twice == {"x.b": ("a.safetensors", "b.safetensors")}
    assert said == ["duplicate_keys warning: 1 key in several shards (x.b): that of b.safetensors is loaded"]


def test_an_index_without_a_weight_map_is_the_map_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.index.json"
    path.write_text('{"x": "a.safetensors"}')
    assert index.read(path).weight_map == {"x": "a.safetensors"}
    path.write_text("{}")
    assert index.read(path).files == ()
    path.write_text('{"weight_map": {}}')
    assert examined(path) == (IndexFacts(omitted={}, twice={}), [])


@pytest.mark.parametrize(
    "text",
    [
        "{broken",
        "[]",
        "3",
        '{"metadata": {"total_size": 1}}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": null}}',
        '{"a": "x\\u0000"}',
        "[" * 50_000,
        "\ud800",
    ],
)
def test_what_is_no_index(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))

    with pytest.raises(HeaderError) as caught:
        index.read(path)
    assert isinstance(caught.value.finding(), Finding)
    assert caught.value.code == "index_invalid"
    assert "config.json" in caught.value.text
