"""
What is seen of a plan while torch's planner makes it is what a walk over both sides tells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from ckpt_sentry.core.report import FULL
from ckpt_sentry.integrations.dcp import planning
from ckpt_sentry.integrations.dcp.fast_compare import Whole, whole
from ckpt_sentry.integrations.dcp.step import Step
from ckpt_sentry.patching import ledger
from tests.agents import Agent, codes, hooked
from tests.integrations.hosts import compares_sizes

pytestmark = pytest.mark.skipif(not compares_sizes(), reason="this torch compares no sizes: its planner is left alone")

SAVED = {"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "n": 7, "empty": torch.ones(0)}


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked():
        yield


class Seen:
    """
    What each load has told of itself: by the look at its planner, and by the walk over its plan.
    """

    def __init__(self) -> None:
        self.by_look: list[Whole | None] = []
        self.by_walk: list[Whole | None] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made = Seen()
    original = planning.seen

    def both(look: Any, wanted: dict[str, Any], plan: Any, step: Step) -> Whole | None:
        made.by_look.append(original(look, wanted, plan, step))
        made.by_walk.append(whole(wanted, step.metadata.state_dict_metadata, plan))
        return made.by_look[-1]

    monkeypatch.setattr(planning, "seen", both)
    return made


def saved(folder: Path) -> Path:
    dcp.save(dict(SAVED), checkpoint_id=folder / "step-7", no_dist=True)
    return folder / "step-7"


def wanted(**changes: Any) -> dict[str, Any]:
    return {
        **{key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in SAVED.items()},
        **changes,
    }


def test_a_look_tells_what_a_walk_tells(agent: Agent, seen: Seen, tmp_path: Path) -> None:
    dcp.load(wanted(), checkpoint_id=saved(tmp_path), no_dist=True)
    assert seen.by_look == seen.by_walk == [Whole(keys=4, elements=12 + 2 + 1, bytes=12 * 4 + 2 * 2, bytes_read=52)]
    assert agent.last().verdict == "ok"


def test_each_load_is_looked_at_by_itself(agent: Agent, seen: Seen, tmp_path: Path) -> None:
    path = saved(tmp_path)
    for _ in range(2):
        dcp.load(wanted(), checkpoint_id=path, no_dist=True)
    assert seen.by_look[0] == seen.by_look[1] is not None
    assert agent.last().coverage.keys == 1.0


def test_another_type_is_seen(agent: Agent, seen: Seen, tmp_path: Path) -> None:
    dcp.load(wanted(a=torch.zeros(3, 4, dtype=torch.float64)), checkpoint_id=saved(tmp_path), no_dist=True)
    assert seen.by_look == seen.by_walk == [None]
    assert [cast.keys for cast in agent.last().casts] == ["a"]


def test_a_tensor_in_place_of_an_object_is_seen(agent: Agent, seen: Seen, tmp_path: Path) -> None:
    dcp.load(wanted(n=torch.zeros(1)), checkpoint_id=saved(tmp_path), no_dist=True)
    assert seen.by_look == seen.by_walk == [None]
    assert codes(agent.last()) == ["type_mismatch"]


def test_a_key_less_is_seen(agent: Agent, seen: Seen, tmp_path: Path) -> None:
    state = wanted()
    del state["b"]
    dcp.load(state, checkpoint_id=saved(tmp_path), no_dist=True)
    assert seen.by_look == seen.by_walk == [None]
    assert agent.last().unexpected.count == 1


class Dropping(dcp.DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return LoadPlan(plan.items[:-1])


class Passing(dcp.DefaultLoadPlanner):
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan


class Filtering(dcp.DefaultLoadPlanner):
    """
    Plans by metadata of its own.
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002
        own = dcp.Metadata(dict(metadata.state_dict_metadata), metadata.planner_data, metadata.storage_data)
        super().set_up_planner(state_dict, own, is_coordinator)


class Reader(dcp.FileSystemReader):
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan


