"""
Loads that are right, one after another in one process group: `dcp_legitimate.py WHAT FOLDER`.

`save` writes, with as many ranks as there are, a sharded checkpoint to FOLDER/sharded.N; `load` reads those of other
numbers of ranks; `wrappers` saves and loads through every wrapper on the spot; `apart` has ranks that load something of
their own between the loads of all.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded() -> nn.Module:
    net = Net()
    return fully_shard(net, mesh=init_device_mesh("cpu", (WORLD,))) if WORLD > 1 else net


def save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path)
    barrier()


def barrier() -> None:
    if WORLD > 1:
        dist.barrier()


def round_trip(name: str, net: nn.Module) -> None:
    """
    The model alone, then model and optimizer after a step, as a trainer keeps them.
    """
    path = FOLDER / name / "step-7"
    save({"model": net.state_dict()}, path)
    dcp.load({"model": net.state_dict()}, checkpoint_id=path)


def with_optimizer() -> None:
    net = sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1) if WORLD == 1 else 0.1)
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    path = FOLDER / "optimizer" / "step-7"
    model, state = get_state_dict(net, optimizer)
    save({"model": model, "optim": state, "step": 7}, path)
    model, state = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": state, "step": 0}, checkpoint_id=path)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    # The model alone, from a checkpoint that has an optimizer as well.
    dcp.load({"model": get_model_state_dict(net)}, checkpoint_id=path)


def tensor_parallel() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def wrappers() -> None:
    round_trip("plain", Net())
    round_trip("compiled", torch.compile(Net(), backend="eager"))
    net = Net()
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    round_trip("activation", net)
    with_optimizer()
    if WORLD > 1:
        round_trip("ddp", DistributedDataParallel(Net()))
        round_trip("fsdp2", sharded())
        round_trip("tensor_parallel", tensor_parallel())
        fsdp1 = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
        path = FOLDER / "fsdp1" / "step-7"
        save({"model": get_model_state_dict(fsdp1)}, path)
        dcp.load({"model": get_model_state_dict(fsdp1)}, checkpoint_id=path)


def apart() -> None:
    paths = [FOLDER / f"step-{step}" for step in range(5)]
    for path in paths:
        save({"w": torch.ones(3)}, path)
    pair = dist.new_group([0, 1])
    load(paths[1])
    if RANK == 0:
        load(paths[0], no_dist=True)
        load(paths[0], no_dist=True)
    if RANK < 2:
        load(paths[2], process_group=pair)
    load(paths[3])
    load(paths[4])
    # Each rank its own, and all of them one, without the others.
    load(paths[RANK], no_dist=True)
    load(paths[3], no_dist=True)


def load(path: Path, **options: Any) -> None:
    dcp.load({"w": torch.zeros(3)}, checkpoint_id=path, **options)


def main() -> None:
    warnings.simplefilter("ignore")
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    if WHAT == "save":
        save({"model": sharded().state_dict()}, FOLDER / f"sharded.{WORLD}" / "step-7")
    elif WHAT == "load":
        for folder in sorted(FOLDER.glob("sharded.*")):
            dcp.load({"model": sharded().state_dict()}, checkpoint_id=folder / "step-7")
    elif WHAT == "apart":
        apart()
    else:
        wrappers()
    barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
