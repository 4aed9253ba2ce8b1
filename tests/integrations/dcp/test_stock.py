"""
Code counts as torch's by where it was written, not by what it is called.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner

from ckpt_sentry.integrations.dcp.step import Step
from ckpt_sentry.integrations.dcp.stock import changes_plans, is_torchs, shows_plan


class Own(dcp.DefaultLoadPlanner):
    @functools.wraps(dcp.DefaultLoadPlanner.finish_plan)
    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return new_plan


def test_what_is_torchs() -> None:
    assert is_torchs(dcp.DefaultLoadPlanner(), "finish_plan")
    assert is_torchs(default_planner, "create_default_local_load_plan")
    assert is_torchs(dcp.FileSystemReader(""), "prepare_local_plan")
    assert is_torchs(dcp.DefaultLoadPlanner(), "no_such_method")
    assert is_torchs(None, "finish_plan")


def test_what_passes_for_torchs() -> None:
    assert Own.finish_plan.__module__ == dcp.DefaultLoadPlanner.finish_plan.__module__
    assert not is_torchs(Own(), "finish_plan")


def test_what_one_object_has() -> None:
    planner = dcp.DefaultLoadPlanner()
    for own in (len, functools.partial(len), types.MethodType(Own.finish_plan, planner), lambda plan: plan):
        planner.finish_plan = own  # type: ignore[method-assign, assignment]
        assert not is_torchs(planner, "finish_plan")


def test_who_changes_plans() -> None:
    def step_of(planner: Any, storage_reader: Any) -> Step:
        return Step(lambda: (planner, storage_reader))

    reader = dcp.FileSystemReader("")
    assert not changes_plans(step_of(dcp.DefaultLoadPlanner(), reader))
    assert changes_plans(step_of(Own(), reader))


def test_a_reader_shows_its_plan_where_it_is_patched() -> None:
    class Patched:
        read_data = staticmethod(changes_plans)

    assert shows_plan(Patched())
    assert not shows_plan(Own())
