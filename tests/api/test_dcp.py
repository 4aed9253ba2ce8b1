from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckpt_sentry
from ckpt_sentry import DCPErrorAggregator, DCPLoadError, ShapeConflict, precheck
from ckpt_sentry.testing import check_error_text, faults_of
from tests.integrations.hosts import compares_sizes


class Net(nn.Module):
    def __init__(self, head: int = 16, adapters: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, head)
        for i in range(adapters):
            setattr(self, f"adapter{i}", nn.Parameter(torch.zeros(2)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step-1200"
    dcp.save({"model": Net().state_dict(), "step": 1200}, checkpoint_id=path, no_dist=True)
    return path


def test_what_fits_is_no_error(saved: Path) -> None:
    assert precheck({"model": Net().state_dict()}, saved) is None
    assert precheck({"model": Net()}, saved) is None
    assert precheck({"model": Net(adapters=1)}, saved, allow_partial_load=True) is None
    assert precheck({"model": Net(adapters=1)}, saved, allow_missing=["*.adapter*"]) is None


def test_a_whole_prefix_is_named_beside_an_optimizer(tmp_path: Path) -> None:
    optimizer = {f"state.{key}.exp_avg": value for key, value in Net().state_dict().items()}
    dcp.save({"model": Net().state_dict(), "optim": optimizer}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    error = precheck(nn.ModuleDict({"inner": Net()}), tmp_path / "step-1")
    assert "(model.head.bias → inner.head.bias), then 100 % would load" in str(error)


def test_everything_that_does_not_fit_is_said_at_once(saved: Path) -> None:
    error = precheck({"model": Net(head=32, adapters=800).state_dict()}, saved, rank=2)

    assert error is not None
    assert (error.rank, error.checkpoint_step, error.path) == (2, 1200, str(saved))
    assert len(error.missing) == 800
    assert error.unexpected == ("step",)
    assert error.shape_conflicts == (
        ShapeConflict("model.head.bias", "model.head", (32,), (16,)),
        ShapeConflict("model.head.weight", "model.head", (32, 8), (16, 8)),
    )
    assert str(error) == (
        f"dcp.load cannot succeed · rank 2 · step 1200 · {saved}\n"
        "  800 keys missing from the checkpoint: model.adapter{0-799}\n"
        "  shape mismatch: model.head.bias (module model.head): model [32], checkpoint [16]\n"
        "  shape mismatch: model.head.weight (module model.head): model [32, 8], checkpoint [16, 8]\n"
        "  1 key unexpected: in the checkpoint, not in the model: step"
    )
    check_error_text(error)


NET = Net().state_dict()


@pytest.mark.parametrize(
    ("held", "asked"),
    [
        ({"model": NET}, {"model": NET}),
        ({"model": NET}, NET),
        ({"model": NET, "optimizer": {"lr": torch.ones(1)}, "step": 3}, NET),
        ({"app": NET}, NET),
        ({f"module.{key}": value for key, value in NET.items()}, NET),
        (NET, {"model": NET}),
        ({"model": NET}, {"app": NET}),
        ({"model": NET}, {"model": {key: value.half() for key, value in NET.items()}}),
        ({"model": NET}, {"model": NET, "step": 0}),
        ({"step": torch.tensor(3)}, {"step": 0}),
        ({"step": 3}, {"step": torch.tensor(0)}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(3)}),
        ({"w": torch.zeros(1)}, {"w": torch.tensor(0.0)}),
        ({"a": [1, {"b": torch.zeros(2)}], "c": {}}, {"a": [0, {"b": torch.zeros(2)}]}),
        ({"a": [1, {"b": torch.zeros(2)}]}, {"a": [0, {"b": torch.zeros(3)}]}),
        ({"a": 1}, {}),
    ],
)
def test_it_says_what_torch_says(tmp_path: Path, held: dict[str, Any], asked: dict[str, Any]) -> None:
    dcp.save(held, checkpoint_id=tmp_path, no_dist=True)

    error = precheck(asked, tmp_path)
    if error is not None and error.message.startswith("dcp.load copies what fits"):
        assert not compares_sizes()
        assert loads(asked, tmp_path)
    else:
        assert (error is None) is loads(asked, tmp_path)


def loads(asked: dict[str, Any], path: Path) -> bool:
    try:
        dcp.load(copy.deepcopy(asked), checkpoint_id=path, no_dist=True)
    except (Exception, dcp.CheckpointException):
        return False
    return True


@pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.checkpoint._version") is None,
    reason="this torch takes no checkpoint from before 2.4 apart",
)
@pytest.mark.parametrize(("asked", "fits"), [({"lr": [0.0, 0.0]}, True), ({"lr": [0.0], "n": [0]}, False)])
def test_lists_that_were_saved_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], *, fits: bool
) -> None:
    from torch.distributed.checkpoint import _version

    monkeypatch.setattr(_version, "_derived_version", "2_3")
    dcp.save({"lr": [0.1, 0.2]}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.undo()

    assert (precheck(asked, tmp_path) is None) is loads(asked, tmp_path) is fits


def test_a_module_is_compared_with_its_part_of_the_state(saved: Path) -> None:
    assert precheck(Net(), saved) is None
    error = precheck(Net(head=4), saved)

    assert error is not None
    assert [one.key for one in error.shape_conflicts] == ["head.bias", "head.weight"]


def test_a_prefix_is_told(saved: Path) -> None:
    error = precheck(NET, saved)

    assert error is not None
    assert error.missing == tuple(sorted(NET))
    assert 'strip the prefix "model."' in str(error)


def test_a_tensor_where_an_object_is_asked_for_is_told(tmp_path: Path) -> None:
    dcp.save({"step": torch.tensor(3)}, checkpoint_id=tmp_path, no_dist=True)

    assert str(precheck({"step": 0}, tmp_path)).splitlines()[1:] == [
        "  1 key saved as a tensor, asked for as another object: step; ask for a tensor, and convert it after the load"
    ]


def test_shards_are_not_read(saved: Path) -> None:
    for shard in saved.glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))

    assert precheck({"model": Net()}, saved) is None


