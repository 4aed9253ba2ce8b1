from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.agents import Agent, codes, hooked

if not hasattr(transformers.PreTrainedModel, "_move_missing_keys_from_meta_to_device"):
    pytest.skip("transformers 5 builds every model on the meta device", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("transformers.modeling_utils"):
        yield


def table() -> torch.Tensor:
    return 1.0 / torch.arange(1.0, 5.0)


class Config(transformers.PreTrainedConfig):
    model_type = "rotary"


class Filled(transformers.PreTrainedModel):
    config_class = Config
    base_model_prefix = "base"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lin = torch.nn.Linear(4, 4)
        self.register_buffer("inv_freq", table(), persistent=False)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if module is self:
            with torch.no_grad():
                self.inv_freq.copy_(table())


class Replaced(Filled):
    def _init_weights(self, module: torch.nn.Module) -> None:
        if module is self:
            self.inv_freq = table()


class ByData(Filled):
    def _init_weights(self, module: torch.nn.Module) -> None:
        if module is self:
            self.inv_freq.data.copy_(table())


class Forgotten(Filled):
    def _init_weights(self, module: torch.nn.Module) -> None:
        pass


def load(kind: type[transformers.PreTrainedModel], folder: Path) -> None:
    kind(Config()).save_pretrained(folder)
    kind.from_pretrained(folder)


@pytest.mark.parametrize("kind", [Filled, Replaced, ByData])
def test_buffers_that_the_class_fills_are_no_news(
    agent: Agent, tmp_path: Path, kind: type[transformers.PreTrainedModel]
) -> None:
    load(kind, tmp_path)
    assert (agent.last().verdict, agent.last().findings) == ("ok", ())


def test_buffers_that_nobody_fills_are_named(agent: Agent, tmp_path: Path) -> None:
    load(Forgotten, tmp_path)
    (finding,) = agent.last().findings
    assert (finding.code, finding.level) == ("meta_left", "warning")
    assert finding.text == (
        "1 buffer that no checkpoint holds (persistent=False) has no values but what lay in memory: inv_freq."
    )
    assert finding.next == "Fill it in _init_weights of Forgotten, not in __init__ alone."


def test_tensors_that_count_no_versions_are_left_alone(agent: Agent, tmp_path: Path) -> None:
    with torch.inference_mode():
        load(Forgotten, tmp_path)
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])
