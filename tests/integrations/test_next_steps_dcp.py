"""
What a report of `dcp.load` says to do next is done, to the letter, and the load becomes right.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckpt_sentry import LowCoverageError
from ckpt_sentry.core.report import LoadReport
from tests.agents import Agent, hooked
from tests.integrations.nets import Net, values

pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="this torch reads no folders of Hugging Face")

pytestmark = pytest.mark.filterwarnings("ignore")

State = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("torch.distributed.checkpoint.hf_storage", "torch.distributed.checkpoint.format_utils"):
        yield


def save(path: Path, state: State) -> Path:
    dcp.save(state, checkpoint_id=path)
    return path


def step(agent: Agent, code: str) -> str:
    """
    The next step of the one finding of the last load with this code.
    """
    (found,) = (one for one in agent.last().findings if one.code == code)
    assert found.next is not None
    return found.next


def advised(agent: Agent, path: Path, wanted: State, code: str, **options: Any) -> str:
    """
    The next step after a load that goes wrong.
    """
    with contextlib.suppress(dcp.CheckpointException, LowCoverageError):
        dcp.load(wanted, checkpoint_id=path, **options)
    return step(agent, code)


def loads(agent: Agent, path: str | Path, saved: State, **options: Any) -> LoadReport:
    """
    Load what was saved, and demand that it is loaded rightly.
    """
    wanted = {key: torch.zeros_like(value) for key, value in saved.items()}
    dcp.load(wanted, checkpoint_id=path, **options)
    assert all(torch.equal(wanted[key], value) for key, value in saved.items())
    assert agent.last().verdict == "ok"
    return agent.last()


def named(text: str) -> Path:
    """
    The one path in a next step.
    """
    (path,) = re.findall(r"/[^ ,;?]*", text)
    return Path(path)


def test_a_part_is_loaded_as_strict_wants_it(agent: Agent, tmp_path: Path) -> None:
    saved = {key: value for key, value in values().items() if "head" not in key}
    path = save(tmp_path / "d", saved)
    agent.mode("strict")
    said = advised(agent, path, values(2), "missing_keys")
    assert said == (
        "If the missing keys are to start anew: dcp.load(…, planner=DefaultLoadPlanner(allow_partial_load=True)), "
        "and name them in CKPT_SENTRY_ALLOW_MISSING."
    )
    agent.set(ALLOW_MISSING=",".join(agent.last().missing.keys))
    wanted = values(2)
    dcp.load(wanted, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert all(torch.equal(wanted[key], value) for key, value in saved.items())


def test_a_part_that_was_asked_for_is_allowed(agent: Agent, tmp_path: Path) -> None:
    path = save(tmp_path / "d", {key: value for key, value in values().items() if "head" not in key})
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    said = advised(agent, path, values(2), "missing_keys", planner=partial)
    assert said == "If the missing keys are to start anew, name them in CKPT_SENTRY_ALLOW_MISSING."
    agent.set(ALLOW_MISSING=",".join(agent.last().missing.keys))
    dcp.load(values(2), checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert agent.last().verdict == "ok"


def test_renamed_keys_are_asked_for_as_they_are_called(agent: Agent, tmp_path: Path) -> None:
    path = save(tmp_path / "d", {f"module.{key}": value for key, value in values().items()})
    model = Net()
    said = advised(agent, path, model.state_dict(), "renamed_keys")
    assert said == "Ask for them under the names that they have in the checkpoint, and rename them back after the load."
    wanted = {f"module.{key}": value for key, value in model.state_dict().items()}
    dcp.load(wanted, checkpoint_id=path)
    model.load_state_dict({key.removeprefix("module."): value for key, value in wanted.items()})
    assert all(torch.equal(model.state_dict()[key], value) for key, value in values().items())


@pytest.mark.parametrize(
    ("saved", "asked", "right"),
    [(7, torch.zeros(1), 0), (torch.ones(1), 0, torch.zeros(1))],
    ids=["a tensor for a number", "a number for a tensor"],
)
def test_the_type_that_was_saved_is_asked_for(agent: Agent, tmp_path: Path, saved: Any, asked: Any, right: Any) -> None:
    path = save(tmp_path / "d", {"w": torch.ones(2), "steps": saved})
    said = advised(agent, path, {"w": torch.zeros(2), "steps": asked}, "type_mismatch")
    assert said == "Ask for the type that was saved, and convert it after the load."
    wanted = {"w": torch.zeros(2), "steps": right}
    dcp.load(wanted, checkpoint_id=path)
    assert wanted["steps"] == saved
    assert agent.last().findings == ()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def untrained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def moments(state: Any) -> list[Any]:
    """
    All tensors of an optimizer's state, whatever they are called.
    """
    if isinstance(state, torch.Tensor):
        return [state.tolist()]
    return (
        [one for _, value in sorted(state.items(), key=str) for one in moments(value)]
        if isinstance(state, dict)
        else []
    )


@pytest.mark.parametrize(("flat", "by_number"), [(False, False), (True, False), (True, True)])
def test_the_form_of_an_optimizer_state(agent: Agent, tmp_path: Path, *, flat: bool, by_number: bool) -> None:
    saved = get_optimizer_state_dict(*trained(), options=StateDictOptions(flatten_optimizer_state_dict=flat))
    path = save(tmp_path / "d", {"optim": saved})
    model, optimizer = trained()
    other = StateDictOptions(flatten_optimizer_state_dict=not flat)
    asked = optimizer.state_dict() if by_number else get_optimizer_state_dict(model, optimizer, options=other)
    said = advised(agent, path, {"optim": asked}, "flat_optimizer")
    (option,) = re.findall(r"^Pass options=(.*) to get_optimizer_state_dict, as when the checkpoint was saved\.$", said)
    options = eval(option, {"StateDictOptions": StateDictOptions})
    wanted = {"optim": get_optimizer_state_dict(*untrained(), options=options)}
    dcp.load(wanted, checkpoint_id=path)
    assert moments(wanted) == moments({"optim": saved})
    assert agent.last().findings == ()


@pytest.mark.parametrize("flat", [False, True])
def test_an_optimizer_state_by_number(agent: Agent, tmp_path: Path, *, flat: bool) -> None:
    saved = trained()[1].state_dict()
    path = save(tmp_path / "d", {"optim": saved})
    model, optimizer = untrained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    asked = get_optimizer_state_dict(model, optimizer, options=options)
    assert advised(agent, path, {"optim": asked}, "optimizer_names_differ") == (
        "Ask for optimizer.state_dict(), as when the checkpoint was saved, once "
        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) has made its state."
    )
    model, optimizer = untrained()
    get_optimizer_state_dict(model, optimizer)
    wanted = {"optim": optimizer.state_dict()}
    dcp.load(wanted, checkpoint_id=path)
    assert moments(wanted) == moments({"optim": saved})
    assert agent.last().findings == ()


def test_an_optimizer_state_by_name(agent: Agent, tmp_path: Path) -> None:
    saved = get_optimizer_state_dict(*trained())
    path = save(tmp_path / "d", {"optim": saved})
    assert advised(agent, path, {"optim": trained()[1].state_dict()}, "optimizer_names_differ") == (
        "Take the state dict by torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), "
        "as when the checkpoint was saved."
    )
    wanted = {"optim": get_optimizer_state_dict(*untrained())}
    dcp.load(wanted, checkpoint_id=path)
    assert moments(wanted) == moments({"optim": saved})
    assert agent.last().findings == ()


def test_an_optimizer_of_another_class_is_left_out(agent: Agent, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path / "d", {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)})
    new = torch.nn.Linear(2, 2)
    other = torch.optim.SGD(new.parameters(), momentum=0.9)
    wanted = {"model": new.state_dict(), "optim": get_optimizer_state_dict(new, other)}
    assert advised(agent, path, wanted, "optimizer_class_changed") == (
        "Load with AdamW or Adam as at save time, or leave the optimizer out of the load and start it anew."
    )
    dcp.load({"model": wanted["model"]}, checkpoint_id=path)
    assert torch.equal(new.weight, model.weight)
    assert agent.last().verdict == "ok"
    again, adam = untrained()
    dcp.load({"model": again.state_dict(), "optim": get_optimizer_state_dict(again, adam)}, checkpoint_id=path)
    assert agent.last().verdict == "ok"


def test_a_parameter_that_never_had_a_gradient(agent: Agent, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    path = save(tmp_path / "d", {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)})
    anew = torch.optim.AdamW(model.parameters())
    wanted = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, anew)}
    said = advised(agent, path, wanted, "missing_keys")
    whole, none = (one.text for one in agent.last().findings if one.level == "info")
    assert whole == 'All 4 keys under "model" are there: what is missing lies under "optim" alone.'
    assert none.startswith("The optimizer had no state for 2 parameters when it was saved, as before a first gradient:")
    assert none.endswith(": idle.{bias,weight}.")
    assert "allow_partial_load=True" in said
    dcp.load(wanted, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert wanted["optim"]["state"]["used.weight"]["step"] == 1
    assert not wanted["optim"]["state"]["idle.weight"]["exp_avg"].any()


def test_a_path_that_does_not_exist(agent: Agent, tmp_path: Path) -> None:
    saved = values()
    save(tmp_path / "step-100", saved)
    said = advised(agent, tmp_path / "step-200", values(2), "path_missing")
    assert said == f"load {tmp_path}/step-100, the newest there"
    loads(agent, named(said), saved)
    unfinished = save(tmp_path / "step-150", saved)
    (unfinished / ".metadata").unlink()
    said = advised(agent, tmp_path / "step-200", values(2), "path_missing")
    assert said == f"load {tmp_path}/step-100, the newest there that is whole"
    loads(agent, named(said), saved)
    said = advised(agent, tmp_path / "setp-100", values(2), "path_missing")
    assert said == f"did you mean {tmp_path}/step-100?"
    loads(agent, named(said), saved)
    assert advised(agent, tmp_path / "setp-150", values(2), "path_missing") == (
        f"load {tmp_path}/step-100, the newest there that is whole"
    )


def test_a_newer_save_that_has_not_finished_is_named(agent: Agent, tmp_path: Path) -> None:
    saved = values()
    for name in ("step-90", "step-100", "step-150"):
        save(tmp_path / name, saved)
    assert loads(agent, tmp_path / "step-100", saved).findings == ()
    (tmp_path / "step-150" / ".metadata").unlink()
    (found,) = loads(agent, tmp_path / "step-100", saved).findings
    assert (found.code, found.level) == ("newer_unfinished", "info")
    assert found.text == "step-150, newer and in the same folder, has no .metadata: its save has not finished"


def _no_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def _bad_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"\x80\x04")


def _no_shard(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def _empty_shard(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 0)


def _cut_shard(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 900)


def _garbled_shard(path: Path) -> None:
    shard = path / "__0_0.distcp"
    shard.write_bytes(b"\0" * shard.stat().st_size)


def _nothing(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        (_no_metadata, "metadata_missing"),
        (_bad_metadata, "metadata_unreadable"),
        (_no_shard, "shard_missing"),
        (_empty_shard, "shard_empty"),
        (_cut_shard, "shard_truncated"),
        (_garbled_shard, "shard_damaged"),
        (_nothing, "no_checkpoint_files"),
    ],
)
def test_another_checkpoint_is_loaded_instead(agent: Agent, tmp_path: Path, harm: Any, code: str) -> None:
    saved = values()
    for name in ("step-100", "step-200", "step-300"):
        save(tmp_path / name, saved)
    # The nearest one is no help: it is damaged as well.
    _no_shard(tmp_path / "step-200")
    harm(tmp_path / "step-300")
    said = advised(agent, tmp_path / "step-300", values(2), code)
    assert f"load {tmp_path}/step-100, or save again" in said
    loads(agent, named(said), saved)
    if said.startswith("copy it again"):
        save(tmp_path / "elsewhere", saved)
        shutil.copy(tmp_path / "elsewhere" / "__0_0.distcp", tmp_path / "step-300")
        loads(agent, tmp_path / "step-300", saved)


def test_a_folder_of_checkpoints(agent: Agent, tmp_path: Path) -> None:
    saved = values()
    for name in ("step-100", "step-200"):
        save(tmp_path / name, saved)
    _cut_shard(tmp_path / "step-200")
    said = advised(agent, tmp_path, values(2), "no_checkpoint_files")
    assert said == f"load {tmp_path}/step-100"
    loads(agent, named(said), saved)


def test_a_shard_in_place_of_its_folder(agent: Agent, tmp_path: Path) -> None:
    saved = values()
    said = advised(agent, save(tmp_path / "d", saved) / "__0_0.distcp", values(2), "path_is_file")
    assert said == f"give the folder: {tmp_path}/d"
    loads(agent, named(said), saved)


def test_a_file_of_torch_save(agent: Agent, tmp_path: Path) -> None:
    saved, path = values(), tmp_path / "model.pt"
    torch.save(saved, path)
    said = advised(agent, path, values(2), "torch_save_file")
    assert said == (
        "load it with torch.load, or convert it with torch_save_to_dcp of torch.distributed.checkpoint.format_utils"
    )
    assert torch.load(path).keys() == saved.keys()
    format_utils.torch_save_to_dcp(path, tmp_path / "d")
    loads(agent, tmp_path / "d", saved)


def test_a_file_of_safetensors(agent: Agent, tmp_path: Path) -> None:
    saved, path = values(), tmp_path / "model.safetensors"
    safetensors.torch.save_file(saved, path)
    assert advised(agent, path, values(2), "safetensors_file") == "load it with safetensors.torch.load_file"
    assert safetensors.torch.load_file(path).keys() == saved.keys()
    said = advised(agent, tmp_path, values(2), "safetensors_file")
    (reader,) = re.findall(r"^give storage_reader=(.*), or load them with safetensors$", said)
    words = {"HuggingFaceStorageReader": dcp.HuggingFaceStorageReader, "path": str(tmp_path)}
    loads(agent, str(tmp_path), saved, storage_reader=eval(reader, words))


def test_a_distributed_checkpoint_for_the_reader_of_hugging_face(agent: Agent, tmp_path: Path) -> None:
    saved = values()
    path = save(tmp_path / "d", saved)
    said = advised(agent, path, values(2), "dcp_checkpoint", storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert said == "give FileSystemReader instead of HuggingFaceStorageReader"
    loads(agent, path, saved, storage_reader=dcp.FileSystemReader(path))


def test_objects_that_were_put_into_a_copy(agent: Agent, tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"w": torch.ones(2), "steps": 7})
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    wanted = {"w": torch.zeros(2), "steps": 0}
    said = advised(agent, path, wanted, "values_not_loaded", planner=planner)
    assert wanted["steps"] == 0
    (option,) = re.findall(r"^Give the planner (flatten_sharded_tensors=False) as well", said)
    planner = eval(f"dcp.DefaultLoadPlanner(flatten_state_dict=False, {option})", {"dcp": dcp})
    dcp.load(wanted, checkpoint_id=path, planner=planner)
    assert (wanted["steps"], agent.last().findings) == (7, ())


def test_an_earlier_step_without_nan(agent: Agent, tmp_path: Path) -> None:
    save(tmp_path / "step-1", {"w": torch.ones(2)})
    path = save(tmp_path / "step-2", {"w": torch.full((2,), torch.nan)})
    said = advised(agent, path, {"w": torch.zeros(2)}, "non_finite_values")
    assert said.endswith("load an earlier step and compare.")
    loads(agent, tmp_path / "step-1", {"w": torch.ones(2)})


def test_the_model_is_built_as_it_was_saved(agent: Agent, tmp_path: Path) -> None:
    saved = values()
    path = save(tmp_path / "d", saved)
    wanted = {**values(2), "head.weight": torch.zeros(32, 8)}
    said = advised(agent, path, wanted, "shape_mismatch")
    assert said == "Build the model with the configuration that the checkpoint was saved with."
    loads(agent, path, saved)