def cut(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "text"),
    [(Path.unlink, "is missing"), (lambda shard: shard.write_bytes(b""), "is empty (0 bytes)"), (cut, "is cut off")],
    ids=["missing", "empty", "cut off"],
)
@pytest.mark.parametrize("given", [Path, dcp.FileSystemReader], ids=["path", "reader"])
def test_a_file_that_lacks_what_is_asked_for_is_named(
    tmp_path: Path, harm: Callable[[Path], object], text: str, given: Callable[[Path], Any]
) -> None:
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    dcp.save({"a": torch.ones(64), "b": torch.ones(64)}, storage_writer=writer, no_dist=True)
    of_b = next(
        place.relative_path
        for index, place in dcp.FileSystemReader(tmp_path).read_metadata().storage_data.items()
        if index.fqn == "b"
    )
    harm(tmp_path / of_b)
    error = precheck({"a": torch.zeros(64), "b": torch.zeros(64)}, given(tmp_path))

    assert f"{tmp_path / of_b} {text}" in str(error)
    assert not loads({"b": torch.zeros(64)}, tmp_path)
    assert precheck({"a": torch.zeros(64)}, given(tmp_path)) is None
    assert loads({"a": torch.zeros(64)}, tmp_path)


def test_metadata_and_readers_are_taken(saved: Path) -> None:
    reader = dcp.FileSystemReader(saved)

    assert precheck({"model": Net()}, reader) is None
    error = precheck({"model": Net(head=4)}, reader.read_metadata())
    assert error is not None
    assert len(error.shape_conflicts) == 2


@pytest.mark.parametrize(
    ("name", "text"), [("step-1300", "does not exist"), ("step-1200/.metadata", "not the folder of a DCP checkpoint")]
)
def test_what_cannot_be_read_is_explained(saved: Path, name: str, text: str) -> None:
    error = precheck({"model": Net()}, saved.parent / name)

    assert error is not None
    assert text in str(error)
    with pytest.raises(DCPLoadError, match=text):
        ckpt_sentry.audit(Net(), saved.parent / name)


