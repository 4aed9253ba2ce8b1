"""
Every way in which a DCP load fails or surprises, one after another in one process group: `dcp_outcomes.py FOLDER`.

Prints what a program sees of each load as one JSON object on the last line of rank 0 (alone or under torchrun): type,
`args`, failures by rank, and the last lines of their texts. The same with the agent and without. With
`CKPT_SENTRY=1`, what `check_error_text` finds wrong as well.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(sys.argv[1])
CASES: dict[str, Callable[[Path], Any]] = {}


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[function.__name__] = function
    return function


def barrier() -> None:
    if WORLD > 1:
        dist.barrier()


class Net(nn.Module):
    def __init__(self, width: int = 8, head: int = 16, adapters: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, head)
        for i in range(adapters):
            setattr(self, f"adapter{i}", nn.Parameter(torch.zeros(2)))


def save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path)
    barrier()


def load(net: nn.Module, path: Path, **options: Any) -> Any:
    state = {"model": net.state_dict()}
    return dcp.load(state, checkpoint_id=path, **options)


def on_rank_0(action: Callable[[], Any]) -> None:
    if RANK == 0:
        action()
    barrier()


@case
def missing(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(adapters=40), path)


@case
def mismatched(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(head=32), path)


@case
def mismatched_on_one_rank(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(head=32 if RANK == WORLD - 1 else 16), path)


@case
def no_path(path: Path) -> None:
    load(Net(), path / "nowhere" / "step-3")


@case
def path_is_a_file(path: Path) -> None:
    on_rank_0(lambda: path.write_text("x"))
    load(Net(), path)


@case
def torch_save_file(path: Path) -> None:
    on_rank_0(lambda: torch.save(Net().state_dict(), path))
    load(Net(), path)


@case
def no_metadata(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    on_rank_0((path / ".metadata").unlink)
    load(Net(), path)


@case
def truncated_metadata(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    on_rank_0(lambda: os.truncate(path / ".metadata", 100))
    load(Net(), path)


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("__*_0.distcp"))


@case
def truncated_shard(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    on_rank_0(lambda: os.truncate(shards(path)[-1], 300))
    load(Net(), path)


@case
def empty_shard(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    on_rank_0(lambda: os.truncate(shards(path)[-1], 0))
    load(Net(), path)


@case
def missing_shard(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    on_rank_0(shards(path)[-1].unlink if RANK == 0 else print)
    load(Net(), path)


@case
def tensor_asked_as_int(path: Path) -> None:
    save({"t": torch.tensor(5)}, path)
    dcp.load({"t": 0}, checkpoint_id=path)


@case
def flat_optimizer(path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    flat = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    save({"optim": flat}, path)
    dcp.load({"optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=path)


@case
def wrapped_names(path: Path) -> None:
    save({"model": torch.compile(Net(), backend="eager").state_dict()}, path)
    load(Net(), path)


@case
def no_files(path: Path) -> None:
    path.mkdir(exist_ok=True)
    barrier()
    load(Net(), path, storage_reader=dcp.HuggingFaceStorageReader(str(path)))


class LockedError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}-{second}")
        self.lock = threading.Lock()


class TwoArgumentsError(KeyError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}-{second}")


class Raising(DefaultLoadPlanner):
    """
    Raises on the last rank, while planning.
    """

    def __init__(self, make: Callable[[Any], BaseException]) -> None:
        super().__init__()
        self.make = make

    def create_local_plan(self) -> Any:
        if RANK == WORLD - 1:
            raise self.make(self)
        return super().create_local_plan()


@case
def planner_raises(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(), path, planner=Raising(lambda _: OSError(5, "Input/output error", "/mnt/nfs/shard")))


class NamesGenerator(DefaultLoadPlanner):
    def create_local_plan(self) -> Any:
        wanted = sorted(self.state_dict)
        absent = (key for key in wanted if key.startswith("model.head"))
        view = {"a": 1}.keys()
        if any(absent):
            raise KeyError(f"absent: {absent}, known: {view}, {object()}")
        return super().create_local_plan()


@case
def generator_in_the_text(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(), path, planner=NamesGenerator())


@case
def interrupted(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(), path, planner=Raising(lambda _: KeyboardInterrupt()))


class Reading(DefaultLoadPlanner):
    def resolve_tensor(self, _: Any) -> Any:
        raise RuntimeError("the planner cannot place this")


@case
def reader_raises(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(), path, planner=Reading())


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"a": torch.zeros(2)}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise RuntimeError("cannot take it")


@case
def stateful_raises(path: Path) -> None:
    save({"s": {"a": torch.ones(2)}}, path)
    dcp.load({"s": Stateful()}, checkpoint_id=path)


@case
def partial(path: Path) -> Any:
    save({"model": Net().state_dict()}, path)
    return load(Net(adapters=4), path, planner=DefaultLoadPlanner(allow_partial_load=True))


@case
def casts(path: Path) -> Any:
    save({"model": Net().state_dict()}, path)
    return load(Net().to(torch.bfloat16), path)


@case
def int_asked_as_tensor(path: Path) -> Any:
    save({"step": 7}, path)
    state: dict[str, Any] = {"step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=path)
    return type(state["step"]).__name__, state["step"]


@case
def unpicklable(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(), path, planner=Raising(lambda _: LockedError("x", "y")))


@case
def unbuildable(path: Path) -> None:
    save({"model": Net().state_dict()}, path)
    load(Net(), path, planner=Raising(lambda _: TwoArgumentsError("x", "y")))


def seen(error: BaseException) -> dict[str, Any]:
    """
    What code that catches the exception can depend on. Addresses and line numbers of wrappers differ from run to run.
    """
    failures = getattr(error, "failures", None)
    described: dict[str, Any] = {"type": type(error).__name__, "keys": sorted(vars(error)), "args": len(error.args)}
    if isinstance(failures, dict):
        described["phase"] = error.args[0]
        described["same_object"] = error.args[1] is failures
        described["failures"] = {rank: one(inner) for rank, (inner, _) in failures.items()}
    else:
        described |= one(error)
    return described


def one(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    return {"type": type(error).__name__, "arguments": plain(repr(error.args)), "text": plain(text[0] if text else "")}


def plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", " at @", text)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if WORLD > 1:
        dist.init_process_group("gloo")
    every_rank_answers = WORLD == 1 or os.environ.get("CKPT_SENTRY") == "1"
    watched = os.environ.get("CKPT_SENTRY") == "1"
    outcomes: dict[str, Any] = {}
    for name, run in CASES.items():
        if name in ("unpicklable", "unbuildable") and not every_rank_answers:
            continue  # torch alone hangs here: rank 0 cannot rebuild what the last rank sent
        path = FOLDER / name / "step-7"
        on_rank_0(lambda path=path: (shutil.rmtree(path.parent, ignore_errors=True), path.parent.mkdir(parents=True)))
        faults: list[str] = []
        texts: list[str] = []
        try:
            outcome: dict[str, Any] = {"returned": run(path)}
        except BaseException as error:
            outcome = seen(error)
            texts = str(error).splitlines()
            if watched and name != "interrupted":
                from ckpt_sentry.testing import faults_of

                faults = faults_of(error)
        barrier()
        outcomes[name] = {"outcome": outcome, "faults": faults, "texts": texts}
    every: list[Any] = [None] * WORLD
    if WORLD > 1:
        dist.all_gather_object(every, outcomes)
    else:
        every = [outcomes]
    if RANK == 0:
        print("\n" + json.dumps(every), flush=True)
    barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
