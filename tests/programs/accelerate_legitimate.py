"""
Loads by accelerate that lack nothing that matters: `accelerate_legitimate.py FOLDER`. Prints how many there were.

Tiny models of transformers, each saved in the ways that models are saved, and loaded in the ways that accelerate has.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers as tr  # noqa: E402
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2() -> nn.Module:
    return tr.GPT2LMHeadModel(tr.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama() -> nn.Module:
    return tr.LlamaForCausalLM(tr.LlamaConfig(vocab_size=32, num_key_value_heads=2, **SMALL))


def llama_tied() -> nn.Module:
    config = tr.LlamaConfig(vocab_size=32, num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
    return tr.LlamaForCausalLM(config)


def bert() -> nn.Module:
    return tr.BertForMaskedLM(tr.BertConfig(vocab_size=32, max_position_embeddings=16, **SMALL))


def bert_classifier() -> nn.Module:
    return tr.BertForSequenceClassification(tr.BertConfig(vocab_size=32, max_position_embeddings=16, **SMALL))


def t5() -> nn.Module:
    config = tr.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return tr.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    return tr.ViTForImageClassification(tr.ViTConfig(image_size=8, patch_size=4, **SMALL))


MODELS: tuple[Callable[[], nn.Module], ...] = (gpt2, llama, llama_tied, bert, bert_classifier, t5, vit)


def made(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """
    A model of a seed.
    """
    torch.manual_seed(seed)
    return build()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """
    A model without values, tied as its class wants it.
    """
    with init_empty_weights():
        model = build()
    model.tie_weights()
    return model


def saved(model: nn.Module, how: str, folder: Path) -> Path:
    """
    Save a model in one of the usual ways, under its own names: accelerate does not know those of older versions.
    """
    if how == "sharded":
        model.save_pretrained(folder, max_shard_size="8KB", save_original_format=False)
    elif how == "pickled":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    elif how == "half":
        model.half().save_pretrained(folder, save_original_format=False)
    elif how == "with more":
        state = {key: value.clone() for key, value in model.state_dict().items()}
        more = {"model.rotary_emb.inv_freq": torch.ones(4), "embeddings.position_ids": torch.arange(5)}
        ema = {f"ema.{key}": value + 1 for key, value in state.items()}
        save_file({key: value.clone() for key, value in (state | more | ema).items()}, folder / "model.safetensors")
    else:
        model.save_pretrained(folder, save_original_format=False)
    return folder


def loads() -> Iterator[Any]:
    """
    All loads, one after the other.
    """
    for build in MODELS:
        is_tied = build in (gpt2, llama_tied, bert, t5)
        for how in ("whole", "sharded", "pickled", "half", "with more"):
            folder = FOLDER / build.__name__ / how.replace(" ", "-")
            folder.mkdir(parents=True)
            path = saved(made(build, 1), how, folder)
            yield load_checkpoint_in_model(made(build, 2), path)
            yield load_checkpoint_and_dispatch(on_meta(build), path, device_map={"": "cpu"})
            if not is_tied:
                # A tied model that has values loses its embedding so: that is no legitimate load.
                yield load_checkpoint_and_dispatch(made(build, 2), path, device_map="auto")
    yield from others()


class Conv(nn.Module):
    """
    A convolution, and a batch norm that counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def others() -> Iterator[Any]:
    """
    An old batch norm, an old weight norm, a wrapped model, an adapter's own keys.
    """
    state = made(Conv, 1).state_dict()
    del state["norm.num_batches_tracked"]
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    old = {}
    for key, value in state.items():
        path, found, last = key.partition("parametrizations.")
        old[path + names[found + last] if found else key] = value
    for name, tensors in (("counters", state), ("weight_norm", old)):
        (FOLDER / name).mkdir()
        save_file({key: value.clone() for key, value in tensors.items()}, FOLDER / name / "model.safetensors")
    yield load_checkpoint_in_model(made(Conv, 2), FOLDER / "counters")
    yield load_checkpoint_and_dispatch(made(Conv, 2), FOLDER / "counters", device_map={"": "cpu"})
    yield load_checkpoint_in_model(made(Conv, 2), FOLDER / "weight_norm")
    if "set_model_state_dict" in inspect.getsource(inspect.unwrap(load_checkpoint_in_model)):  # else it loads nothing
        yield load_checkpoint_in_model(torch.compile(made(Conv, 2), backend="eager"), FOLDER / "counters")
    adapted = nn.ModuleDict({"base": nn.Linear(4, 4), "lora_A": nn.Linear(4, 2), "lora_B": nn.Linear(2, 4)})
    (FOLDER / "adapter").mkdir()
    adapter = {key: torch.randn_like(value) for key, value in adapted.state_dict().items() if "lora" in key}
    save_file(adapter, FOLDER / "adapter" / "model.safetensors")
    yield load_checkpoint_in_model(adapted, FOLDER / "adapter")


if __name__ == "__main__":
    print(sum(1 for _ in loads()))
