"""
Planners and readers of the program's own, and tensors that refuse to be asked: blamed is what was seen, and no more.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.futures import Future
from typing_extensions import Self

from ckpt_sentry import LowCoverageError
from ckpt_sentry.core.report import LoadReport
from ckpt_sentry.integrations.dcp.evidence import WHOLE, Before
from ckpt_sentry.integrations.dcp.stock import is_stock
from tests.agents import Agent, hooked


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked():
        yield


def codes(report: LoadReport) -> list[str]:
    return [found.code for found in report.findings]


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class OwnMetadata(dcp.DefaultLoadPlanner):
    """
    Reads "w" from "model.w": by a metadata of its own, as torch's `DynamicMetaLoadPlanner` has.
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = metadata.state_dict_metadata
        self.metadata = Metadata({key.removeprefix("model."): value for key, value in saved.items()})

    def create_local_plan(self) -> LoadPlan:
        items = super().create_local_plan().items
        names = [replace(item.storage_index, fqn=f"model.{item.storage_index.fqn}") for item in items]
        return LoadPlan([replace(item, storage_index=name) for item, name in zip(items, names, strict=True)])


class OwnPlan(dcp.DefaultLoadPlanner):
    """
    The same by the plan alone.
    """

    def create_local_plan(self) -> LoadPlan:
        own, self.state_dict = self.state_dict, {f"model.{key}": value for key, value in self.state_dict.items()}
        items, self.state_dict = super().create_local_plan().items, own
        names = [replace(item.dest_index, fqn=item.dest_index.fqn.removeprefix("model.")) for item in items]
        return LoadPlan([replace(item, dest_index=name) for item, name in zip(items, names, strict=True)])


