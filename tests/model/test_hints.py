"""
What a model of transformers tells of the keys that other loaders find missing; each next step is followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file

from ckpt_sentry import LowCoverageError
from ckpt_sentry.model import hints
from tests.agents import Agent, codes, hooked

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate.big_modeling", "transformers.modeling_utils"):
        yield


def mixtral() -> transformers.PreTrainedModel:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    )


def llama(*, tied: bool = True) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied))


def test_the_published_layout_is_loaded_by_from_pretrained(agent: Agent, tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    mixtral().load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    report = agent.last()
    assert (report.verdict, codes(report)) == ("partial", ["published_layout", "missing_keys"])
    assert report.findings[0].text.startswith("13 keys of the checkpoint are as MixtralForCausalLM is published (")
    step = f"Load it with MixtralForCausalLM.from_pretrained({str(tmp_path)!r})."
    assert [one.next for one in report.findings if one.next] == [step]
    model = transformers.MixtralForCausalLM.from_pretrained(str(tmp_path))
    assert (agent.last().verdict, agent.last().coverage.judged) == ("ok", 1.0)
    # As Trainer does when it resumes: the converted keys stay as they are.
    held = model.state_dict()["model.layers.0.mlp.experts.down_proj"].clone()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert torch.equal(model.state_dict()["model.layers.0.mlp.experts.down_proj"], held)


def test_the_published_layout_in_a_strict_load_and_in_accelerate(tmp_path: Path, agent: Agent) -> None:
    mixtral().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        mixtral().load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert "published_layout" in codes(caught.value.ckpt_sentry)
    assert all("strict=False" not in (one.next or "") for one in caught.value.ckpt_sentry.findings)
    with pytest.raises(LowCoverageError, match=r"from_pretrained\('.*'\)") as refused:
        load_checkpoint_and_dispatch(mixtral(), str(tmp_path), device_map={"": "cpu"})
    assert "ALLOW_MISSING" not in str(refused.value)
    assert [one.next for one in agent.last().findings if one.next] == [
        f"Load it with MixtralForCausalLM.from_pretrained({str(tmp_path)!r})."
    ]


def test_old_names_that_a_rename_explains_need_no_from_pretrained(agent: Agent) -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=16))
    old = {key.replace("LayerNorm.weight", "LayerNorm.gamma"): value for key, value in model.state_dict().items()}
    model.load_state_dict(old, strict=False)
    assert "published_layout" not in codes(agent.last())
    assert codes(agent.last())[0] == "renamed_keys"


def test_weights_that_are_not_tied_yet(agent: Agent, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with init_empty_weights():
        model = llama()
    with pytest.raises(LowCoverageError, match=r"Call model\.tie_weights\(\) before the load\.") as caught:
        load_checkpoint_and_dispatch(model, str(tmp_path), device_map={"": "cpu"})
    assert "ALLOW_MISSING" not in str(caught.value)
    assert all("ALLOW_MISSING" not in (one.next or "") for one in agent.last().findings)
    model.tie_weights()
    load_checkpoint_and_dispatch(model, str(tmp_path), device_map={"": "cpu"})
    assert agent.last().verdict == "ok"


def test_weights_that_are_not_tied_yet_in_load_state_dict(agent: Agent, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    state_dict = load_file(tmp_path / "model.safetensors")
    with init_empty_weights():
        model = llama()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state_dict, assign=True)
    (step,) = (one.next for one in agent.last().findings if one.next)
    assert step == "load_state_dict(…, strict=False), then model.tie_weights()."
    model.load_state_dict(state_dict, strict=False, assign=True)
    model.tie_weights()
    assert torch.equal(model.lm_head.weight, state_dict["model.embed_tokens.weight"])


def test_where_both_names_are_missing_nothing_is_tied(agent: Agent, tmp_path: Path) -> None:
    llama(tied=False).save_pretrained(tmp_path)
    given = {key: value for key, value in load_file(tmp_path / "model.safetensors").items() if "mlp" in key}
    with init_empty_weights():
        model = llama()
    model.load_state_dict(given, strict=False, assign=True)
    assert "tied_keys_missing" not in codes(agent.last())


def test_an_untied_head_is_missing(agent: Agent, tmp_path: Path) -> None:
    llama(tied=False).save_pretrained(tmp_path)
    given = load_file(tmp_path / "model.safetensors")
    given.pop("lm_head.weight")
    llama(tied=False).load_state_dict(given, strict=False)
    assert "tied_keys_missing" not in codes(agent.last())


def test_ties_of_transformers_4() -> None:
    class Four(torch.nn.Module):
        _tied_weights_keys = ("lm_head.weight",)

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4)
            self.config = transformers.LlamaConfig(tie_word_embeddings=True)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embed

    assert hints.ties(Four()) == {"lm_head.weight": "embed.weight"}


@pytest.mark.parametrize(
    ("is_meta", "device_map", "way"),
    [
        (False, {"": "cpu"}, "pass device_map=None"),
        (False, None, None),
        (True, None, "pass device_map={'': 'cpu'}"),
    ],
)
def test_how_ties_are_made_before_a_load_by_accelerate(
    tmp_path: Path, agent: Agent, *, is_meta: bool, device_map: dict[str, str] | None, way: str | None
) -> None:
    llama().save_pretrained(tmp_path)
    with init_empty_weights(include_buffers=False) if is_meta else contextlib.nullcontext():
        model = llama()
    if not is_meta:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(LowCoverageError) as caught:
        load_checkpoint_and_dispatch(model, str(tmp_path), device_map=device_map)
    step = "Call model.tie_weights() before the load" + ("." if way is None else f", and {way}.")
    assert [one.next for one in caught.value.ckpt_sentry.findings if one.next] == [step]
    model.tie_weights()
    load_checkpoint_and_dispatch(model, str(tmp_path), device_map={"": "cpu"} if is_meta else None)
    assert agent.last().verdict == "ok"
