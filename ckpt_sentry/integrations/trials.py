"""
Tiny loads through each host library, for `ckpt-sentry status --probe`.

Each yields after a load what the agent has to have reported of it: the missing keys and the coverage of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

Reported: TypeAlias = tuple[tuple[str, ...], float]
Make: TypeAlias = Callable[[Path], Iterator[Reported]]


def _dcp(folder: Path) -> Iterator[Reported]:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2), "n": 1}, checkpoint_id=folder)
    dcp.load({"w": torch.zeros(2), "n": 0}, checkpoint_id=folder)
    yield (), 1.0
    try:
        dcp.load({"w": torch.zeros(2), "absent": torch.zeros(2)}, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        str(error)
    else:
        raise RuntimeError("a load of a key that is not there returned")
    yield ("absent",), 0.5


def _module(_: Path) -> Iterator[Reported]:
    import torch

    torch.nn.Linear(2, 2).load_state_dict({"weight": torch.ones(2, 2)}, strict=False)
    yield ("bias",), 0.5


def _accelerate(folder: Path) -> Iterator[Reported]:
    import torch
    from accelerate import load_checkpoint_in_model
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2, 2)}, folder / "model.safetensors")
    load_checkpoint_in_model(torch.nn.Linear(2, 2), str(folder / "model.safetensors"))
    yield ("bias",), 0.5


def _transformers(folder: Path) -> Iterator[Reported]:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.BertConfig(vocab_size=4, max_position_embeddings=4, **sizes)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    transformers.BertModel.from_pretrained(folder)
    yield ("pooler.dense.{bias,weight}",), round(1 - 2 / 23, 2)


TRIALS: Final[dict[str, Make]] = {
    "dcp.load": _dcp,
    "load_state_dict(strict=False)": _module,
    "load_checkpoint_in_model": _accelerate,
    "from_pretrained": _transformers,
}
