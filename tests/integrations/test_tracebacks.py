"""Between a program's line and the line that raised stands at most one frame of the agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import load_checkpoint_and_dispatch, load_checkpoint_in_model
from safetensors.torch import load_file, load_model, save_file
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from transformers import GPT2Config, GPT2Model

import ckpt_sentry
from ckpt_sentry import LowCoverageError
from tests.agents import Agent, hooked
from tests.frames import ours
from tests.integrations.nets import Net, renamed, values

OURS = f"{Path(ckpt_sentry.__file__).parent}{os.sep}"
"""The folder of the package: another's may bear its name too."""


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate", "transformers.modeling_utils", "torch.distributed.checkpoint"):
        yield


def small() -> dict[str, torch.Tensor]:
    return {**values(), "head.weight": torch.ones(2, 2)}


def dcp_with_a_missing_key(folder: Path) -> None:
    dcp.save({"model": values()}, checkpoint_id=folder)
    dcp.load({"model": {**values(), "more": torch.ones(2)}}, checkpoint_id=folder)


def dcp_without_a_file(folder: Path) -> None:
    dcp.save({"model": values()}, checkpoint_id=folder)
    next(folder.glob("*.distcp")).unlink()
    dcp.load({"model": values()}, checkpoint_id=folder)


def in_model(folder: Path) -> None:
    save_file(small(), folder / "model.safetensors")
    load_checkpoint_in_model(Net(), str(folder), device_map={"": "cpu"})


def refused(folder: Path) -> None:
    save_file(renamed("module."), folder / "model.safetensors")
    load_checkpoint_and_dispatch(Net(), str(folder), device_map={"": "cpu"})


def pretrained(folder: Path) -> None:
    GPT2Model(GPT2Config(n_embd=4, n_head=1, n_layer=1, vocab_size=8, n_positions=4)).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"x" * 64)
    GPT2Model.from_pretrained(folder)


def safetensors_model(folder: Path) -> None:
    save_file(renamed("module."), folder / "x.safetensors")
    load_model(Net(), folder / "x.safetensors")


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    ("load", "error"),
    [
        (lambda _: Net().load_state_dict(renamed("module.")), RuntimeError),
        (lambda _: set_model_state_dict(Net(), small()), RuntimeError),
        (lambda folder: torch.load(folder / "absent.pt"), FileNotFoundError),
        (lambda folder: load_file(folder / "absent.safetensors"), FileNotFoundError),
        (safetensors_model, RuntimeError),
        (dcp_with_a_missing_key, dcp.api.CheckpointException),
        (dcp_without_a_file, dcp.api.CheckpointException),
        (in_model, (ValueError, RuntimeError)),
        (refused, LowCoverageError),
        (pretrained, Exception),
    ],
    ids=[
        *("module", "state_dict", "torch.load", "load_file", "load_model", "dcp keys", "dcp files"),
        *("accelerate", "refused", "transformers"),
    ],
)
def test_at_most_one_frame(tmp_path: Path, load: Callable[[Path], object], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        load(tmp_path)
    assert len(ours(caught.value)) <= 1
    assert OURS not in str(caught.value)


def test_what_torch_prints_of_a_failing_rank_has_none(agent: Agent, tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp_with_a_missing_key(tmp_path)
    ((_, frames),) = caught.value.failures.values()
    assert [frame.name for frame in frames if frame.filename.startswith(OURS)] == []
    assert agent.last().verdict == "failed"
