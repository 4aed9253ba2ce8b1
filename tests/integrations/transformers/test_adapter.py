from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from ckpt_sentry import LowCoverageError
from tests.agents import Agent, codes, hooked

if TYPE_CHECKING:
    import torch

peft = pytest.importorskip("peft")
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("transformers.modeling_utils"):
        yield


def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def adapter(folder: Path, **settings: Any) -> Path:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    peft.get_peft_model(llama(), config).save_pretrained(folder)
    return folder


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    save_file(change(load_file(folder / FILE)), folder / FILE)
    return folder


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_that_come_in_whole_are_good(agent: Agent, tmp_path: Path, settings: dict[str, Any]) -> None:
    model, folder = llama(), adapter(tmp_path / "checkpoint-7", **settings)
    model.load_adapter(str(folder))
    model.load_adapter(str(folder), adapter_name="other")
    first, second = agent.reports()
    assert (first.entry_point, first.step, first.format) == ("LlamaForCausalLM.load_adapter", 7, "safetensors")
    for report in (first, second):
        assert (report.verdict, codes(report), report.coverage.judged) == ("ok", [], 1.0)
    assert first.model.keys == second.model.keys >= 8


def test_what_transformers_says_it_lacks_is_missing(agent: Agent, tmp_path: Path) -> None:
    # The magnitudes of DoRA get lost on the way (transformers 5.24.0 with peft 0.21.2).
    info = llama().load_adapter(str(adapter(tmp_path, use_dora=True)))
    report = agent.last()
    assert report.missing.count == len(info.missing_keys)
    assert (report.verdict == "partial") is bool(info.missing_keys)


def test_an_adapter_of_another_model_loads_nothing(agent: Agent, tmp_path: Path) -> None:
    folder = edited(adapter(tmp_path), lambda held: {f"other.{key}": held[key] for key in held})
    llama().load_adapter(str(folder))
    report = agent.last()
    assert (report.verdict, report.coverage.keys, codes(report, "error")) == ("no_op", 0, ["no_overlap"])
    agent.mode("strict")
    with pytest.raises(LowCoverageError):
        llama().load_adapter(str(folder))
    assert agent.last().error is not None


def test_a_damaged_adapter_after_a_good_one(agent: Agent, tmp_path: Path) -> None:
    model, folder = llama(), adapter(tmp_path)
    model.load_adapter(str(folder))
    edited(folder, lambda held: {key: held[key] for key in held if "layers.1" not in key})
    model.load_adapter(str(folder), adapter_name="second")
    report = agent.last()
    assert (report.verdict, report.missing.count) == ("partial", 4)
    assert report.missing.keys == ("model.layers.1.self_attn.{q_proj,v_proj}.{lora_A,lora_B}.second.weight",)


def test_an_adapter_within_from_pretrained_is_a_load_of_its_own(agent: Agent, tmp_path: Path) -> None:
    base = llama()
    base.save_pretrained(tmp_path / "base")
    folder = adapter(tmp_path / "adapter")
    config = peft.PeftConfig.from_pretrained(folder)
    config.base_model_name_or_path = str(tmp_path / "base")
    config.save_pretrained(folder)
    edited(folder, lambda held: {f"other.{key}": held[key] for key in held})
    transformers.AutoModelForCausalLM.from_pretrained(str(folder))
    verdicts = [(report.entry_point, report.verdict) for report in agent.reports()]
    assert verdicts == [("LlamaForCausalLM.load_adapter", "no_op"), ("LlamaForCausalLM.from_pretrained", "ok")]


def test_a_broken_adapter_keeps_its_error(tmp_path: Path, agent: Agent) -> None:
    folder = adapter(tmp_path)
    (folder / FILE).write_bytes(b"")
    with pytest.raises(Exception, match="header") as caught:
        llama().load_adapter(str(folder))
    assert codes(caught.value.ckpt_sentry, "error") == ["empty_file"]
    assert agent.last().verdict == "failed"


def test_what_is_raised_before_a_file_is_chosen_is_not_the_folders_fault(tmp_path: Path, agent: Agent) -> None:
    model, folder = llama(), adapter(tmp_path)
    model.load_adapter(str(folder))
    with pytest.raises(ValueError, match="already exists"):
        model.load_adapter(str(folder))
    assert codes(agent.last(), "error") == ["rank_raised"]