@pytest.mark.parametrize("planner", [Dropping, Passing, Filtering])
def test_a_plan_of_another_planner_is_walked(
    agent: Agent, seen: Seen, tmp_path: Path, planner: type[dcp.DefaultLoadPlanner]
) -> None:
    dcp.load(wanted(), checkpoint_id=saved(tmp_path), planner=planner(), no_dist=True)
    assert set(seen.by_look) == {None}
    assert agent.last().coverage.keys == (0.75 if planner is Dropping else 1.0)


def test_a_plan_of_another_reader_is_walked(agent: Agent, seen: Seen, tmp_path: Path) -> None:
    dcp.load(wanted(), storage_reader=Reader(saved(tmp_path)), no_dist=True)
    assert seen.by_look == [None]
    assert agent.last().verdict == "ok"


def test_a_planner_used_twice_in_one_plan_is_walked(agent: Agent, seen: Seen, tmp_path: Path) -> None:
    class Reading(dcp.FileSystemReader):
        def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:  # noqa: FBT001
            super().set_up_storage_reader(metadata, is_coordinator)
            default_planner.create_default_local_load_plan(wanted(), metadata)

    dcp.load(wanted(), storage_reader=Reading(saved(tmp_path)), no_dist=True)
    assert seen.by_look == [None]
    assert agent.last().verdict == "ok"


def test_a_reader_that_raises_after_the_plan(agent: Agent, tmp_path: Path) -> None:
    class Raising(dcp.FileSystemReader):
        def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
            raise OSError(f"no room for {len(plan.items)} items")

    with pytest.raises(dcp.CheckpointException):
        dcp.load(wanted(), storage_reader=Raising(saved(tmp_path)), no_dist=True)
    report = agent.last()
    assert (report.verdict, codes(report), report.coverage) == ("failed", ["rank_raised"], FULL)


def test_a_tensor_that_is_read_in_parts() -> None:
    halves = [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([2, 3])) for start in (0, 2)]
    whole_tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 3]), halves)
    metadata = dcp.Metadata({"w": whole_tensor})
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(4, 3)}, metadata)
    look = planning.begin()
    plan = planner.create_local_plan()
    planning.end()
    step = Step(lambda: (planner, metadata))
    assert planning.seen(look, planner.state_dict, plan, step) == Whole(1, 12, 48, 48)
    del whole_tensor.chunks[1]
    look = planning.begin()
    plan = planner.create_local_plan()
    planning.end()
    assert planning.seen(look, planner.state_dict, plan, step) is None


def test_outside_of_a_load_nothing_is_looked_at(tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(saved(tmp_path)).read_metadata()
    assert len(default_planner.create_default_local_load_plan(wanted(), metadata).items) == 3
    assert planning._look.get() is None


def test_what_an_own_error_makes_of_it(agent: Agent, seen: Seen, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(planning.Look, "other", None)
    state = wanted()
    dcp.load(state, checkpoint_id=saved(tmp_path), no_dist=True)
    assert seen.by_look == [None]
    assert state["n"] == 7
    assert agent.last().verdict == "ok"


def module(**names: Any) -> ModuleType:
    made = ModuleType("planner_of_another_torch")
    vars(made).update(names)
    return made


def _takes_more(fqn: str, md: Any, obj: Any, more: int = 0) -> list[Any]:
    return [fqn, md, obj, more]


def _compares_nothing(state_dict: Any, metadata: Any) -> list[Any]:
    return [state_dict, metadata]


@pytest.mark.parametrize(
    ("made", "state"),
    [
        (module(), ledger.ABSENT),
        (module(_create_read_items=_takes_more), ledger.GATED),
        (
            module(
                _create_read_items=default_planner._create_read_items,
                create_default_local_load_plan=_compares_nothing,
            ),
            ledger.GATED,
        ),
    ],
)
def test_another_torch(made: ModuleType, state: str) -> None:
    before = dict(vars(made))
    planning.instrument(made)
    assert vars(made) == before
    assert [one.state for one in ledger.status() if made.__name__ in one.attribute] == [state]
    assert made.__name__ not in sys.modules
