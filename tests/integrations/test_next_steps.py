"""
What a report says to do next is done, to the letter, and helps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, load_model, save_file
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import ckpt_sentry
from ckpt_sentry import LowCoverageError, unify_keys
from ckpt_sentry.render.note import note
from tests.agents import Agent, hooked
from tests.integrations.hosts import renames
from tests.integrations.nets import Net, equal, renamed, values

START = "Rename its keys: "


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate.checkpointing", "transformers.modeling_utils"):
        yield


def steps(report: Any) -> list[str]:
    return [one.next for one in report.findings if one.next]


def run(step: str, **names: Any) -> Any:
    """
    Run the call in a next step.
    """
    words = {"DefaultLoadPlanner": dcp.DefaultLoadPlanner, "safetensors": safetensors, **globals(), **names}
    return eval(step.removeprefix(START).removesuffix("."), words)


@pytest.mark.parametrize("options", [{}, {"strict": False}], ids=str)
def test_load_state_dict(agent: Agent, options: dict[str, bool]) -> None:
    model, state_dict = Net(), renamed("module.")
    with contextlib.suppress(RuntimeError):
        model.load_state_dict(state_dict, **options)
    (step,) = steps(agent.last())
    assert f"  next: {step}" in note(agent.last()).splitlines()
    assert ("strict=False" in step) is bool(options)
    assert run(step, model=model, state_dict=state_dict) == ([], [])
    assert equal(model, values())


def test_load_state_dict_without_a_part(agent: Agent) -> None:
    given = {key: value for key, value in values().items() if "head" not in key}
    with pytest.raises(RuntimeError, match="Missing key"):
        Net().load_state_dict(given)
    (step,) = steps(agent.last())
    assert step == "If the missing keys are to start anew: load_state_dict(…, strict=False)."
    Net().load_state_dict(given, strict=False)


@pytest.mark.usefixtures("agent")
def test_no_loose_load_is_proposed_where_shapes_would_end_it() -> None:
    given = {key: value for key, value in values().items() if "embed" not in key} | {"head.weight": torch.zeros(3, 8)}
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        Net().load_state_dict(given)
    assert steps(caught.value.ckpt_sentry) == [
        "Build the model with the configuration that the checkpoint was saved with."
    ]


def test_set_model_state_dict(agent: Agent) -> None:
    model, given = Net(), renamed("module.")
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        set_model_state_dict(model, dict(given))
    (step,) = steps(agent.last())
    run(step, model=model, model_state_dict=given)
    assert equal(model, values())


def test_load_model(agent: Agent, tmp_path: Path) -> None:
    model, filename = Net(), tmp_path / "m.safetensors"
    save_file(renamed("module."), filename)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_model(model, filename)
    (step,) = steps(agent.last())
    run(step, model=model, filename=filename)
    assert equal(model, values())


@pytest.mark.parametrize("dispatches", [True, False])
def test_loaders_of_accelerate(agent: Agent, tmp_path: Path, *, dispatches: bool) -> None:
    path, model = tmp_path / "m.safetensors", Net()
    save_file(renamed("module."), path, metadata={"format": "pt"})

    def load() -> None:
        if dispatches:
            load_checkpoint_and_dispatch(model, str(path), device_map={"": "cpu"})
        else:
            load_checkpoint_in_model(model, str(path))

    with pytest.raises(LowCoverageError, match=r"Set CKPT_SENTRY_ALIGN=auto\.") as caught:
        load()
    assert steps(caught.value.ckpt_sentry) == ["Set CKPT_SENTRY_ALIGN=auto."]
    agent.mode("observe")
    load()
    assert steps(agent.last()) == ["Set CKPT_SENTRY=1 and CKPT_SENTRY_ALIGN=auto."]
    agent.mode("1")
    agent.set(ALIGN="auto")
    load()
    assert equal(model, values())


def test_a_rename_that_leaves_a_gap_is_no_matter_of_a_setting(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state_dict = {key: value for key, value in renamed("module.").items() if "head" not in key}
    save_file(state_dict, path, metadata={"format": "pt"})
    with pytest.raises(LowCoverageError) as caught:
        load_checkpoint_in_model(Net(), str(path))
    (step,) = steps(caught.value.ckpt_sentry)
    assert step == "Save ckpt_sentry.unify_keys(state_dict, model).state_dict, and load that."
    save_file(ckpt_sentry.unify_keys(state_dict, Net()).state_dict, path, metadata={"format": "pt"})
    with pytest.raises(LowCoverageError) as caught:
        load_checkpoint_in_model(Net(), str(path))
    (step,) = steps(caught.value.ckpt_sentry)
    assert step == "Mend the cause; if the gap is wanted: CKPT_SENTRY_ALLOW_MISSING='head.*'."
    agent.mode("observe")
    load_checkpoint_in_model(Net(), str(path))
    assert steps(agent.last()) == ["If the missing keys are to start anew: CKPT_SENTRY_ALLOW_MISSING='head.*'."]
    agent.mode("1")
    agent.set(ALLOW_MISSING="head.*")
    load_checkpoint_in_model(Net(), str(path))
    assert agent.last().verdict == "ok"


def test_load_state_of_an_accelerator(agent: Agent, tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    accelerator.save_state(str(tmp_path / "state"))
    save_file(renamed("module."), tmp_path / "state" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LowCoverageError, match=r"Set CKPT_SENTRY_ALIGN=auto\."):
        accelerator.load_state(str(tmp_path / "state"))
    assert steps(agent.last()) == ["Set CKPT_SENTRY_ALIGN=auto."]
    agent.set(ALIGN="auto")
    accelerator.load_state(str(tmp_path / "state"))
    assert equal(model, values())


def test_from_pretrained(agent: Agent, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    saved = load_file(path)
    save_file({f"module.{key}": value for key, value in saved.items()}, path, metadata={"format": "pt"})
    with pytest.raises(LowCoverageError):
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    (step,) = steps(agent.last())
    if renames():
        run(step.replace("…", "path").replace("Rename the keys: ", "transformers.GPT2LMHeadModel."), path=tmp_path)
    else:
        assert step == "Save ckpt_sentry.unify_keys(state_dict, model).state_dict, and load that."
        state = unify_keys(load_file(path), transformers.GPT2LMHeadModel(config)).state_dict
        save_file(state, path, metadata={"format": "pt"})
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert agent.last().verdict == "ok"


def test_another_model_of_transformers(agent: Agent, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    save_file({"quite.another": torch.zeros(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LowCoverageError, match="28 of 28 keys of the model") as caught:
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    report = agent.last()
    assert steps(report) == ["Check that the checkpoint belongs to this model."]
    assert (report.model.keys, report.missing.count) == (28, 28)
    assert "0 of 28 keys would load" in report.findings[0].text
    assert str(caught.value).endswith("next        Check that the checkpoint belongs to this model.")


def test_dcp_load(agent: Agent, tmp_path: Path) -> None:
    wanted = values()
    dcp.save({key: value for key, value in wanted.items() if "head" not in key}, checkpoint_id=tmp_path / "d")
    with pytest.raises(dcp.CheckpointException):
        dcp.load(dict(wanted), checkpoint_id=tmp_path / "d")
    (step,) = steps(agent.last())
    call = step.removeprefix("If the missing keys are to start anew: ")
    run(call.replace("…", "wanted, checkpoint_id=path"), wanted=wanted, path=tmp_path / "d")
    assert agent.last().verdict == "partial"


def test_dcp_load_where_shapes_would_end_a_partial_load_as_well(agent: Agent, tmp_path: Path) -> None:
    saved = {key: value for key, value in values().items() if "embed" not in key} | {"head.weight": torch.zeros(3, 8)}
    dcp.save(saved, checkpoint_id=tmp_path / "d")
    with pytest.raises(dcp.CheckpointException):
        dcp.load(values(), checkpoint_id=tmp_path / "d")
    assert steps(agent.last()) == ["Build the model with the configuration that the checkpoint was saved with."]


def test_dcp_load_into_a_model_that_is_too_deep(agent: Agent, tmp_path: Path) -> None:
    dcp.save({key: value for key, value in values().items() if "layers.1" not in key}, checkpoint_id=tmp_path / "d")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(values(), checkpoint_id=tmp_path / "d")
    assert steps(agent.last()) == [
        "The checkpoint has one of layers, 0: build the model with 1.",
        "If the missing keys are to start anew: dcp.load(…, planner=DefaultLoadPlanner(allow_partial_load=True)).",
    ]
    assert "  next: The checkpoint has one of layers" in note(caught.value.ckpt_sentry)
