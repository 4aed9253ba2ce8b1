"""
What planners of other kinds leave out of a plan is seen, key by key.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from ckpt_sentry import integrations
from ckpt_sentry.core.report import Coverage
from ckpt_sentry.patching import ledger
from tests.agents import Agent, codes, hooked


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


class Disguised(dcp.DefaultLoadPlanner):
    """
    Leaves a key out in a method that passes for torch's.
    """

    @functools.wraps(dcp.DefaultLoadPlanner.finish_plan)
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return replace(new_plan, items=[item for item in new_plan.items if item.dest_index.fqn != "model.b"])


class Slotted:
    """
    Does all by another planner, and keeps nothing of its own.
    """

    __slots__ = ("planner",)

    def __init__(self) -> None:
        self.planner = Late()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)


class Halves(dcp.DefaultLoadPlanner):
    """
    Reads the first half of a tensor twice.
    """

    def create_local_plan(self) -> LoadPlan:
        items = []
        for item in super().create_local_plan().items:
            half = replace(item, lengths=torch.Size([1])) if item.dest_index.fqn == "model.b" else None
            items += [item] if half is None else [half] * 3
        return LoadPlan(items)


class LeftOut(dcp.DefaultLoadPlanner):
    """
    Has a key less from the start.
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002
        super().set_up_planner({**state_dict, "model": {"a": state_dict["model"]["a"]}}, metadata, is_coordinator)


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
        (Disguised, ("partial", 0.75), "1 key is read in part or not at all: model.b."),
        (Slotted, ("partial", 0.75), "1 key is read in part or not at all: model.b."),
        (LeftOut, ("partial", 0.75), "1 key is read in part or not at all: model.b."),
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


def test_a_region_that_is_read_twice_counts_once(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=Halves(), no_dist=True)
    report = agent.last()
    assert (report.verdict, codes(report), report.coverage.elements) == ("partial", ["not_read"], 2 / 3)


class Lazy(dcp.DefaultLoadPlanner):
    """
    Its plans can be gone through once.
    """

    def create_local_plan(self) -> LoadPlan:
        return replace(super().create_local_plan(), items=iter(super().create_local_plan().items))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [replace(plan, items=iter(plan.items)) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return replace(new_plan, items=iter(new_plan.items))


def test_a_plan_that_can_be_gone_through_once_is_left_alone(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    wanted = state()
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", planner=Lazy(), no_dist=True)
    assert (wanted["model"]["a"] == 7).all()
    assert agent.last().verdict == "ok"


def test_a_planner_that_looks_at_itself(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)

    class Looking(Late):
        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            assert inspect.ismethod(self.finish_plan)
            assert "finish_plan" not in vars(copy.copy(self))
            return super().finish_plan(new_plan)

    dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=Looking(), no_dist=True)
    assert codes(agent.last()) == ["not_read"]


def test_a_load_within_a_load_is_one_of_its_own(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "step-8", no_dist=True)

    class Loading(Late):
        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            dcp.load({"x": torch.zeros(2)}, checkpoint_id=tmp_path / "step-8", no_dist=True)
            return super().finish_plan(new_plan)

    dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=Loading(), no_dist=True)
    inner, outer = agent.reports()
    assert (inner.step, inner.verdict, inner.bytes_read, codes(inner)) == (8, "ok", 8, [])
    assert (outer.step, outer.verdict, outer.coverage.keys, codes(outer)) == (7, "partial", 0.75, ["not_read"])


