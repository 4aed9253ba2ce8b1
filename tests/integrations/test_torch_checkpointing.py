"""
Loads through torch_checkpointing itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_sentry import LowCoverageError
from tests.agents import Agent, hooked

pytest.importorskip(
    "torch_checkpointing", reason="this torch is older than 2.11, or torch_checkpointing is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    with hooked("torch_checkpointing"):
        yield


@pytest.fixture
def manager() -> Iterator[Any]:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
    )
    made = CheckpointManager(config)
    yield made
    made.close()


def net(layers: int = 2, width: int = 2) -> nn.Sequential:
    torch.manual_seed(layers)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def prefixed(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"module.{key}": value for key, value in model.state_dict().items()}


def test_a_good_load(agent: Agent, manager: Any, tmp_path: Path) -> None:
    saved, model = net(), net(width=2)
    manager.save(tmp_path / "step-3", {"model": saved.state_dict(), "step": 3})
    manager.load(tmp_path / "step-3", into={"model": model.state_dict(), "step": 0})
    report = agent.last()
    assert (report.verdict, report.framework, report.entry_point) == (
        "ok",
        "torch_checkpointing",
        "CheckpointManager.load",
    )
    assert (report.step, report.coverage.keys, report.model.keys, report.findings) == (3, 1.0, 5, ())
    assert len(agent.reports()) == 1
    assert torch.equal(model[0].weight, saved[0].weight)


def test_nothing_enters_by_a_prefix(agent: Agent, manager: Any, tmp_path: Path) -> None:
    manager.save(tmp_path / "step-4", {"model": prefixed(net())})
    with pytest.raises(LowCoverageError) as caught:
        manager.load(tmp_path / "step-4", into={"model": net().state_dict()})
    report = agent.last()
    assert caught.value.ckpt_sentry == report
    assert (report.verdict, report.missing.count, report.unexpected.count) == ("no_op", 4, 4)
    assert (report.rename.rule, report.rename.coverage) == ('strip "module." wherever it stands', 1.0)


def test_who_says_strict_false_gets_what_there_is(agent: Agent, manager: Any, tmp_path: Path) -> None:
    manager.save(tmp_path / "step-4", {"model": prefixed(net())})
    manager.load(tmp_path / "step-4", into={"model": net().state_dict()}, strict=False)
    assert agent.last().verdict == "no_op"
    agent.mode("strict")
    with pytest.raises(LowCoverageError):
        manager.load(tmp_path / "step-4", into={"model": net().state_dict()}, strict=False)


def test_a_part(agent: Agent, manager: Any, tmp_path: Path) -> None:
    manager.save(tmp_path / "step-3", {"model": net().state_dict()})
    manager.load(tmp_path / "step-3", into={"model": net(3).state_dict()})
    report = agent.last()
    assert (report.verdict, report.missing.keys) == ("partial", ("model.2.{bias,weight}",))
    with pytest.raises(RuntimeError, match="is missing keys") as caught:
        manager.load(tmp_path / "step-3", into={"model": net(3).state_dict()}, strict=True)
    report = agent.last()
    assert (report.verdict, report.missing.count, caught.value.ckpt_sentry) == ("failed", 2, report)  # type: ignore[attr-defined]


def test_other_shapes_are_named(agent: Agent, manager: Any, tmp_path: Path) -> None:
    manager.save(tmp_path / "step-3", {"model": net().state_dict()})
    with pytest.raises(RuntimeError, match="must match"):
        manager.load(tmp_path / "step-3", into={"model": net(width=3).state_dict()})
    shapes = {(one.keys, one.model_shape, one.checkpoint_shape) for one in agent.last().mismatched}
    assert shapes == {("model.{0-1}.bias", (3,), (2,)), ("model.{0-1}.weight", (3, 3), (2, 2))}


def test_a_folder_that_is_not_there(agent: Agent, manager: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        manager.load(tmp_path / "step-9", into={"model": net().state_dict()})
    assert [finding.code for finding in agent.last().findings] == ["path_missing"]


def test_optimizer_state_is_compared_by_what_the_library_says(agent: Agent, manager: Any, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    manager.save(tmp_path / "step-5", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    state = optimizer.state_dict()
    state["state"][9] = {"exp_avg": torch.zeros(2)}
    manager.load(tmp_path / "step-5", into={"model": model.state_dict(), "optimizer": state})
    report = agent.last()
    assert (report.verdict, report.missing.keys) == ("partial", ("optimizer.state.9.exp_avg",))


def test_the_loader_by_itself(agent: Agent, manager: Any, tmp_path: Path) -> None:
    manager.save(tmp_path / "step-3", {"model": net().state_dict()})
    with pytest.raises(TypeError):
        manager._loader.load(nonsense=1)
    assert agent.reports() == []
