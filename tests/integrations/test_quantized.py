"""
Weights that were saved as a quantizer's codes, and loaded as if they were values, in each of the ways to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_sentry import audit
from ckpt_sentry.core.report import LoadReport
from tests.agents import Agent, codes, hooked

CODE = "quantized_state_dropped"
LLAMA = {
    "hidden_size": 8,
    "head_dim": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate.big_modeling", "transformers.modeling_utils"):
        yield


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def int8(values: dict[str, torch.Tensor], name: str = "0.SCB") -> dict[str, torch.Tensor]:
    """
    The first weight as bitsandbytes saves 8 bits: codes, and a scale for each row.
    """
    weight = values["0.weight"]
    scale = weight.abs().amax(dim=1)
    return {**values, "0.weight": (weight * 127 / scale[:, None]).round().to(torch.int8), name: scale}


def float8(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    The first weight as FP8: one inverse scale.
    """
    scale = values["0.weight"].abs().max() / 448
    return {
        **values,
        "0.weight": (values["0.weight"] / scale).to(torch.float8_e4m3fn),
        "0.weight_scale_inv": scale.reshape(1, 1),
    }


def said(report: LoadReport) -> list[str]:
    return [one.text for one in report.findings if one.code == CODE]


@pytest.mark.parametrize("quantize", [int8, float8])
def test_a_load_that_is_not_strict(agent: Agent, quantize, capfd: pytest.CaptureFixture[str]) -> None:
    saved, model = net(), net()
    given = quantize(saved.state_dict())
    model.load_state_dict(given, strict=False)
    assert (model[0].weight.abs().max() / saved[0].weight.abs().max()).item() > 10
    assert (agent.last().verdict, codes(agent.last(), "error")) == ("wrong_values", [CODE])
    assert "1 weight is quantized in the checkpoint" in capfd.readouterr().err


@pytest.mark.usefixtures("agent")
def test_a_strict_load_is_not_advised_to_leave_the_scale_out() -> None:
    with pytest.raises(RuntimeError, match="Unexpected") as caught:
        net().load_state_dict(int8(net().state_dict()))
    found = {one.code: one.next for one in caught.value.ckpt_sentry.findings}
    assert set(found) >= {CODE, "unexpected_keys"}
    assert not any("strict=False" in (step or "") for step in found.values())


def test_dequantized_it_loads_well(agent: Agent) -> None:
    saved, model = net(), net()
    given = int8(saved.state_dict())
    given["0.weight"] = given["0.weight"] * given.pop("0.SCB")[:, None] / 127
    model.load_state_dict(given)
    assert torch.allclose(model[0].weight, saved[0].weight, atol=0.01)
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])


def test_a_module_that_has_the_scale_takes_both(agent: Agent) -> None:
    class Quantized(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("SCB", torch.ones(4))

    model = nn.Sequential(Quantized(), nn.LayerNorm(4))
    model.load_state_dict(int8(net().state_dict()), strict=False)
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])


def test_numbers_of_a_small_type_alone_are_a_cast(agent: Agent) -> None:
    given = int8(net().state_dict(), "1.step")
    net().load_state_dict(given, strict=False)
    assert (agent.last().verdict, said(agent.last())) == ("ok", [])


def test_a_distributed_checkpoint(agent: Agent, tmp_path: Path) -> None:
    dcp.save(int8(net().state_dict()), checkpoint_id=tmp_path / "step-1")
    dcp.load(net().state_dict(), checkpoint_id=tmp_path / "step-1")
    assert (agent.last().verdict, codes(agent.last(), "error")) == ("wrong_values", [CODE])
    both = {**net().state_dict(), "0.weight": torch.zeros(4, 4, dtype=torch.int8), "0.SCB": torch.zeros(4)}
    dcp.load(both, checkpoint_id=tmp_path / "step-1")
    assert (agent.last().verdict, said(agent.last())) == ("ok", [])


def test_readers_of_published_files(agent: Agent, tmp_path: Path) -> None:
    quantized = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    saved = {"0.weight": torch.randn(128, 128)}
    file, index = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
    save_file(float8(saved), tmp_path / file)
    keys = ", ".join(f'"{key}": "{file}"' for key in ("0.weight", "0.weight_scale_inv"))
    (tmp_path / index).write_text(f'{{"weight_map": {{{keys}}}}}')
    plain = {"0.weight": torch.zeros(128, 128)}
    dcp.load(plain, storage_reader=quantized.HuggingFaceStorageReader(str(tmp_path)))
    assert (agent.last().verdict, len(said(agent.last()))) == ("wrong_values", 1)
    values = {"0.weight": torch.zeros(128, 128)}
    reader = quantized.QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=torch.float32)
    dcp.load(values, storage_reader=reader)
    assert torch.allclose(values["0.weight"], saved["0.weight"], atol=0.3)
    assert (agent.last().verdict, codes(agent.last(), "error", "warning")) == ("ok", [])


def test_accelerate_and_audit(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(int8(net().state_dict()), path, metadata={"format": "pt"})
    load_checkpoint_in_model(net(), str(path), device_map={"": "cpu"})
    assert (agent.last().verdict, codes(agent.last(), "error")) == ("wrong_values", [CODE])
    report = audit(net(), path)
    assert (report.verdict, codes(report, "error")) == ("wrong_values", [CODE])


def test_from_pretrained(agent: Agent, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    scale = held[key].abs().max() / 448
    held |= {key: (held[key] / scale).to(torch.float8_e4m3fn), f"{key}_scale_inv": scale.reshape(1, 1)}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = model.from_pretrained(tmp_path)
    if loaded.get_parameter(key).dtype is torch.float32:
        assert (agent.last().verdict, codes(agent.last(), "error")) == ("wrong_values", [CODE])
    else:  # transformers 4 leaves FP8 as it is
        assert (agent.last().verdict, "quantized_state_unread" in codes(agent.last(), "info")) == ("ok", True)
