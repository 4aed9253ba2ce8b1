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
from tests.agents import Agent, codes, fresh, hooked
from tests.integrations.nets import Net, before_load, equal, renamed, values


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


def test_a_compiled_model_is_loaded_by_its_own_names_or_refused(agent: Agent, tmp_path: Path) -> None:
    save_file(values(), tmp_path / "model.safetensors")
    compiled = torch.compile(Net(), backend="eager")
    try:
        accelerate.load_checkpoint_in_model(compiled, tmp_path)
    except LowCoverageError:
        # accelerate 1.2 calls the state dict of the wrapper, which leaves the model as it was.
        report = agent.last()
        assert (codes(report)[0], report.rename.rule) == ("renamed_keys", 'add the prefix "_orig_mod."')
        agent.set(ALIGN="auto")
        accelerate.load_checkpoint_in_model(compiled, tmp_path)
    assert agent.last().verdict == "ok"
    assert equal(compiled._orig_mod, values())


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


class Packed(nn.Module):
    """
    A module whose pre-hook packs two weights into one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 8, bias=False)
        self.register_load_state_dict_pre_hook(pack)


def pack(_module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *_rest: object) -> None:
    if f"{prefix}one.weight" in state:
        parts = [state.pop(f"{prefix}{name}.weight") for name in ("one", "two")]
        state[f"{prefix}both.weight"] = torch.cat(parts)


def test_hooks_that_a_map_leaves_out_are_named_and_the_step_works(agent: Agent, tmp_path: Path) -> None:
    tensors = {f"{i}.{name}.weight": torch.rand(4, 4) for i in range(2) for name in ("one", "two")}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LowCoverageError, match=r"Load pre-hooks that may rename these keys \(0, 1\)") as caught:
        accelerate.load_checkpoint_and_dispatch(nn.Sequential(Packed(), Packed()), tmp_path, device_map={"": "cpu"})
    assert "Check that the checkpoint belongs" not in str(caught.value)
    assert [one.next for one in agent.last().findings if one.next] == ["Pass device_map=None: then they are called."]
    model = nn.Sequential(Packed(), Packed())
    accelerate.load_checkpoint_and_dispatch(model, tmp_path, device_map=None)
    assert agent.last().verdict == "ok"
    assert torch.equal(model[1].both.weight[:4], tensors["1.one.weight"])


def test_a_hook_elsewhere_in_the_model_is_no_cause(agent: Agent, tmp_path: Path) -> None:
    save_file({"0.other.weight": torch.rand(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(LowCoverageError):
        accelerate.load_checkpoint_in_model(nn.Sequential(nn.Linear(4, 4), Packed()), tmp_path, device_map={"": "cpu"})
    assert "load_hooks_skipped" not in codes(agent.last())


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["none", "map"])
def test_codes_without_their_scales_are_wrong_values(
    agent: Agent, tmp_path: Path, device_map: dict[str, str] | None
) -> None:
    codes_ = torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4)
    save_file({"0.weight": codes_, "0.SCB": torch.rand(4)}, tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    accelerate.load_checkpoint_in_model(model, tmp_path, device_map=device_map)
    assert (agent.last().verdict, codes(agent.last())) == ("wrong_values", ["quantized_state_dropped"])
    agent.mode("strict")
    with pytest.raises(LowCoverageError, match="its numbers are codes, not values"):
        accelerate.load_checkpoint_in_model(model, tmp_path, device_map=device_map)
