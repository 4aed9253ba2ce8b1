from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ckpt_sentry import LowCoverageError, unify_keys
from ckpt_sentry.core.report import Coverage
from tests.agents import Agent, codes, fresh, hooked
from tests.integrations.hosts import dtype_parameter, renames

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


WHY = "the values of another, to which transformers gives the same name:"


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("transformers.modeling_utils"):
        yield


@pytest.fixture(autouse=True)
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    with fresh(tmp_path / "records", monkeypatch) as made:
        yield made


def llama(*, tied: bool = False) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied)
    )


def bert(kind: str = "BertModel") -> transformers.PreTrainedModel:
    return getattr(transformers, kind)(transformers.BertConfig(**SMALL, max_position_embeddings=16))


def gpt2() -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    )


def t5() -> transformers.PreTrainedModel:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    )


def vit() -> transformers.PreTrainedModel:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
        )
    )


def resnet() -> transformers.PreTrainedModel:
    return transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_()
    model.save_pretrained(folder)
    return folder


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> Path:
    file = folder / "model.safetensors"
    save_file({key: value.clone() for key, value in change(load_file(file)).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "make", [llama, lambda: llama(tied=True), bert, gpt2, t5, vit, lambda: bert("BertForMaskedLM")]
)
@pytest.mark.parametrize("settings", [{}, {dtype_parameter(): torch.bfloat16}, {"device_map": {"": "cpu"}}], ids=str)
def test_what_was_saved_loads_without_a_warning(
    agent: Agent, tmp_path: Path, make: Callable[[], transformers.PreTrainedModel], settings: dict[str, Any]
) -> None:
    model = make()
    type(model).from_pretrained(saved(model, tmp_path / "checkpoint-40"), **settings)
    (report,) = agent.reports()
    assert (report.framework, report.entry_point) == ("transformers", f"{type(model).__name__}.from_pretrained")
    assert (report.verdict, report.coverage, report.step, codes(report)) == ("ok", Coverage(1.0, 1.0), 40, [])
    assert report.proof.checked > 0


@pytest.mark.parametrize(
    ("make", "loads", "new"),
    [
        (bert, "BertForSequenceClassification", "classifier.{bias,weight}"),
        (lambda: bert("BertForMaskedLM"), "BertForTokenClassification", "classifier.{bias,weight}"),
        (lambda: bert("BertForMaskedLM"), "BertModel", "pooler.dense.{bias,weight}"),
        (llama, "LlamaForSequenceClassification", "score.weight"),
        (gpt2, "GPT2ForSequenceClassification", "score.weight"),
        (vit, "ViTModel", "pooler.dense.{bias,weight}"),
        (resnet, "ResNetForImageClassification", "classifier.1.{bias,weight}"),
    ],
)
def test_a_new_head_is_no_warning(
    agent: Agent, tmp_path: Path, make: Callable[[], transformers.PreTrainedModel], loads: str, new: str
) -> None:
    getattr(transformers, loads).from_pretrained(saved(make(), tmp_path / "m"))
    report = agent.last()
    assert (report.verdict, report.missing.keys, codes(report)) == ("partial", (new,), [])


def test_a_new_head_is_one_line(agent: Agent, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers.BertForSequenceClassification.from_pretrained(saved(bert(), tmp_path / "m"))
    assert agent.last().verdict == "partial"
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("ckpt_sentry"))
    assert line.startswith("ckpt_sentry ! BertForSequenceClassification.from_pretrained")
    assert "New in this model, and to be trained" in line


def test_a_base_model_takes_its_part_of_a_checkpoint(agent: Agent, tmp_path: Path) -> None:
    transformers.LlamaModel.from_pretrained(saved(llama(), tmp_path / "m"))
    assert (agent.last().verdict, agent.last().unexpected.keys) == ("ok", ("lm_head.weight",))


def test_not_one_key_is_refused(agent: Agent, tmp_path: Path) -> None:
    folder = edited(saved(llama(), tmp_path / "m"), lambda held: {f"module.{key}": held[key] for key in held})
    with pytest.raises(LowCoverageError, match=r"0 % of keys and 0 % of elements came in") as caught:
        transformers.LlamaForCausalLM.from_pretrained(folder)
    report = caught.value.ckpt_sentry
    assert report == agent.last()
    assert (report.verdict, report.rename.rule, report.rename.coverage) == ("no_op", 'strip the prefix "module."', 1.0)
    assert (r'from_pretrained(…, key_mapping={r"^module\.": ""})' in str(caught.value)) == renames()
    if renames():
        transformers.LlamaForCausalLM.from_pretrained(folder, key_mapping={r"^module\.": ""})
    else:
        state = unify_keys(load_file(folder / "model.safetensors"), llama()).state_dict
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        transformers.LlamaForCausalLM.from_pretrained(folder)
    assert agent.last().verdict == "ok"
    edited(folder, lambda held: {f"other.{key}": held[key] for key in held})
    agent.mode("observe")
    transformers.LlamaForCausalLM.from_pretrained(folder)
    assert (agent.last().verdict, agent.last().error) == ("no_op", None)


def test_an_empty_file_of_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LowCoverageError, match=r"0 % of keys"):
        transformers.LlamaForCausalLM.from_pretrained(edited(saved(llama(), tmp_path / "m"), lambda _: {}))


