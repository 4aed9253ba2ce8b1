"""
What planners of other kinds leave out of a plan is seen, key by key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from ckpt_sentry.audit.report import Coverage
from tests.targets.agents import Agent, codes, hooked


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked():
        yield


def state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"a": torch.full((3,), value), "b": torch.full((3,), value)}, "step": int(value), "name": "x"}


class Plain(dcp.DefaultLoadPlanner):
    """
    Does as torch does, in methods of its own.
    """

    def create_local_plan(self) -> LoadPlan:
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return super().create_global_plan(global_plan)


class Twice(dcp.DefaultLoadPlanner):
    """
    Reads one key twice and another never: the total is right.
    """

    def create_local_plan(self) -> LoadPlan:
        items = super().create_local_plan().items
        (first,) = (item for item in items if item.dest_index.fqn == "model.a")
        return LoadPlan([first if item.dest_index.fqn == "model.b" else item for item in items])


class NoObjects(dcp.DefaultLoadPlanner):
    """
    Leaves out what is no tensor.
    """

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for item in super().create_local_plan().items if item.dest_index.fqn.startswith("model")])


class Nothing(dcp.DefaultLoadPlanner):
    """
    Drops everything when it has seen the plans of all ranks.
    """

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [replace(plan, items=[]) for plan in global_plan]


class Late(dcp.DefaultLoadPlanner):
    """
    Leaves a key out of the plan that it finishes with.
    """

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return replace(new_plan, items=[item for item in new_plan.items if item.dest_index.fqn != "model.b"])


class Last(dcp.DefaultLoadPlanner):
    """
    Has no plan before the last moment.
    """

    def create_local_plan(self) -> LoadPlan:
        self.all = super().create_local_plan()
        return LoadPlan([])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return replace(new_plan, items=self.all.items)


class TwiceAtLast(dcp.DefaultLoadPlanner):
    """
    As `Twice`, when torch's own plan has been made.
    """

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        items = [item for item in new_plan.items if item.dest_index.fqn != "model.b"]
        return replace(new_plan, items=[*items, *(item for item in items if item.dest_index.fqn == "model.a")])


@pytest.mark.parametrize(
    ("planner", "outcome", "said"),
    [
        (dcp.DefaultLoadPlanner, ("ok", 1.0), None),
        (Plain, ("ok", 1.0), None),
        (Twice, ("partial", 0.75), "1 key is read in part or not at all: model.b."),
        (NoObjects, ("partial", 0.5), "2 keys are read in part or not at all: {name,step}."),
        (Late, ("partial", 0.75), "1 key is read in part or not at all: model.b."),
        (TwiceAtLast, ("partial", 0.75), "1 key is read in part or not at all: model.b."),
        (Last, ("ok", 1.0), None),
        (Nothing, ("no_op", 0.0), "4 keys are read in part or not at all: model.{a,b}, {name,step}."),
    ],
)
def test_what_a_plan_leaves_out_is_named(
    agent: Agent, tmp_path: Path, planner: type[dcp.DefaultLoadPlanner], outcome: tuple[str, float], said: str | None
) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=planner(), no_dist=True)
    report = agent.last()
    assert (report.verdict, report.coverage.keys) == outcome
    assert [found.text for found in report.findings] == ([] if said is None else [said])


def test_a_planner_is_left_as_it_was(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    by_class, by_object = Late(), dcp.DefaultLoadPlanner()

    def mine(new_plan: LoadPlan) -> LoadPlan:
        return replace(new_plan, items=new_plan.items[:-1])

    by_object.finish_plan = mine  # type: ignore[method-assign]
    for planner in (by_class, by_object):
        dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=planner, no_dist=True)
        assert codes(agent.last()) == ["not_read"]
    assert "finish_plan" not in vars(by_class)
    assert by_object.finish_plan is mine


def test_a_planner_of_two_loads_at_once_is_left_as_it_was(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    planner, both = Late(), threading.Barrier(2, timeout=30)

    class Meeting(dcp.FileSystemReader):
        def read_data(self, plan: LoadPlan, planner: Any) -> Any:
            both.wait()
            return super().read_data(plan, planner)

    def load() -> None:
        dcp.load(state(), storage_reader=Meeting(tmp_path / "step-7"), planner=planner, no_dist=True)

    other = threading.Thread(target=load)
    other.start()
    load()
    other.join()
    assert "finish_plan" not in vars(planner)
    assert [codes(report) for report in agent.reports()] == [["not_read"], ["not_read"]]


def test_a_reader_that_leaves_a_key_out(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)

    class Reader(dcp.FileSystemReader):
        def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
            return [replace(plan, items=plan.items[1:]) for plan in plans]

    dcp.load(state(), storage_reader=Reader(tmp_path / "step-7"), no_dist=True)
    report = agent.last()
    assert (report.verdict, codes(report), report.coverage.keys) == ("partial", ["not_read"], 0.75)


def test_chunks_that_leave_a_hole(agent: Agent, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(8), "v": torch.ones(2)}, checkpoint_id=tmp_path / "step-7", no_dist=True)

    class Reader(dcp.FileSystemReader):
        def read_metadata(self) -> dcp.Metadata:
            metadata = super().read_metadata()
            metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([6]))]
            return metadata

    wanted = {"w": torch.zeros(8), "v": torch.zeros(2)}
    dcp.load(wanted, storage_reader=Reader(tmp_path / "step-7"), no_dist=True)
    assert (wanted["w"] == 0).sum() == 2
    report = agent.last()
    assert (report.verdict, codes(report), report.coverage) == ("partial", ["not_read"], Coverage(1.0, 0.8))
