"""
A rank that ends in a phase of a load: `rank_ends.py PHASE RANK HOW FOLDER`, under a launcher.

PHASE: before (the load), plan, read, barrier (while the others still read), after (the load). HOW: the name of a signal
that the rank sends itself, as somebody else might; "raise"; "exit3"; or "none". `SPAWN=n` in the environment makes the
program start its ranks itself, by `torch.multiprocessing.spawn`; `CROWD=n` lets a stranger hold so many connections to
the launcher, from the first attempt on (see `crowd.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

PHASE, CHOSEN, HOW, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
CHECKPOINT = FOLDER / "step-7"
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
ATTEMPTS = int(os.environ.get("BAD_ATTEMPTS", "1000"))
"""In how many attempts the rank ends that way."""


def end() -> None:
    """
    End this process in the way that is asked for.
    """
    if HOW == "raise":
        raise ValueError(f"user bug in {PHASE}")
    if HOW == "exit3":
        sys.exit(3)
    os.kill(os.getpid(), signal.Signals[HOW])
    time.sleep(60)


def reach(phase: str) -> None:
    """
    Come to a phase: the chosen rank ends if it is the one.
    """
    if phase == PHASE and dist.get_rank() == CHOSEN and HOW != "none" and RESTARTS < ATTEMPTS:
        # The others are to be in the load, or out of it, by then.
        time.sleep(1.0 if phase in ("before", "after") else 0.0)
        end()


def crowd(count: int) -> None:
    """
    Start the stranger, in no group that a launcher stops, and wait until it has come.
    """
    line = [sys.executable, str(Path(__file__).with_name("crowd.py")), str(count)]
    line += [os.environ["CKPT_SENTRY_SOCKET"], str(os.getppid())]
    stranger = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert stranger.stdout is not None
    print(stranger.stdout.readline(), end="", flush=True)


class Planner(DefaultLoadPlanner):
    """
    Tells when it plans and when it is given a tensor.
    """

    def create_local_plan(self) -> Any:
        reach("plan")
        return super().create_local_plan()

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if PHASE == "barrier" and HOW != "none":
            if dist.get_rank() != CHOSEN:
                time.sleep(5)
            else:
                threading.Timer(1.0, end).start()
        reach("read")
        if os.environ.get("SLOW_RANK", str(dist.get_rank())) == str(dist.get_rank()):
            time.sleep(float(os.environ.get("SLOW_READ", "0")))
        return super().resolve_tensor(read_item)


def main() -> None:
    """
    One rank.
    """
    if dist.get_rank() == 0:
        CHECKPOINT.mkdir(parents=True, exist_ok=True)
        if (count := int(os.environ.get("CROWD", "0"))) and not RESTARTS:
            crowd(count)
    dcp.save({"w": torch.ones(4)}, checkpoint_id=CHECKPOINT)
    dist.barrier()
    reach("before")
    dcp.load({"w": torch.zeros(4)}, checkpoint_id=CHECKPOINT, planner=Planner())
    reach("after")
    dist.barrier()


def spawned(rank: int, world: int) -> None:
    """
    One rank of `torch.multiprocessing.spawn`.
    """
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/rendezvous", rank=rank, world_size=world)
    main()


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    if world := int(os.environ.get("SPAWN", "0")):
        torch.multiprocessing.spawn(spawned, (world,), nprocs=world)
        sys.exit(0)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
        os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    options: dict[str, Any] = {"timeout": timedelta(seconds=float(os.environ.get("PG_TIMEOUT", "60")))}
    if RESTARTS:
        # torchrun's store still holds the addresses of the attempt before: gloo now and then waits for those for ever.
        options |= {"init_method": f"file://{FOLDER}/rendezvous-{RESTARTS}", "rank": int(os.environ["RANK"])}
        options["world_size"] = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", **options)
    main()
    sys.stdout.flush()
    os._exit(0)
