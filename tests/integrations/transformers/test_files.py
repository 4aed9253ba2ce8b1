from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.agents import Agent, codes, hooked

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
INDEX = "model.safetensors.index.json"

pytestmark = pytest.mark.usefixtures("agent")


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("transformers.modeling_utils"):
        yield


def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def sharded(folder: Path, model: transformers.PreTrainedModel | None = None) -> dict[str, str]:
    (model or llama()).save_pretrained(folder, max_shard_size="2KB")
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    return weight_map


def load(folder: Path, **settings: object) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM.from_pretrained(folder, **settings)


def test_a_file_beside_with_other_values_is_said(agent: Agent, tmp_path: Path) -> None:
    other = llama()
    llama().save_pretrained(tmp_path)
    torch.save(other.state_dict(), tmp_path / "pytorch_model.bin")
    load(tmp_path)
    (finding,) = agent.last().findings
    assert (agent.last().verdict, finding.code, finding.level) == ("ok", "wrong_file_preferred", "warning")
    assert finding.text == (
        "transformers reads model.safetensors and ignores the newer pytorch_model.bin beside it; their contents differ"
    )
    assert finding.next == "pass use_safetensors=False, or remove the file that is out of date"
    again = load(tmp_path, use_safetensors=False)
    assert torch.equal(again.lm_head.weight, other.lm_head.weight)
    assert agent.last().findings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_beside_with_the_same_values_is_information(agent: Agent, tmp_path: Path, dtype: torch.dtype) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    torch.save({key: value.to(dtype) for key, value in model.state_dict().items()}, tmp_path / "pytorch_model.bin")
    load(tmp_path)
    assert (agent.last().verdict, codes(agent.last()), codes(agent.last(), "info")) == (
        "ok",
        [],
        ["wrong_file_preferred"],
    )


def test_half_a_model_beside_its_index_is_the_cause_of_what_is_missing(agent: Agent, tmp_path: Path) -> None:
    model = llama()
    sharded(tmp_path, model)
    half = {key: value for key, value in model.state_dict().items() if "mlp" not in key}
    save_file(half, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)
    report = agent.last()
    assert (report.verdict, codes(report)[:2]) == ("partial", ["wrong_file_preferred", "missing_keys"])
    assert [one.next for one in report.findings if one.next] == ["remove the file that is out of date"]
    (tmp_path / "model.safetensors").unlink()
    load(tmp_path)
    assert (agent.last().verdict, agent.last().findings) == ("ok", ())


def test_another_variant_is_another_checkpoint(agent: Agent, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    llama().save_pretrained(tmp_path, variant="fp16", max_shard_size="2KB")
    for settings in ({}, {"variant": "fp16"}):
        load(tmp_path, **settings)
        assert (agent.last().verdict, agent.last().findings) == ("ok", ())
    torch.save(llama().state_dict(), tmp_path / "pytorch_model.fp16.bin")
    load(tmp_path, variant="fp16")
    (finding,) = agent.last().findings
    assert "reads model.safetensors.index.fp16.json and ignores the newer pytorch_model.fp16.bin" in finding.text


def lies(folder: Path, weight_map: dict[str, str]) -> None:
    file = folder / weight_map["lm_head.weight"]
    save_file(
        {key: value for key, value in load_file(file).items() if key != "lm_head.weight"} or {"x": torch.ones(1)},
        file,
        metadata={"format": "pt"},
    )


def omits(folder: Path, weight_map: dict[str, str]) -> None:
    shard = weight_map["lm_head.weight"]
    kept = {key: file for key, file in weight_map.items() if file != shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}))


@pytest.mark.parametrize(("spoil", "said"), [(lies, "that no shard holds: lm_head.weight"), (omits, "leaves out")])
def test_an_index_that_is_not_true_is_the_cause_of_what_is_missing(
    agent: Agent, tmp_path: Path, spoil: Callable[[Path, dict[str, str]], None], said: str
) -> None:
    spoil(tmp_path, sharded(tmp_path))
    load(tmp_path)
    report = agent.last()
    assert (report.verdict, codes(report)) == ("partial", ["index_incomplete", "missing_keys"])
    assert said in report.findings[0].text
    assert [one.next for one in report.findings if one.next] == [
        "save the checkpoint again, or rebuild the index from the shards"
    ]


def test_a_shard_that_is_gone_or_cut_is_named(tmp_path: Path) -> None:
    shard = tmp_path / sharded(tmp_path)["lm_head.weight"]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(Exception, match="incomplete metadata") as caught:
        load(tmp_path)
    assert codes(caught.value.ckpt_sentry, "error") == ["truncated_file"]
    assert shard.name in caught.value.ckpt_sentry.findings[0].text
    shard.unlink()
    with pytest.raises(FileNotFoundError) as missing:
        load(tmp_path)
    assert "shard_missing" in codes(missing.value.ckpt_sentry, "error")


def test_a_broken_file_beside_one_that_can_be_read(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match="header") as caught:
        load(tmp_path)
    report = caught.value.ckpt_sentry
    assert codes(report) == ["empty_file", "wrong_file_preferred"]
    assert report.findings[-1].next == "pass use_safetensors=False"
    load(tmp_path, use_safetensors=False)
