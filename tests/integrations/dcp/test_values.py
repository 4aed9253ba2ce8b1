from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from ckpt_sentry.integrations.dcp import values as dcp_values
from ckpt_sentry.integrations.dcp.values import not_a_number, retyped, types_of


def nan_at(shape: tuple[int, ...], *places: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.ones(shape, dtype=dtype)
    tensor.view(-1)[list(places)] = float("nan")
    return tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 77, 127])
def test_one_nan_in_a_small_tensor_is_found(dtype: torch.dtype, place: int) -> None:
    found = not_a_number({"a": torch.ones(3), "head.weight": nan_at((16, 8), place, dtype=dtype)}, 0)

    assert found is not None
    assert (found.code, found.level) == ("non_finite_values", "warning")
    assert found.text == "1 tensor holds NaN after the load: head.weight"


def test_runs_of_nan_in_a_large_tensor_are_found() -> None:
    size = 1 << 20
    stride = (size - dcp_values.RUN) // (dcp_values.RUNS - 1)

    assert not_a_number({"w": nan_at((1024, 1024), 0)}, 0) is not None
    assert not_a_number({"w": nan_at((1024, 1024), *range(1000, 1000 + stride))}, 0) is not None


def test_infinite_values_are_no_evidence() -> None:
    tensors = {"mask": torch.tensor([float("-inf"), float("inf"), 0.0]), "half": torch.full((9,), 65504.0).half()}

    assert not_a_number(tensors, 0) is None


def test_what_is_no_floating_point_tensor_is_passed_over() -> None:
    values: dict[str, Any] = {
        "int": torch.arange(3),
        "bool": torch.tensor([True]),
        "complex": torch.full((2,), complex("nan")),
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.tensor([float("nan")]).to_sparse(),
        "empty": torch.empty(0),
        "none": None,
        "object": object(),
    }

    assert not_a_number(values, 0) is None


def test_views_and_parameters_are_looked_at() -> None:
    transposed = nan_at((128, 128), 0).t()
    strided = nan_at((200, 200), 0)[:, ::2]

    assert (
        not_a_number({"t": transposed[:64, :64], "p": torch.nn.Parameter(nan_at((2,), 1)), "s": strided}, 0) is not None
    )
    assert not_a_number({"s": strided}, 0) is not None


def test_many_names_are_folded() -> None:
    found = not_a_number({f"layers.{i}.w": nan_at((2,), 0) for i in range(40)}, 0)

    assert found is not None
    assert found.text == "40 tensors hold NaN after the load: layers.{0-39}.w"


def test_the_work_is_bounded() -> None:
    tensors = {f"w{i}": torch.ones(1) for i in range(5000)}

    assert len(list(dcp_values._samples(tensors, dcp_values.MOST_TENSORS))) == dcp_values.MOST_TENSORS
    large = next(iter(dcp_values._samples({"w": torch.ones(1000, 1000)}, 1)))[1]
    assert large.numel() == dcp_values.RUNS * dcp_values.RUN


def planner_with(state: dict[str, Any], loaded: dict[str, Any]) -> tuple[dict[str, type], Any]:
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, None)
    before = types_of(planner.state_dict)
    state.update(loaded)
    return before, planner


def test_an_object_of_another_type_is_said() -> None:
    found = retyped(*planner_with({"step": 1, "name": "x", "w": torch.ones(1)}, {"step": "seven", "name": "y"}))

    assert found is not None
    assert (found.code, found.level) == ("type_mismatch", "warning")
    assert found.text == "the load put objects of another type in place: step was int, is str"


def test_numbers_and_placeholders_are_alike() -> None:
    before, planner = planner_with({"step": 1, "lr": 0, "hint": None}, {"step": 2.0, "lr": None, "hint": "text"})

    assert retyped(before, planner) is None
