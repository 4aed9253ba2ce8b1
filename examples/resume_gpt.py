"""
Train a small GPT with FSDP2, save it, and resume it with a model that is no longer the same.

Ordinary training code for four CPU processes (gloo):

    torchrun --standalone --nproc-per-node 4 examples/resume_gpt.py RUN_FOLDER

The resumed model has a wider vocabulary (a head of another shape) and adapters that the checkpoint lacks, so
`dcp.load` fails. Everything that this program prints about it comes from torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 64, 4, 4, 32, 256
STEPS = 3


class Block(nn.Module):
    """
    One transformer layer; `adapter` is the rank of a low-rank adapter beside the MLP, 0 for none.
    """

    def __init__(self, adapter: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        if adapter:
            self.adapter_down = nn.Linear(WIDTH, adapter, bias=False)
            self.adapter_up = nn.Linear(adapter, WIDTH, bias=False)
        self.adapter = adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Map (batch, sequence, width) to the same shape.
        """
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        normed = self.norm_1(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        x = x + self.mlp(self.norm_2(x))
        return x + self.adapter_up(self.adapter_down(x)) if self.adapter else x


class GPT(nn.Module):
    """
    Embedding, layers, head.
    """

    def __init__(self, vocabulary: int = VOCABULARY, adapter: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block(adapter) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Map token ids (batch, sequence) to logits (batch, sequence, vocabulary).
        """
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded(model: GPT) -> tuple[GPT, torch.optim.Optimizer]:
    """
    Shard the model over all ranks and give it an optimizer.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """
    Take some steps on random tokens and return the last loss.
    """
    loss = torch.tensor(0.0)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (8, CONTEXT))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(folder: Path) -> None:
    """
    Train, save, resume.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())

    model, optimizer = sharded(GPT())
    loss = train(model, optimizer, STEPS)
    checkpoint = folder / f"step-{STEPS:03d}"
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        print(f"trained {STEPS} steps, loss {loss:.2f}, saved {checkpoint}", flush=True)

    model, optimizer = sharded(GPT(vocabulary=2 * VOCABULARY, adapter=8))
    weights = model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=checkpoint)
    model.load_state_dict(weights)
    train(model, optimizer, STEPS)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
