"""
docs/policy.md, cell by cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, load_model, save_file
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from ckpt_sentry import LowCoverageError
from tests.agents import Agent, hooked
from tests.integrations.nets import Net, renamed, values

POLICY = Path(__file__).parents[2] / "docs" / "policy.md"
STATES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "nothing": lambda: renamed("module."),
    "a part": lambda: {key: value for key, value in values().items() if "head" not in key},
}
BERT = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate.checkpointing", "transformers.modeling_utils"):
        yield


class Cell(NamedTuple):
    call: str
    state: str
    mode: str
    outcome: str


def cells() -> Iterator[Cell]:
    lines = [line for line in POLICY.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    modes = [cell.strip() for cell in lines[0].split("|")[3:-1]]
    for line in lines[2:]:
        call, state, *outcomes = (cell.strip(" `") for cell in line.split("|")[1:-1])
        for mode, outcome in zip(modes, outcomes, strict=True):
            yield Cell(call, state, mode, outcome)


def file_of(folder: Path, state: str) -> Path:
    path = folder / "model.safetensors"
    save_file(STATES[state](), path, metadata={"format": "pt"})
    return path


def load_state(folder: Path, state: str, **settings: bool) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    (folder / "state").mkdir()
    file_of(folder / "state", state)
    torch.save({}, folder / "state" / "random_states_0.pkl")
    accelerator.load_state(str(folder / "state"), **settings)


def from_pretrained(folder: Path, state: str) -> None:
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(folder / "bert")
    path = folder / "bert" / "model.safetensors"
    held = load_file(path)
    if state == "nothing":
        held = {f"module.{key}": value for key, value in held.items()}
    save_file({key: held[key] for key in held if "layer.1." not in key}, path, metadata={"format": "pt"})
    transformers.BertModel.from_pretrained(folder / "bert")


def dcp_load(folder: Path, state: str, *, partial: bool = False) -> None:
    dcp.save(STATES[state](), checkpoint_id=folder / "dcp")
    dcp.load(
        Net().state_dict(),
        checkpoint_id=folder / "dcp",
        planner=dcp.DefaultLoadPlanner(allow_partial_load=partial),
    )


CALLS: dict[str, Callable[[Path, str], object]] = {
    "load_checkpoint_and_dispatch(…)": lambda folder, state: load_checkpoint_and_dispatch(
        Net(), str(file_of(folder, state)), device_map={"": "cpu"}
    ),
    "load_checkpoint_in_model(…)": lambda folder, state: load_checkpoint_in_model(Net(), str(file_of(folder, state))),
    "Accelerator.load_state(…)": load_state,
    "Accelerator.load_state(…, strict=False)": lambda folder, state: load_state(folder, state, strict=False),
    "load_state_dict(…)": lambda _, state: Net().load_state_dict(STATES[state]()),
    "load_state_dict(…, strict=False)": lambda _, state: Net().load_state_dict(STATES[state](), strict=False),
    "safetensors.torch.load_model(…)": lambda folder, state: load_model(Net(), file_of(folder, state)),
    "set_model_state_dict(…)": lambda _, state: set_model_state_dict(Net(), STATES[state]()),
    "from_pretrained(…)": from_pretrained,
    "dcp.load(…)": dcp_load,
    "dcp.load(…, allow_partial_load=True)": lambda folder, state: dcp_load(folder, state, partial=True),
}


@pytest.mark.parametrize("cell", list(cells()), ids=" ".join)
def test_the_table_is_what_happens(agent: Agent, tmp_path: Path, cell: Cell) -> None:
    agent.mode("1" if cell.mode == "on" else cell.mode)
    try:
        CALLS[cell.call](tmp_path, cell.state)
    except LowCoverageError as error:
        got, report = "refused", error.ckpt_sentry
    except (RuntimeError, dcp.CheckpointException) as error:
        got, report = "host's error", error.ckpt_sentry
    else:
        got, report = "said", agent.last()
    assert (got, report) == (cell.outcome, agent.last())
    assert (report.error is None) is (got == "said")
    # What the agent refuses is judged by what came in, or would have.
    assert report.verdict == ("failed" if got == "host's error" else "no_op" if cell.state == "nothing" else "partial")


def test_every_call_is_in_the_table_with_every_state_and_mode() -> None:
    wanted = {(call, state, mode) for call in CALLS for state in STATES for mode in ("on", "observe", "strict")}
    assert {cell[:3] for cell in cells()} == wanted