class OwnNames(dcp.DefaultLoadPlanner):
    """
    The same by a state dict of other names.
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002
        super().set_up_planner({f"model.{key}": state_dict[key] for key in state_dict}, metadata, is_coordinator)


class OwnWay(dcp.DefaultLoadPlanner):
    """
    The same without any plan, by what `fill` does to a tensor and its values.
    """

    fill: Callable[[Any, str, torch.Tensor], None] = staticmethod(lambda state, key, value: state[key].copy_(value))

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002
        super().set_up_planner({}, metadata, is_coordinator)
        self.given = state_dict

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        for key, value in self.given.items():
            type(self).fill(self.given, key, torch.ones_like(value))
        return new_plan


def by_numpy(state: Any, key: str, value: torch.Tensor) -> None:
    """
    Counts no version.
    """
    state[key].numpy()[...] = value.numpy()


def by_nothing(*_: object) -> None:
    """
    Leaves it as it is.
    """


def by_replacing(state: Any, key: str, value: torch.Tensor) -> None:
    state[key] = value


def by_data(state: Any, key: str, value: torch.Tensor) -> None:
    state[key].data = value


def saved(path: Path) -> Path:
    dcp.save({"model.w": torch.ones(4, 4), "model.b": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("planner", [OwnMetadata, OwnPlan, OwnNames])
def test_a_planner_that_renames(agent: Agent, tmp_path: Path, planner: type[dcp.DefaultLoadPlanner]) -> None:
    wanted = {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
    dcp.load(wanted, checkpoint_id=saved(tmp_path / "step-7"), planner=planner(), no_dist=True)
    assert all((value == 1).all() for value in wanted.values())
    report = agent.last()
    assert (report.verdict, report.coverage.keys, report.findings, report.unexpected.count) == ("ok", 1.0, (), 0)


@pytest.mark.parametrize("fill", [None, by_numpy, by_replacing, by_data])
def test_a_planner_that_loads_by_a_way_of_its_own(agent: Agent, tmp_path: Path, fill: Any) -> None:
    class Own(OwnWay):
        pass

    if fill is not None:
        Own.fill = staticmethod(fill)
    wanted = {"w": torch.zeros(4, 4), "b": torch.zeros(2 * WHOLE)}
    dcp.load(wanted, checkpoint_id=saved(tmp_path / "step-7"), planner=Own(), no_dist=True)
    assert all((value == 1).all() for value in wanted.values())
    assert agent.last().verdict == "ok"


def test_a_planner_that_leaves_all_as_it_is_is_still_refused(agent: Agent, tmp_path: Path) -> None:
    class Own(OwnWay):
        fill = staticmethod(by_nothing)

    wanted = {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
    with pytest.raises(LowCoverageError):
        dcp.load(wanted, checkpoint_id=saved(tmp_path / "step-7"), planner=Own(), no_dist=True)
    assert agent.last().coverage.keys == 0


def test_what_was_not_written_is_told_from_what_was(agent: Agent, tmp_path: Path) -> None:
    class Own(OwnWay):
        fill = staticmethod(lambda state, key, value: state[key].copy_(value) if key == "w" else None)

    wanted = {"w": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(wanted, checkpoint_id=saved(tmp_path / "step-7"), planner=Own(), no_dist=True)
    report = agent.last()
    assert (report.verdict, report.coverage.keys, report.missing.keys) == ("partial", 0.5, ("b",))


def test_of_an_inference_tensor_its_values_tell(agent: Agent, tmp_path: Path) -> None:
    class Own(OwnWay):
        fill = staticmethod(lambda state, key, value: by_numpy(state, key, value) if key == "w" else None)

    with torch.inference_mode():
        wanted = {"w": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(wanted, checkpoint_id=saved(tmp_path / "step-7"), planner=Own(), no_dist=True)
    report = agent.last()
    assert (report.verdict, report.missing.count, codes(report)) == ("ok", 0, ["unexpected_keys", "not_compared"])


def test_views_of_one_tensor_share_a_version() -> None:
    base = torch.zeros(3, 4)
    before = Before({"q": base[0], "k": base[1], "v": base[2]})
    base[0].fill_(1.0)
    assert before.after("qkv") == {"q": "written", "k": "unclear", "v": "unclear"}


def test_what_is_seen_of_values() -> None:
    shard = torch.zeros(4)
    state: dict[str, Any] = {
        "same": torch.zeros(2),
        "nan": torch.full((2,), float("nan")),
        "written": shard,
        "number": 1,
        "other": 1,
        "object": io.BytesIO(),
        "meta": torch.empty(2, device="meta"),
        "byte": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "sparse": torch.zeros(2).to_sparse(),
        "strided": torch.zeros(4, 4).t(),
        "nested": {"list": [torch.zeros(2), 7]},
    }
    before = Before(state)
    shard.copy_(torch.zeros(4))
    state["other"] = 1.5
    state["byte"].view(torch.uint8).numpy()[0] = 1
    state["nested"]["list"][0].add_(1)
    places = ["same", "nan", "written", "number", "other", "object", "meta", "byte", "sparse", "strided"]
    assert before.after([*places, "nested.list.0", "nested.list.1", "gone"]) == {
        "same": "same",
        "nan": "same",
        "written": "written",
        "number": "same",
        "other": "written",
        "object": "unclear",
        "meta": "unclear",
        "byte": "written",
        "sparse": "unclear",
        "strided": "same",
        "nested.list.0": "written",
        "nested.list.1": "same",
        "gone": "unclear",
    }


class NothingRead(dcp.FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        del plan, planner
        return done()


class RawReader(dcp.FileSystemReader):
    """
    Writes to the memory of the tensors.
    """

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        for item in plan.items:
            planner.resolve_tensor(item).numpy()[...] = np.float32(1)
        return done()


class OneRead(dcp.FileSystemReader):
    """
    Passes over what does not begin the plan.
    """

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        planner.resolve_tensor(plan.items[0]).fill_(1.0)
        return done()


@pytest.mark.parametrize(
    ("reader", "outcome"),
    [(NothingRead, ("no_op", ["not_read"])), (RawReader, ("ok", [])), (OneRead, ("partial", ["not_read"]))],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_reader_is_held_against_the_values(
    agent: Agent,
    tmp_path: Path,
    reader: type[dcp.FileSystemReader],
    outcome: tuple[str, list[str]],
    is_first: bool,  # noqa: FBT001
) -> None:
    path = tmp_path / "step-7"
    dcp.save({"w": torch.ones(4, 4), "b": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    # A second load of the same changes nothing, and is right.
    value = 0.0 if is_first else 1.0
    wanted = {"w": torch.full((4, 4), value), "b": torch.full((4,), value)}
    dcp.load(wanted, storage_reader=reader(path), no_dist=True)
    report = agent.last()
    assert (report.verdict, codes(report)) == (outcome if is_first else ("ok", []))


def test_where_the_checkpoint_cannot_be_asked_nobody_is_blamed(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    dcp.save({"w": torch.ones(4, 4)}, checkpoint_id=path, no_dist=True)

    class Elsewhere(NothingRead):
        def read_metadata(self) -> Metadata:
            metadata = super().read_metadata()
            metadata.storage_data = {}
            return metadata

    dcp.load({"w": torch.zeros(4, 4)}, storage_reader=Elsewhere(path), no_dist=True)
    report = agent.last()
    assert (report.verdict, codes(report)) == ("ok", ["not_compared"])


def test_a_planner_that_reads_into_a_copy(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    dcp.save({"w": torch.ones(4, 4), "b": torch.ones(4)}, checkpoint_id=path, no_dist=True)

    class Staging(dcp.DefaultLoadPlanner):
        is_put_back = True

        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            self.staged = super().lookup_tensor(index).clone()
            return self.staged

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            if self.is_put_back:
                super().lookup_tensor(read_item.dest_index).copy_(tensor)

    planner = Staging()
    dcp.load({"w": torch.zeros(4, 4), "b": torch.zeros(4)}, checkpoint_id=path, planner=planner, no_dist=True)
    planner.is_put_back = False
    dcp.load({"w": torch.zeros(4, 4), "b": torch.zeros(4)}, checkpoint_id=path, planner=planner, no_dist=True)
    assert [report.verdict for report in agent.reports()] == ["ok", "no_op"]


def test_what_a_reader_of_ones_own_lacks_is_still_found(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    dcp.save({"w": torch.ones(4), "v": torch.ones(4, dtype=torch.float16)}, checkpoint_id=path, no_dist=True)

    class Remote(dcp.FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            return super().read_data(plan, planner)

    wanted = {"w": torch.zeros(4), "v": torch.zeros(4), "more": torch.zeros(4), "epoch": 0}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, storage_reader=Remote(path), planner=planner, no_dist=True)
    report = agent.last()
    assert (report.verdict, report.coverage.keys, report.missing.count) == ("partial", 0.5, 2)
    assert codes(report) == ["missing_keys", "dtype_cast"]


class Refusing(torch.Tensor):
    """
    As megatron-core's: its values are where only it knows, and no operation is allowed.
    """

    _data: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, (2, *data.shape))  # type: ignore[attr-defined]
        made._data = data
        return made

    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([0] * self.ndim), torch.Size([1, *self._data.shape]))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._data.dtype)
        data = TensorWriteData(self.chunk(), properties, self.shape)
        return [WriteItem(MetadataIndex(fqn, self.chunk().offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        del index
        return self._data.unsqueeze(0)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("no tensor operations")


class Shy(Refusing):
    """
    Refuses to be asked its shape and type as well, once it is loaded.
    """

    is_shy = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.is_shy:
            raise RuntimeError("ask no questions")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Refusing, Shy])
def test_tensors_that_refuse_operations(agent: Agent, tmp_path: Path, kind: type[Refusing]) -> None:
    path, there = tmp_path / "step-7", torch.randn(4, dtype=torch.float64)
    dcp.save({"w": kind(there), "v": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    here = torch.zeros(4, dtype=torch.float64)
    wanted = {"w": kind(here), "v": torch.zeros(2)}
    dcp.load(wanted, checkpoint_id=path, no_dist=True)
    assert torch.equal(here, there)
    report = agent.last()
    assert (report.verdict, codes(report)) == ("ok", [])
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted | {"x": kind(here)}, checkpoint_id=path, planner=partial, no_dist=True)
    assert (agent.last().verdict, codes(agent.last())) == ("partial", ["missing_keys"])


def test_a_load_that_cannot_be_looked_at_has_an_end(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    agent.monkeypatch.setenv("CKPT_SENTRY_GUARD", "swallow")
    agent.monkeypatch.setattr("ckpt_sentry.integrations.dcp.facts.look_after", lambda load: load.nothing_of_the_kind)
    dcp.load({"w": torch.zeros(2)}, checkpoint_id=path, no_dist=True)
    report = agent.last()
    assert (report.verdict, codes(report), report.coverage.keys) == ("ok", ["not_compared"], 1.0)
    planner = OwnPlan(allow_partial_load=True)
    dcp.load({"w": torch.zeros(2)}, checkpoint_id=path, planner=planner, no_dist=True)
    report = agent.last()
    assert (report.verdict, codes(report), report.coverage) == ("ok", ["not_compared"], None)


@pytest.mark.parametrize(
    ("names", "verdict", "part"),
    [({"nope"}, "no_op", 0.0), ({"model", "nope"}, "partial", 2 / 3), ("model", "ok", 1.0)],
)
def test_names_that_were_asked_for(agent: Agent, tmp_path: Path, names: Any, verdict: str, part: float) -> None:
    path = tmp_path / "step-7"
    dcp.save({"model": {"w": torch.ones(2), "v": torch.ones(2)}}, checkpoint_id=path, no_dist=True)
    got = _load_state_dict_from_keys(names, checkpoint_id=path)
    assert len(got) == (0 if verdict == "no_op" else 1)
    report = agent.last()
    assert (report.verdict, report.coverage.keys) == (verdict, part)
    assert report.missing.keys == (() if verdict == "ok" else ("nope",))


def test_who_is_stock(tmp_path: Path) -> None:
    class Lookup(dcp.DefaultLoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return super().lookup_tensor(index)

    reader = dcp.FileSystemReader(tmp_path)
    assert is_stock(None, reader)
    assert is_stock(dcp.DefaultLoadPlanner(), reader)
    assert not is_stock(Lookup(), reader)
    assert not is_stock(None, NothingRead(tmp_path))


@pytest.mark.parametrize(
    ("failure", "said"),
    [(OSError("gone"), ["rank_raised"]), (KeyError("w from model not in state dict"), ["missing_keys", "rank_raised"])],
)
def test_why_a_planner_of_ones_own_gave_up(agent: Agent, tmp_path: Path, failure: Exception, said: list[str]) -> None:
    class Own(OwnPlan):
        def create_local_plan(self) -> LoadPlan:
            raise failure

    path = tmp_path / "step-7"
    dcp.save({"model.w": torch.ones(4), "v": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": torch.zeros(5), "v": torch.zeros(3)}, checkpoint_id=path, planner=Own(), no_dist=True)
    report = agent.last()
    assert [code for code in codes(report) if code != "unexpected_keys"] == said
    assert (report.coverage is None) is (said == ["rank_raised"])