def test_a_url_is_read_as_torch_reads_it(saved: Path) -> None:
    pytest.importorskip("fsspec")
    asked = {"model": Net().state_dict()}
    assert precheck(asked, saved.as_uri()) is None
    error = precheck(asked, f"{saved.as_uri()}-gone")
    assert error is not None
    assert "the metadata cannot be read: FileNotFoundError" in str(error)


def test_a_reader_that_raises_is_told(saved: Path) -> None:
    class Own(dcp.FileSystemReader):
        pass

    error = precheck({"w": torch.ones(1)}, Own(saved.parent / "step-9"))
    assert isinstance(error, DCPLoadError)
    assert "the metadata cannot be read: FileNotFoundError" in str(error)


def test_audit_reports_without_loading(saved: Path) -> None:
    net = Net(adapters=2)
    before = copy.deepcopy(net.state_dict())
    report = ckpt_sentry.audit(net, saved)

    assert report.verdict == "partial"
    assert report.missing.keys == ("adapter{0-1}",)
    assert (report.step, report.step_source) == (1200, "folder name")
    assert report.coverage is not None
    assert report.coverage.keys == 0.8
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert ckpt_sentry.audit({"model": Net()}, saved).verdict == "ok"


def test_audit_takes_a_state_dict_as_it_is(saved: Path) -> None:
    report = ckpt_sentry.audit(Net().state_dict(), saved)

    assert report.verdict == "no_op"
    assert [one.next for one in report.findings if one.code == "renamed_keys"] == [
        "Ask for them under the names that they have in the checkpoint, and rename them back after the load."
    ]


def test_audit_takes_files_and_folders(tmp_path: Path) -> None:
    held = {key: value for key, value in Net().state_dict().items() if "head" not in key}
    save_file(held, tmp_path / "model.safetensors")
    torch.save(Net().state_dict(), tmp_path / "model.pt")

    whole = ckpt_sentry.audit(Net(), tmp_path / "model.pt")
    assert (whole.verdict, whole.framework) == ("ok", "torch")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        report = ckpt_sentry.audit(Net().state_dict(), path)
        assert (report.verdict, report.missing.keys, report.path) == ("partial", ("head.{bias,weight}",), str(path))
        assert report.checkpoint is not None
        assert (report.format, report.checkpoint.keys, report.checkpoint.files) == ("safetensors", 6, 1)


def test_audit_is_the_package_and_the_function() -> None:
    from ckpt_sentry import audit
    from ckpt_sentry.core import fold

    assert callable(audit)
    assert fold.fold(["a0", "a1"]) == ("a{0-1}",)