class Nested:
    """
    A `Stateful` that loads a checkpoint of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        dcp.load({"x": torch.zeros(2)}, checkpoint_id=self.path, no_dist=True)
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        dcp.load({"x": torch.zeros(2)}, checkpoint_id=self.path, no_dist=True)


def test_a_stateful_that_loads(agent: Agent, tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "step-8", no_dist=True)
    dcp.save({"app": {"value": torch.ones(3)}}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    nested = Nested(tmp_path / "step-8")
    nested.value = torch.zeros(3)
    dcp.load({"app": nested}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert nested.value.sum() == 3
    assert [(report.step, report.verdict, report.bytes_read) for report in agent.reports()] == [
        (8, "ok", 8),
        (8, "ok", 8),
        (7, "ok", 12),
    ]


@pytest.mark.parametrize("failure", [None, OSError("gone")])
def test_torch_load_is_torchs_while_it_reads(agent: Agent, tmp_path: Path, failure: Exception | None) -> None:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "step-8", no_dist=True)
    seen = []

    class Looking(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            seen.append(torch.load)
            if failure is not None:
                raise failure
            return super().resolve_tensor(read_item)

    before = torch.load
    with contextlib.suppress(dcp.CheckpointException):
        dcp.load({"x": torch.zeros(2)}, checkpoint_id=tmp_path / "step-8", planner=Looking(), no_dist=True)
    assert seen == [before.__wrapped__]  # type: ignore[attr-defined]
    assert torch.load is before
    assert agent.last().verdict == ("ok" if failure is None else "failed")


class FailingPlanner(dcp.DefaultLoadPlanner):
    """
    Loads what is not there while it plans.
    """

    def create_local_plan(self) -> LoadPlan:
        dcp.load({"lost": torch.zeros(2)}, checkpoint_id=self.path, no_dist=True)
        return super().create_local_plan()


class FailingStateful(Nested):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dcp.load({"lost": state_dict["value"]}, checkpoint_id=self.path, no_dist=True)


@pytest.mark.parametrize("by_planner", [True, False])
def test_a_load_that_another_one_ends(agent: Agent, tmp_path: Path, by_planner: bool) -> None:  # noqa: FBT001
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "step-8", no_dist=True)
    dcp.save({"app": {"value": torch.ones(2)}}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    planner = FailingPlanner() if by_planner else dcp.DefaultLoadPlanner()
    planner.path = tmp_path / "step-8"  # type: ignore[union-attr]
    wanted = {"app": {"value": torch.zeros(2)} if by_planner else FailingStateful(tmp_path / "step-8")}
    with pytest.raises(dcp.CheckpointException):
        dcp.load(wanted, checkpoint_id=tmp_path / "step-7", planner=planner, no_dist=True)
    inner, outer = agent.reports()
    assert (inner.step, outer.step, inner.verdict, outer.verdict) == (8, 7, "failed", "failed")
    assert outer.error is not None
    assert outer.error.message == "RuntimeError: Missing key in checkpoint state_dict: lost."
    assert codes(outer) == ["rank_raised"]


@pytest.mark.parametrize(("is_copied", "said"), [(True, ["values_not_loaded"]), (False, [])])
def test_objects_that_are_read_into_a_copy(agent: Agent, tmp_path: Path, is_copied: bool, said: list[str]) -> None:  # noqa: FBT001
    planner = functools.partial(dcp.DefaultLoadPlanner, flatten_state_dict=False, flatten_sharded_tensors=is_copied)
    saver = dcp.DefaultSavePlanner(flatten_state_dict=False)
    saved = {"w": torch.ones(2), "options": {"rate": 7}}
    dcp.save(saved, checkpoint_id=tmp_path / "step-7", planner=saver, no_dist=True)
    wanted: dict[str, Any] = {"w": torch.zeros(2), "options": {"rate": 0}}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7", planner=planner(), no_dist=True)
    assert wanted["options"]["rate"] == (0 if is_copied else 7)
    report = agent.last()
    assert codes(report) == said
    assert report.verdict == ("wrong_values" if is_copied else "ok")


def test_a_planner_that_cannot_be_looked_at(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)

    class Hidden(dcp.DefaultLoadPlanner):
        def __getattribute__(self, name: str) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if name == "allow_partial_load" and caller.startswith("ckpt_sentry"):
                raise OSError("hidden")
            return super().__getattribute__(name)

    agent.monkeypatch.setenv("CKPT_SENTRY_GUARD", "swallow")
    dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=Hidden(), no_dist=True)
    report = agent.last()
    assert (report.verdict, [found.code for found in report.findings]) == ("ok", ["not_compared"])


def test_nothing_of_a_load_lives_on(agent: Agent, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path / "final", no_dist=True)

    def is_gone() -> bool:
        gc.collect()
        gc.disable()
        try:
            wanted = {"w": torch.zeros(8)}
            gone = weakref.ref(wanted["w"])
            dcp.load(wanted, checkpoint_id=tmp_path / "final", no_dist=True)
            del wanted
            return gone() is None
        finally:
            gc.enable()

    with_agent = is_gone()
    assert agent.last().verdict == "ok"
    ledger.uninstall()
    assert with_agent is is_gone()  # torch up to 2.8 keeps it until a collection by itself
    ledger.install(integrations.seams())


def test_what_an_object_has_for_a_finish_plan(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    by_object = dcp.DefaultLoadPlanner()

    def mine(new_plan: LoadPlan) -> LoadPlan:
        return replace(new_plan, items=new_plan.items[:-1])

    by_object.finish_plan = mine  # type: ignore[method-assign]
    dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=by_object, no_dist=True)
    assert codes(agent.last()) == ["not_read"]


def test_a_planner_of_two_loads_at_once(agent: Agent, tmp_path: Path) -> None:
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7", no_dist=True)
    both = threading.Barrier(2, timeout=30)

    class Meeting(Late):
        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            both.wait()
            return super().finish_plan(new_plan)

    planner = Meeting()

    def load() -> None:
        dcp.load(state(), checkpoint_id=tmp_path / "step-7", planner=planner, no_dist=True)

    other = threading.Thread(target=load)
    other.start()
    load()
    other.join()
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
