"""
One good load, and the modules of the agent that came with each step: `good_loads.py KIND FOLDER`, one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

STEPS: dict[str, list[str]] = {}
seen: set[str] = set()


def step(name: str) -> None:
    now = {module.removeprefix("ckpt_sentry.") for module in sys.modules if module.startswith("ckpt_sentry.")}
    STEPS[name] = sorted(now - seen)
    seen.update(now)


def dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    step("import")
    state = {"model": {"a": torch.ones(4), "b": torch.zeros(2)}}
    dcp.save(state, checkpoint_id=folder / "step-12", no_dist=True)
    step("save")
    dcp.load(state, checkpoint_id=folder / "step-12", no_dist=True)
    step("load")


def module(_: Path) -> None:
    nn.Linear(4, 4).load_state_dict(nn.Linear(4, 4).state_dict())
    step("load")


def accelerate(folder: Path) -> None:
    import accelerate
    from safetensors.torch import save_file

    step("import")
    save_file(nn.Linear(4, 4).state_dict(), folder / "model.safetensors", {"format": "pt"})

    step("import torch.distributed.checkpoint")
    accelerate.load_checkpoint_in_model(nn.Linear(4, 4), str(folder / "model.safetensors"))
    step("load")


def load_state(folder: Path) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(4, 4))
    accelerator.save_state(str(folder))
    step("import and save")
    accelerator.load_state(str(folder))
    step("load")


def transformers(folder: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=16)
    BertModel(config).save_pretrained(folder)
    step("import and save")
    BertModel.from_pretrained(folder)
    step("load")


step("start")
import torch  # noqa: E402
from torch import nn  # noqa: E402

step("import torch")
globals()[sys.argv[1]](Path(sys.argv[2]))
print(json.dumps(STEPS))