def test_the_wrong_architecture_is_refused(tmp_path: Path) -> None:
    saved(bert(), tmp_path / "bert")
    saved(llama(), tmp_path / "llama")
    shutil.copy(tmp_path / "bert" / "model.safetensors", tmp_path / "llama" / "model.safetensors")
    with pytest.raises(LowCoverageError):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")


@pytest.mark.parametrize(
    ("kept", "lost"),
    [
        (lambda key: "embed" in key, "block_lost"),
        (lambda key: "layers.1." not in key, "block_lost"),
        (lambda key: "norm" not in key, "kind_lost"),
        (lambda key: "lm_head" not in key, "missing_keys"),
        (lambda key: "embed_tokens" not in key, "missing_keys"),
    ],
    ids=["embedding only", "a layer fewer", "no norms", "untied head", "no embedding"],
)
def test_what_is_lost_is_a_warning(agent: Agent, tmp_path: Path, kept: Callable[[str], bool], lost: str) -> None:
    folder = edited(saved(llama(), tmp_path / "m"), lambda held: {key: held[key] for key in held if kept(key)})
    transformers.LlamaForCausalLM.from_pretrained(folder)
    assert agent.last().verdict == "partial"
    assert lost in codes(agent.last(), "warning")


def test_strict_refuses_a_new_head_until_it_is_allowed(agent: Agent, tmp_path: Path) -> None:
    folder = saved(bert(), tmp_path / "m")
    agent.mode("strict")
    with pytest.raises(LowCoverageError, match=r"CKPT_SENTRY_ALLOW_MISSING='classifier\.\*'"):
        transformers.BertForSequenceClassification.from_pretrained(folder)
    agent.set(ALLOW_MISSING="classifier.*")
    transformers.BertForSequenceClassification.from_pretrained(folder)
    assert agent.last().verdict == "ok"


def test_other_shapes_are_the_hosts_error_with_the_report(tmp_path: Path) -> None:
    folder = edited(saved(llama(), tmp_path / "m"), lambda held: {**held, "lm_head.weight": torch.zeros(40, 16)})
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes|size mismatch") as caught:
        transformers.LlamaForCausalLM.from_pretrained(folder)
    (mismatch,) = caught.value.ckpt_sentry.mismatched
    assert (mismatch.keys, mismatch.model_shape, mismatch.checkpoint_shape) == ("lm_head.weight", (32, 16), (40, 16))
    assert codes(caught.value.ckpt_sentry, "error") == ["shape_mismatch"]


