"""
The walk through a module sees what `nn.Module` itself sees, in the same order.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.model.inventories import model_inventory, parts_of, tensors_of, tree_inventory


def shared() -> nn.Module:
    one = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = nn.ModuleDict({"left": one, "right": one, "last": nn.Linear(3, 2)})
    model.register_module("nothing", None)
    model.last.register_buffer("cache", torch.zeros(2), persistent=False)
    return model


@pytest.mark.parametrize("model", [nn.Identity(), shared(), nn.TransformerEncoderLayer(8, 2)])
def test_parts_and_tensors_are_those_of_torch(model: nn.Module) -> None:
    assert parts_of(model) == list(model.named_modules(remove_duplicate=False))
    assert [name for name, _ in tensors_of(model)] == list(model.state_dict())


def test_a_module_within_itself_raises_as_it_does_for_torch() -> None:
    model = nn.Linear(1, 1)
    model.again = nn.Sequential(model)
    with pytest.raises(RecursionError):
        model.state_dict()
    with pytest.raises(RecursionError):
        parts_of(model)


def test_names_of_one_tensor_or_of_one_place_are_tied() -> None:
    model = shared()
    with torch.no_grad():
        model.last.weight = nn.Parameter(model.left[0].weight.view(-1).view(2, 3))
    found = model_inventory(model)
    assert found.ties["right.0.weight"] == "left.0.weight"
    # The same place, but another shape: no tie.
    assert "last.weight" not in found.ties
    assert found.entries["last.weight"] == Entry((2, 3), "float32")


def test_a_tree_of_tensors_and_what_else_it_holds() -> None:
    shared = torch.ones(2, 3)
    tree = {"model": {"a": shared, "b": shared}, "state": [{"step": 3}, (torch.ones(4, dtype=torch.bfloat16),)]}
    found = tree_inventory(tree)
    assert {key: (entry.shape, entry.dtype) for key, entry in found.entries.items()} == {
        "model.a": ((2, 3), "float32"),
        "model.b": ((2, 3), "float32"),
        "state.0.step": (None, None),
        "state.1.0": ((4,), "bfloat16"),
    }
    assert found.ties == {"model.b": "model.a"}
