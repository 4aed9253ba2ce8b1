"""
Loads through torch.distributed.checkpoint, right and wrong ones: `dcp_loads.py SCENARIO FOLDER`.

Alone or under torchrun. A load that fails ends the program with its exception, as it would end a training job.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(sys.argv[2])
CHECKPOINT = FOLDER / "step-1200"


class Net(nn.Module):
    """
    Layers and a head; `adapters` are parameters that a checkpoint may lack.
    """

    def __init__(self, adapters: int = 0, head: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, head)
        for i in range(adapters):
            setattr(self, f"adapter{i}", nn.Parameter(torch.zeros(2)))


def save(net: nn.Module) -> None:
    """
    Save under `step-1200`.
    """
    dcp.save({"model": net.state_dict()}, checkpoint_id=CHECKPOINT)


def load(net: nn.Module, **options: Any) -> dict[str, Any]:
    """
    Load into the state of the net.
    """
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=CHECKPOINT, **options)
    return state


def good() -> None:
    """
    The same model again.
    """
    save(Net())
    load(Net())


def missing() -> None:
    """
    800 parameters that the checkpoint lacks.
    """
    save(Net())
    load(Net(adapters=800))


def mismatch_on_one_rank() -> None:
    """
    Rank 1 builds a wider head than the others.
    """
    save(Net())
    load(Net(head=32 if RANK == 1 else 16))


def fsdp_wider_head() -> None:
    """
    Sharded over all ranks, and the head grows.
    """
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    save(fully_shard(Net(), mesh=mesh))
    load(fully_shard(Net(head=32), mesh=mesh))


def caught() -> None:
    """
    The program catches the failure and goes on.
    """
    save(Net())
    try:
        load(Net(adapters=1))
    except dcp.CheckpointException:
        print("CAUGHT", flush=True)


def in_threads() -> None:
    """
    Two loads at once, in threads of their own.
    """
    save(Net())
    threads = [threading.Thread(target=load, args=(Net(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_forked_child() -> None:
    """
    A forked child loads for itself.
    """
    save(Net())
    child = os.fork()
    if child == 0:
        load(Net())
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def hostile_names() -> None:
    """
    Keys with escape codes, newlines, markup and 10 kB.
    """
    save(Net())
    state = {name: torch.zeros(2) for name in ("a\x1b[31mred", "b\nline", "[bold]c[/bold]", "d" * 10_240, "e\u202ertl")}
    dcp.load(state, checkpoint_id=CHECKPOINT)


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 on gloo sometimes aborts when it is torn down after success
