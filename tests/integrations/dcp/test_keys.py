from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_sentry
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Finding
from ckpt_sentry.integrations.dcp import keys as dcp_keys
from tests.agents import Agent, hooked
from tests.integrations.nets import Net, equal, values

ENTRY = Entry((2,), "float32")


def inventory(*keys: str) -> Inventory:
    return Inventory(dict.fromkeys(keys, ENTRY))


def found(model: tuple[str, ...], checkpoint: tuple[str, ...], outer: str = ".") -> list[tuple[str, str, str]]:
    paths = {key: tuple(key.split(outer)) for key in checkpoint}
    examination = examine(inventory(*model), inventory(*checkpoint))
    return [(one.code, one.level, one.text) for one in dcp_keys.findings(examination, paths)]


def test_entries_that_were_not_asked_for_are_one_short_sentence() -> None:
    saved = ("model.w", "optim.state.w.a", "optim.state.w.b", "step.n")

    assert found(("model.w",), saved) == [
        ("not_asked_for", "info", '2 keys under "optim", 1 key under "step" were not asked for.')
    ]


def test_unexpected_keys_of_the_model_are_still_said() -> None:
    saved = ("model.w", "model.extra", "optim.state.w.a")

    assert found(("model.w",), saved) == [
        ("unexpected_keys", "info", "1 key of the checkpoint is not in the model, unexpected: model.extra."),
        ("not_asked_for", "info", '1 key under "optim" was not asked for.'),
    ]


def test_a_flat_state_dict_has_no_entries_to_leave_out() -> None:
    assert [code for code, _, _ in found(("a.w",), ("a.w", "b.w"), outer="/")] == ["unexpected_keys"]


def test_keys_that_a_rename_explains_are_not_listed_again() -> None:
    names = [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]

    assert [code for code, _, _ in found(tuple(names), tuple(f"module.{name}" for name in names))] == ["renamed_keys"]


def test_what_a_rename_leaves_over_is_still_said() -> None:
    names = [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
    saved = (*(f"model.{name}" for name in names), "model.extra", "optim.state.w.a")

    assert [one[0] for one in found(tuple(names), saved)] == ["renamed_keys", "unexpected_keys", "not_asked_for"]
    assert found(tuple(names), saved)[1:] == [
        ("unexpected_keys", "info", "1 key of the checkpoint is not in the model, unexpected: model.extra."),
        ("not_asked_for", "info", '1 key under "optim" was not asked for.'),
    ]


@pytest.fixture(scope="module")
def _hooks() -> Iterator[None]:
    with hooked("torch.distributed.checkpoint"):
        yield


@pytest.mark.usefixtures("_hooks")
@pytest.mark.parametrize("surplus", [{}, {"optimizer": {"lr": torch.ones(1)}, "step": 3}], ids=["alone", "whole state"])
@pytest.mark.parametrize("outer", ["model", "app"])
def test_names_are_asked_for_as_they_were_saved(
    agent: Agent, tmp_path: Path, outer: str, surplus: dict[str, object]
) -> None:
    dcp.save({outer: values(), **surplus}, checkpoint_id=tmp_path / "d")
    model = Net()
    with pytest.raises(dcp.CheckpointException):
        dcp.load(model.state_dict(), checkpoint_id=tmp_path / "d")
    report = agent.last()

    assert [one.code for one in report.findings if one.level == "error"] == ["renamed_keys"]
    assert [one.next for one in report.findings if one.next] == [
        "Ask for them under the names that they have in the checkpoint, and rename them back after the load."
    ]
    asked = {f"{outer}.{key}": value for key, value in model.state_dict().items()}
    dcp.load(asked, checkpoint_id=tmp_path / "d")
    model.load_state_dict(ckpt_sentry.unify_keys(asked, model))
    assert equal(model, values())


@pytest.mark.usefixtures("_hooks")
def test_a_rule_in_doubt_is_settled_by_the_code_that_saved(agent: Agent, tmp_path: Path) -> None:
    wanted = {f"layers.{i}.attn.{name}_proj.weight": torch.ones(4, 4) for i in range(3) for name in "qkvo"}
    saved = {key.replace("_proj", "").replace("attn.", "attn.w"): value for key, value in wanted.items()}
    dcp.save(saved, checkpoint_id=tmp_path / "d")
    with pytest.raises(dcp.CheckpointException):
        dcp.load(wanted, checkpoint_id=tmp_path / "d")
    first = agent.last().findings[0]

    assert first.text.endswith("Other rules fit as well: check this one against the code that saved it.")
    assert first.next == (
        "Ask for them under the names that they have in the checkpoint; see in the code that saved them which is "
        "which, and rename them after the load."
    )


def test_what_ends_a_load_is_an_error() -> None:
    missing = Finding("missing_keys", "warning", "1 key missing.", "Name them.", remedy="allow")
    renamed = Finding("renamed_keys", "warning", "other names", "rename")
    info = Finding("unexpected_keys", "info", "more")

    step = "If the missing keys are to start anew: the way."
    assert dcp_keys.decisive([info, missing], "the way") == (info, replace(missing, level="error", next=step))
    deeper = replace(missing, next="build it so", remedy=None)
    assert dcp_keys.decisive([deeper], "the way") == (replace(deeper, level="error"),)
    assert dcp_keys.decisive([renamed, info], "the way") == (replace(renamed, level="error"), info)
    assert dcp_keys.decisive([], "the way") == ()
