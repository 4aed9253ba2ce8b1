from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckpt_sentry.integrations.dcp.optimizer import not_filled
from tests.agents import Agent, codes, hooked


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked():
        yield


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def test_an_optimizer_that_has_made_no_step(agent: Agent, tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "step-7", no_dist=True)
    model, optimizer = fresh()
    wanted = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert wanted["optimizer"]["state"] == {}
    report = agent.last()
    assert codes(report) == ["optimizer_missing"]
    assert report.findings[-1].text == (
        "6 keys of the optimizer's state were not asked for: optimizer.state.{0-1}.{exp_avg,exp_avg_sq,step}."
    )


def test_an_optimizer_whose_state_was_made(agent: Agent, tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "step-7", no_dist=True)
    wanted = {"optimizer": get_optimizer_state_dict(*fresh())}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert codes(agent.last()) == []


def test_the_state_is_asked_for_as_the_step_says(agent: Agent, tmp_path: Path) -> None:
    _model, optimizer = trained()
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    new = fresh()
    dcp.load({"optimizer": new[1].state_dict()}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert next_step(agent) == (
        "An optimizer that has made no step has no state to ask for: call torch.distributed.checkpoint.state_dict."
        "get_optimizer_state_dict(model, optimizer), which makes it, and take optimizer.state_dict() after that."
    )
    get_optimizer_state_dict(*new)
    wanted = {"optimizer": new[1].state_dict()}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert codes(agent.last()) == []
    assert moments(wanted["optimizer"]) == moments(optimizer.state_dict())


def test_the_state_is_asked_for_by_name_as_the_step_says(agent: Agent, tmp_path: Path) -> None:
    saved = get_optimizer_state_dict(*trained())
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    new = fresh()
    dcp.load({"optimizer": new[1].state_dict()}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert next_step(agent) == (
        "An optimizer that has made no step has no state to ask for: take its state dict by "
        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), which makes it."
    )
    wanted = {"optimizer": get_optimizer_state_dict(*new)}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert codes(agent.last()) == []
    assert moments(wanted["optimizer"]) == moments(saved)


@pytest.mark.parametrize("flat", [False, True])
def test_no_state_is_made_while_gradients_are_alive(agent: Agent, tmp_path: Path, *, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(*trained(), options=options)
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    model, optimizer = fresh()
    model(torch.ones(1, 2)).sum().backward()
    wanted = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert next_step(agent) == (
        "torch makes no optimizer state to ask for while a parameter has a gradient: "
        "call optimizer.zero_grad() before the state dict is taken."
    )
    optimizer.zero_grad()
    wanted = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert codes(agent.last()) == []


def next_step(agent: Agent) -> str | None:
    (step,) = (found.next for found in agent.last().findings if found.code == "optimizer_missing")
    return step


def moments(state_dict: Any) -> list[Any]:
    return [value.tolist() for state in state_dict["state"].values() for _, value in sorted(state.items())]


def test_a_model_alone(agent: Agent, tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "step-7", no_dist=True)
    dcp.load({"model": fresh()[0].state_dict()}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert codes(agent.last()) == []


@pytest.mark.parametrize(
    ("wanted", "unexpected", "is_said"),
    [
        (["param_groups"], ["state.0.exp_avg"], True),
        (["optim.param_groups.0.lr"], ["optim.state.0.exp_avg"], True),
        (["optim.param_groups"], ["other.state.0.exp_avg"], False),
        (["optim.param_groups", "optim.state.1.step"], ["optim.state.0.step"], False),
        (["my_param_groups"], ["my_state.0"], False),
        (["model.weight"], ["state.0.exp_avg"], False),
    ],
)
def test_whose_state_it_is(wanted: list[str], unexpected: list[str], is_said: bool) -> None:  # noqa: FBT001
    assert (not_filled(dict.fromkeys(wanted), unexpected) is not None) == is_said
