"""
Models whose own load hooks rename or change what accelerate loads: judged after the load, by values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import accelerate
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ckpt_sentry import LowCoverageError
from tests.targets.agents import Agent, codes, fresh, hooked
from tests.targets.nets import Net, before_load, equal, renamed, values


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate"):
        yield


@pytest.fixture(autouse=True)
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    with fresh(tmp_path / "records", monkeypatch) as made:
        yield made


def rename(_module: nn.Module, state: dict[str, torch.Tensor], *_rest: object) -> None:
    for key in [key for key in state if key.startswith("x.")]:
        state[key[2:]] = state.pop(key)


def scale(_module: nn.Module, state: dict[str, torch.Tensor], *_rest: object) -> None:
    state["head.weight"] = state["head.weight"] * 2


@pytest.mark.parametrize(("hook", "tensors"), [(rename, renamed("x.")), (scale, values())], ids=["rename", "scale"])
def test_the_same_load_again_is_no_loss(
    agent: Agent, tmp_path: Path, hook: Callable[..., None], tensors: dict[str, torch.Tensor]
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    model = Net()
    before_load(model, hook)
    for _ in range(3):
        accelerate.load_checkpoint_in_model(model, tmp_path)
    assert [(report.verdict, codes(report)) for report in agent.reports()] == [("ok", [])] * 3


def test_other_keys_that_no_hook_knows_are_refused_after_it(tmp_path: Path) -> None:
    save_file(renamed("x."), tmp_path / "model.safetensors")
    save_file(renamed("y."), tmp_path / "other.safetensors")
    model = Net()
    before_load(model, rename)
    accelerate.load_checkpoint_in_model(model, tmp_path)
    with pytest.raises(LowCoverageError, match=r"0 % of keys"):
        accelerate.load_checkpoint_in_model(model, str(tmp_path / "other.safetensors"))
    assert equal(model, values())


def test_extra_state_may_be_a_tensor(agent: Agent, tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.ones(3)

        def set_extra_state(self, state: torch.Tensor) -> None:
            pass

    save_file(dict(Extra(2, 2).state_dict()), tmp_path / "model.safetensors")
    accelerate.load_checkpoint_in_model(Extra(2, 2), tmp_path)
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])