def test_neither_hooks_nor_a_process_group_are_needed(saved: Path) -> None:
    program = f"""
import ckpt_sentry, torch, torch.distributed as dist
from ckpt_sentry.patching import ledger
error = ckpt_sentry.precheck({{"model": {{"other": torch.zeros(2)}}}}, {str(saved)!r})
print(type(error).__name__, ledger.installed(), dist.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "DCPLoadError False False", done.stderr


def test_the_error_survives_pickle_and_takes_generators() -> None:
    error = DCPLoadError(
        "no",
        rank=3,
        path="s3://key:secret@bucket/step-5",
        missing=(f"a{i}" for i in range(3)),
        unexpected={"b": 1}.keys(),
    )
    again = pickle.loads(pickle.dumps(error))

    assert str(again) == str(error)
    assert again.missing == ("a0", "a1", "a2")
    assert again.unexpected == ("b",)
    assert "secret" not in str(error)
    assert "a{0-2}" in str(error)


def errors(ranks: int) -> list[BaseException | None]:
    conflict = ShapeConflict("model.head.weight", "model.head", (32, 8), (16, 8))
    return [
        DCPLoadError(rank=rank, checkpoint_step=7, path="/data/step-7", missing=["model.a0", "model.a1"])
        if rank != 1
        else DCPLoadError(rank=rank, checkpoint_step=7, path="/data/step-7", shape_conflicts=[conflict])
        for rank in range(ranks)
    ]


def test_the_summary_says_each_thing_once() -> None:
    aggregator = DCPErrorAggregator()
    aggregator.collect_all([*errors(4), None])

    assert aggregator.failed_ranks == "0-3"
    assert aggregator.summary() == (
        "4 ranks failed: 0-3\n"
        "  checkpoint on ranks 0-3: step 7 · /data/step-7\n"
        "  2 keys missing from the checkpoint: model.a{0-1} · ranks 0,2-3\n"
        "  shape mismatch: model.head.weight (module model.head): model [32, 8], checkpoint [16, 8] · rank 1"
    )


def test_the_summary_does_not_grow_with_ranks() -> None:
    few, many = DCPErrorAggregator(), DCPErrorAggregator()
    few.collect_all(errors(4))
    many.collect_all(errors(4096))

    assert many.summary().count("\n") == few.summary().count("\n")


def test_a_rank_without_an_error_is_none_of_those_that_failed(saved: Path) -> None:
    aggregator = DCPErrorAggregator()
    aggregator.collect(precheck({"model": Net()}, saved))
    aggregator.collect(None, rank=3)

    assert (aggregator.failed_ranks, aggregator.summary()) == ("", "no errors")
    aggregator.collect(precheck({"model": Net(head=4)}, saved, rank=2))
    assert aggregator.failed_ranks == "2"


def test_nothing_collected() -> None:
    assert DCPErrorAggregator().summary() == "no errors"


@pytest.fixture
def watched(fresh_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:  # noqa: ARG001
    monkeypatch.setenv("CKPT_SENTRY", "1")
    monkeypatch.setenv("CKPT_SENTRY_LOG", "off")
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(tmp_path / "records"))
    ckpt_sentry.uninstall()
    ckpt_sentry.install()
    yield
    ckpt_sentry.uninstall()


@pytest.mark.usefixtures("watched")
@pytest.mark.skipif(not compares_sizes(), reason="this torch raises for no shape")
def test_torchs_own_exceptions_are_collected(saved: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load({"model": Net(head=32).state_dict()}, checkpoint_id=saved, no_dist=True)
    aggregator = DCPErrorAggregator()
    aggregator.collect(raised.value)
    aggregator.collect(ValueError("another"), rank=5)

    check_error_text(raised.value)
    assert type(raised.value) is dcp.CheckpointException
    assert aggregator.failed_ranks == "0,5"
    assert "model.head.weight (module model.head): model [32, 8], checkpoint [16, 8] · rank 0" in aggregator.summary()
    assert "ValueError: another · rank 5" in aggregator.summary()


def test_texts_that_say_nothing_are_refused() -> None:
    view = {"a": 1}.keys()
    error = ValueError(f"missing: {(x for x in 'a')}, {view}")

    assert faults_of(error) == [
        "it shows a generator",
        "it shows a dict view",
        "it shows an address",
        "no report is attached: the load was not watched",
    ]
    with pytest.raises(AssertionError, match="it shows a generator; it shows a dict view"):
        check_error_text(error)


@pytest.mark.usefixtures("watched")
def test_strict_refuses_what_is_partial_and_observe_nothing(
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_settings: None,  # noqa: ARG001
) -> None:
    from ckpt_sentry import config

    def load() -> None:
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"model": Net(adapters=2).state_dict()}, checkpoint_id=saved, planner=planner, no_dist=True)

    load()
    for mode in ("observe", "strict"):
        monkeypatch.setenv("CKPT_SENTRY", mode)
        config.reset()
        if mode == "observe":
            load()
        else:
            with pytest.raises(ckpt_sentry.LowCoverageError) as raised:
                load()
            assert raised.value.ckpt_sentry.verdict == "partial"
            assert "step 1200, rank 0" in str(raised.value)
            assert "model.adapter{0-1}" in str(raised.value)
            check_error_text(raised.value)
    # What is whole passes in every mode.
    dcp.load({"model": Net().state_dict()}, checkpoint_id=saved, no_dist=True)
