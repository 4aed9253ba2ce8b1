"""
What a step of torch's works with, whichever way this torch holds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_sentry import LowCoverageError
from ckpt_sentry.integrations.dcp.step import Step
from tests.agents import Agent, codes, hooked
from tests.integrations.hosts import compares_sizes


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Any:
    with hooked():
        yield


class Planner:
    """
    Keeps nothing of what it is given, and has no room for more.
    """

    __slots__ = ("seen",)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> str:  # noqa: FBT001, FBT002
        self.seen = (state_dict, metadata, is_coordinator)
        return "set up"


def local_step(planner: Any, call: Callable[[Any], Any]) -> Callable[[], Any]:
    """
    A step as torch has it up to 2.8: its closure holds no metadata.
    """

    def step() -> Any:
        return call(planner)

    @wraps(step)
    def logged() -> Any:
        return step()

    return logged


@pytest.mark.parametrize(
    "call",
    [
        lambda planner: planner.set_up_planner({}, "metadata", True),  # noqa: FBT003
        lambda planner: planner.set_up_planner(state_dict={}, metadata="metadata", is_coordinator=True),
    ],
)
def test_metadata_is_what_the_planner_is_given(call: Callable[[Any], Any]) -> None:
    planner = Planner()
    function = local_step(planner, call)
    step = Step(function)
    assert (step.planner, step.metadata) == (planner, None)
    step.watch()
    assert step.planner is planner
    assert function() == "set up"
    assert planner.seen == ({}, "metadata", True)
    assert (step.planner, step.metadata) == (planner, "metadata")


def test_a_planner_has_its_place_while_it_is_set_up_and_after() -> None:
    places = []

    class Looking(Planner):
        def set_up_planner(self, *_: Any, **__: Any) -> None:
            places.append(Step(function)._cells["planner"].cell_contents)

    planner = Looking()
    function = local_step(planner, lambda planner: planner.set_up_planner({}, "metadata"))
    step = Step(function)
    step.watch()
    function()
    assert places == [planner]
    step.unwatch()
    assert (Step(function).planner, vars(type(planner)).keys() & {"planner"}) == (planner, set())


def test_a_planner_that_is_not_set_up_has_its_place_again() -> None:
    planner = Planner()
    function = local_step(planner, lambda planner: planner.nothing)
    step = Step(function)
    step.watch()
    with pytest.raises(AttributeError, match="'Planner' object has no attribute 'nothing'"):
        function()
    step.unwatch()
    assert Step(function).planner is planner
    assert step.metadata is None


def test_a_step_that_shares_its_metadata_is_left_alone() -> None:
    planner, metadata = Planner(), object()
    step = Step(lambda: (planner, metadata))
    step.watch()
    assert step._cells["planner"].cell_contents is planner
    assert step.metadata is metadata


def test_what_is_no_step_knows_nothing() -> None:
    step = Step(print)
    step.watch()
    step.unwatch()
    assert (step.planner, step.reader, step.state_dict, step.metadata, step.plan) == (None,) * 5


def saved(folder: Path) -> Path:
    dcp.save({"a": torch.ones(4), "b": torch.ones(2)}, checkpoint_id=folder / "step-7", no_dist=True)
    return folder / "step-7"


class Own(dcp.DefaultLoadPlanner):
    """
    Keeps what torch's planner keeps, but for the metadata, under names of its own.
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.known, self.metadata = self.metadata, None

    def create_local_plan(self) -> dcp.LoadPlan:
        self.metadata = self.known
        try:
            return super().create_local_plan()
        finally:
            self.metadata = None


def test_a_planner_that_keeps_no_metadata_is_compared(agent: Agent, tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"a": torch.zeros(4), "x": torch.zeros(1)}, checkpoint_id=saved(tmp_path), planner=Own(), no_dist=True)
    report = agent.last()
    assert (codes(report), report.missing.keys, report.coverage.keys) == (["missing_keys"], ("x",), 0.5)


def test_a_planner_of_an_earlier_load_says_nothing_of_this_one(agent: Agent, tmp_path: Path) -> None:
    planner = dcp.DefaultLoadPlanner()
    dcp.load({"a": torch.zeros(4)}, checkpoint_id=saved(tmp_path), planner=planner, no_dist=True)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"a": torch.zeros(4)}, checkpoint_id=tmp_path / "step-8", planner=planner, no_dist=True)
    report = agent.last()
    assert (codes(report), report.coverage, report.checkpoint) == (["path_missing"], None, None)


def test_one_planner_in_two_threads_is_seen_by_each_load(agent: Agent, tmp_path: Path) -> None:
    path, planner, errors = saved(tmp_path), Own(), []
    meet = threading.Barrier(2, timeout=60)

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            found = super().read_metadata(*args, **kwargs)
            meet.wait()
            return found

    def load(key: str) -> None:
        try:
            dcp.load({key: torch.zeros(1)}, storage_reader=Reader(path), planner=planner, no_dist=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=(key,)) for key in ("x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(errors) == len(agent.reports()) == 2
    assert all(report.checkpoint.keys == 2 for report in agent.reports())


def test_another_shape_is_said_whether_torch_raises_or_copies_what_fits(agent: Agent, tmp_path: Path) -> None:
    path, wanted = saved(tmp_path), {"a": torch.zeros(6), "b": torch.zeros(2)}
    if compares_sizes():
        with pytest.raises(dcp.CheckpointException):
            dcp.load(wanted, checkpoint_id=path, no_dist=True)
    else:
        dcp.load(wanted, checkpoint_id=path, no_dist=True)
        assert wanted["a"].tolist() == [1, 1, 1, 1, 0, 0]
    report = agent.last()
    assert report.verdict == ("failed" if compares_sizes() else "partial")
    assert [(one.keys, one.model_shape, one.checkpoint_shape) for one in report.mismatched] == [("a", (6,), (4,))]
    assert "shape_mismatch" in codes(report)
    agent.mode("strict")
    with pytest.raises(dcp.CheckpointException if compares_sizes() else LowCoverageError):
        dcp.load(wanted, checkpoint_id=path, no_dist=True)
