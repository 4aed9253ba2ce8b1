"""
The quick look says "whole" of the very loads that the thorough one finds nothing in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from ckpt_sentry.integrations.dcp.fast_compare import Whole, whole

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

SAVED = {"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "n": 7, "empty": torch.ones(0)}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Metadata:
    folder: Path = tmp_path_factory.mktemp("saved")
    dcp.save(dict(SAVED), checkpoint_id=folder, no_dist=True)
    return dcp.FileSystemReader(folder).read_metadata()


def look(
    metadata: Metadata,
    wanted: dict[str, Any],
    *,
    items: slice = slice(None),
) -> Whole | None:
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    try:
        plan = planner.create_local_plan()
    except ValueError:  # a size mismatch: torch makes no plan
        plan = LoadPlan([])
    return whole(wanted, metadata.state_dict_metadata, LoadPlan(plan.items[items]))


def test_what_agrees_is_whole(metadata: Metadata) -> None:
    seen = look(metadata, dict(SAVED))
    assert seen == Whole(keys=4, elements=12 + 2 + 1, bytes=12 * 4 + 2 * 2, bytes_read=52)


def test_a_parameter_is_a_tensor(metadata: Metadata) -> None:
    assert look(metadata, {**SAVED, "a": torch.nn.Parameter(torch.zeros(3, 4))}) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.ones(4, 3)},
        {"a": torch.ones(3, 4, dtype=torch.float64)},
        {"a": 1},
        {"n": torch.ones(1)},
        {"more": torch.ones(1)},
    ],
)
def test_any_difference_is_for_the_thorough_look(metadata: Metadata, change: dict[str, Any]) -> None:
    assert look(metadata, {**SAVED, **change}) is None


def test_a_planner_that_reads_a_part_of_something_larger(metadata: Metadata) -> None:
    wanted = {**SAVED, "a": torch.ones(2, 4)}
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(dict(SAVED), metadata, is_coordinator=True)
    items = [
        replace(item, lengths=torch.Size([2, 4])) if item.dest_index.fqn == "a" else item
        for item in planner.create_local_plan().items
    ]
    assert whole(wanted, metadata.state_dict_metadata, LoadPlan(items)) is None


@pytest.mark.parametrize("key", SAVED)
def test_a_key_less_is_for_the_thorough_look(metadata: Metadata, key: str) -> None:
    assert look(metadata, {other: value for other, value in SAVED.items() if other != key}) is None


def test_a_read_less_is_for_the_thorough_look(metadata: Metadata) -> None:
    assert look(metadata, dict(SAVED), items=slice(1, None)) is None


def test_without_a_plan_nothing_is_known(metadata: Metadata) -> None:
    assert whole(dict(SAVED), metadata.state_dict_metadata, None) is None