def test_a_head_of_another_shape_that_is_left_out_is_new(agent: Agent, tmp_path: Path) -> None:
    folder = saved(vit(), tmp_path / "m")
    transformers.ViTForImageClassification.from_pretrained(folder, num_labels=7, ignore_mismatched_sizes=True)
    report = agent.last()
    assert (report.verdict, codes(report)) == ("partial", [])
    assert report.findings[0].text.startswith("New in this model, and to be trained: classifier.{bias,weight}")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 5\n", "lfs_pointer"),
        (b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>\n", "html_page"),
        (b"", "empty_file"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    folder = saved(llama(), tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(Exception, match=r".*") as caught:
        transformers.LlamaForCausalLM.from_pretrained(folder)
    assert not isinstance(caught.value, LowCoverageError)
    assert codes(caught.value.ckpt_sentry, "error") == [code]


def test_a_folder_without_weights_is_said(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(OSError, match=r"no file named .*model\.safetensors") as caught:
        transformers.LlamaForCausalLM.from_pretrained(folder)
    assert codes(caught.value.ckpt_sentry) == ["no_checkpoint_files"]


def test_an_error_of_another_kind_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="torch_dtyp") as caught:
        transformers.LlamaForCausalLM.from_pretrained(saved(llama(), tmp_path / "m"), torch_dtyp="float16")
    assert codes(caught.value.ckpt_sentry) == ["rank_raised"]


@pytest.mark.skipif(not renames(), reason="this transformers renames otherwise")
def test_a_mapping_may_let_names_change_places(agent: Agent, tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "m")
    layers = {r"layers\.0\.": "layers.T.", r"layers\.1\.": "layers.0.", r"layers\.T\.": "layers.1."}
    model = transformers.LlamaForCausalLM.from_pretrained(folder, key_mapping=layers)
    key = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[key.format(0)], load_file(folder / "model.safetensors")[key.format(1)])
    assert (agent.last().verdict, codes(agent.last()), agent.last().proof.checked) == ("ok", [], 21)


class ToyConfig(getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig):  # the name in 4
    model_type = "toy"


class Toy(transformers.PreTrainedModel):
    """
    A base model, and below it one with a head that has a module of the same name.
    """

    config_class = ToyConfig
    base_model_prefix = "base"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.emb = torch.nn.Embedding(8, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass


class ToyWithHead(transformers.PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "base"
    inner = Toy

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.inner(config))
        self.norm = torch.nn.LayerNorm(4)
        self.out = torch.nn.Linear(4, 2)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass


class LaterToy(Toy):
    base_model_prefix = "transformer"


class LaterToyWithHead(ToyWithHead):
    base_model_prefix = "transformer"
    inner = LaterToy


def test_a_base_model_takes_its_own_of_two_modules_of_one_name(agent: Agent, tmp_path: Path) -> None:
    model = ToyWithHead(ToyConfig())
    base = Toy.from_pretrained(saved(model, tmp_path / "m"))
    if base.norm.weight.is_meta:  # transformers 4.57 takes both for the head's, and leaves both
        assert (agent.last().verdict, codes(agent.last())) == ("partial", ["meta_left"])
        return
    assert torch.equal(base.norm.weight, model.base.norm.weight)
    report = agent.last()
    assert (report.verdict, report.coverage, codes(report), report.proof.checked) == ("ok", Coverage(1.0, 1.0), [], 3)


@pytest.mark.skipif(not renames(), reason="this transformers renames otherwise")
@pytest.mark.parametrize(
    ("kind", "mixed_up"),
    [
        (LaterToy, "2 tensors hold … norm.bias those of norm.bias, not of transformer.norm.bias."),
        (LaterToyWithHead, "4 tensors hold … norm.bias those of transformer.norm.bias, not of norm.bias."),
    ],
)
def test_modules_that_transformers_mixes_up_are_named(
    tmp_path: Path, kind: type[transformers.PreTrainedModel], mixed_up: str
) -> None:
    model = LaterToyWithHead(ToyConfig())
    folder = saved(model, tmp_path / "m")
    with pytest.raises(LowCoverageError) as caught:
        kind.from_pretrained(folder)
    report = caught.value.ckpt_sentry
    (finding,) = (one for one in report.findings if one.level == "error")
    assert (report.verdict, finding.code, finding.text) == (
        "wrong_values",
        "values_not_loaded",
        mixed_up.replace("…", WHY),
    )
    assert (
        finding.next == "Build LaterToyWithHead from its config, and give it the file's state dict by load_state_dict."
    )
    again = LaterToyWithHead(ToyConfig())
    again.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(again.base_model.norm.weight, model.base_model.norm.weight)


@pytest.mark.parametrize("make", [vit, lambda: bert("BertForMaskedLM"), llama])
def test_values_are_compared_under_the_names_of_the_checkpoint(
    agent: Agent, tmp_path: Path, make: Callable[[], transformers.PreTrainedModel]
) -> None:
    model = make()
    type(model.base_model).from_pretrained(saved(model, tmp_path / "m"))
    assert agent.last().proof.checked >= len(model.base_model.state_dict()) - 2
    model.base_model.save_pretrained(tmp_path / "base")
    type(model).from_pretrained(tmp_path / "base")
    assert agent.last().proof.checked == len(model.base_model.state_dict())


class IgnoringToy(Toy):
    _keys_to_ignore_on_load_missing = (r"norm\.",)


def test_what_a_class_lets_be_missing_is_on_neither_side(agent: Agent, tmp_path: Path) -> None:
    folder = edited(saved(IgnoringToy(ToyConfig()), tmp_path / "m"), lambda held: {"emb.weight": held["emb.weight"]})
    IgnoringToy.from_pretrained(folder)
    assert (agent.last().verdict, agent.last().findings) == ("ok", ())
