"""
Metadata of real checkpoints, read without torch, against torch's own reading of the same file.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.formats.dcp.metadata import ALLOWED, Chunk, DcpMetadata, Stored, by_number, convert, parse, read
from ckpt_sentry.formats.torch_save.unpickle import CostlyPickle, UnreadablePickle

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def torch_reads(path: Path) -> Metadata:
    return dcp.FileSystemReader(path).read_metadata()


def agrees(path: Path) -> DcpMetadata:
    mine, theirs = read(path), torch_reads(path)
    assert mine == convert(theirs)
    assert mine.unknown == ()
    assert mine.entries.keys() == theirs.state_dict_metadata.keys()
    for key, value in theirs.state_dict_metadata.items():
        if isinstance(value, BytesStorageMetadata):
            assert mine.entries[key] == Entry(None, None)
        else:
            assert mine.entries[key] == Entry(tuple(value.size), str(value.properties.dtype).removeprefix("torch."))
            assert mine.chunks[key] == tuple(Chunk(tuple(one.offsets), tuple(one.sizes)) for one in value.chunks)
    assert len(mine.storage) == len(theirs.storage_data)
    for index, info in theirs.storage_data.items():
        place = (index.fqn, None if index.offset is None else tuple(index.offset))
        assert mine.storage[place] == Stored(info.relative_path, info.offset, info.length)
    assert mine.paths == theirs.planner_data
    assert mine.saved_path == str(theirs.storage_meta.checkpoint_id) == str(path)
    assert mine.version == theirs.version == "1.0.0"
    assert mine.not_stored() == ()
    return mine


def test_plain_nested_and_bytes(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "extra": [1, torch.tensor(5), "text"],
        "kinds": {str(kind): torch.zeros(3).to(kind) for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.bool)},
    }
    dcp.save(state, checkpoint_id=tmp_path)
    mine = agrees(tmp_path)
    assert mine.entries["model.weight"] == Entry((3, 4), "float32")
    assert mine.entries["extra.1"] == Entry((), "int64")
    assert mine.paths is not None
    assert mine.paths["extra.1"] == ("extra", 1)
    summary = mine.summary()
    assert (summary.files, summary.saved_by, summary.saved_path) == (1, 1, str(tmp_path))
    assert summary.bytes == (tmp_path / "__0_0.distcp").stat().st_size


@pytest.mark.usefixtures("group")
def test_dtensor_and_sharded_tensor(tmp_path: Path) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    state = {
        "d": DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)]),
        "s": sharded_tensor.ones(spec, 6, 2),
    }
    dcp.save(state, checkpoint_id=tmp_path)
    mine = agrees(tmp_path)
    assert mine.chunks["s"] == (Chunk((0, 0), (6, 2)),)


def many_ranks(count: int) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size([2 * rank, 0]), torch.Size([2, 8])) for rank in range(count)]
    metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([2 * count, 8]), chunks)})
    metadata.storage_data = {
        MetadataIndex("w", chunk.offsets, rank): dcp.filesystem._StorageInfo(f"__{rank}_0.distcp", 0, 64)
        for rank, chunk in enumerate(chunks)
    }
    return metadata


def test_ranks_files_and_bytes() -> None:
    mine = parse(pickle.dumps(many_ranks(12)))
    assert mine.saved_by == tuple(range(12))
    assert mine.files == tuple(f"__{rank}_0.distcp" for rank in range(12))
    assert (mine.bytes, mine.elements, mine.saved_path, mine.version) == (12 * 64, 12 * 16, None, None)


def test_entries_that_no_file_holds() -> None:
    metadata = many_ranks(2)
    metadata.state_dict_metadata["step"] = BytesStorageMetadata()
    metadata.storage_data.pop(MetadataIndex("w", [2, 0]))
    assert parse(pickle.dumps(metadata)).not_stored() == ("step", "w")


class MegatronLike(Metadata):
    """A class of another project, with a field of its own."""


class Foreign:
    pass


def test_unknown_classes_and_fields_are_passed_over() -> None:
    metadata = MegatronLike(many_ranks(1).state_dict_metadata)
    metadata.mcore_data = {"w": Foreign()}
    metadata.planner_data = Foreign()
    mine = parse(pickle.dumps(metadata))
    assert mine.entries == {"w": Entry((2, 8), "float32")}
    assert mine.paths is None
    assert mine.unknown == (f"{__name__}.Foreign", f"{__name__}.MegatronLike")


def test_path_at_save_time_of_another_python() -> None:
    for parts in (("/", "data", "step-1"), ("/data/step-1",)):
        assert ALLOWED["pathlib._local", "PosixPath"](*parts) == "/data/step-1"


def test_stream_transforms_are_kept() -> None:
    metadata = many_ranks(1)
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]
    assert parse(pickle.dumps(metadata)).storage["w", (0, 0)].transforms == ("stream.zstd/1",)


@pytest.mark.parametrize("value", [{}, None, 7, Foreign(), {"state_dict_metadata": {}}])
def test_other_pickles_are_not_metadata(value: object) -> None:
    with pytest.raises(UnreadablePickle, match=r"not the metadata of torch\.distributed\.checkpoint"):
        parse(pickle.dumps(value))


def test_metadata_of_an_unexpected_form() -> None:
    metadata = copy.deepcopy(many_ranks(1))
    metadata.state_dict_metadata["w"].chunks[0].offsets = "here"
    with pytest.raises(UnreadablePickle, match="unexpected form"):
        parse(pickle.dumps(metadata))


@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncated(cut: float) -> None:
    data = pickle.dumps(many_ranks(2))
    with pytest.raises(UnreadablePickle):
        parse(data[: int(len(data) * cut)])


@given(position=st.integers(0, 500), value=st.integers(0, 255))
def test_one_wrong_byte_is_read_or_unreadable(position: int, value: int) -> None:
    data = bytearray(pickle.dumps(many_ranks(2)))
    data[position] = value
    with contextlib.suppress(UnreadablePickle):
        assert isinstance(parse(bytes(data)), DcpMetadata)


def test_read_raises_what_the_system_does(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path)
    (tmp_path / "__3.metadata").write_bytes(pickle.dumps(many_ranks(1)))
    assert read(tmp_path, rank=3).saved_by == (0,)
    with pytest.raises(UnreadablePickle, match="is larger than 10 bytes"):
        read(tmp_path, rank=3, max_bytes=10)


@given(numbers=st.lists(st.integers(0, 10**6), unique=True))
def test_by_number(numbers: list[int]) -> None:
    names = [f"__{number}_0.distcp" for number in numbers]
    assert sorted(names, key=by_number) == [f"__{number}_0.distcp" for number in sorted(numbers)]


@given(names=st.lists(st.text()))
def test_by_number_orders_any_names(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(names, key=by_number) == sorted(backwards, key=by_number)


def test_fspath(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(many_ranks(1)))
    assert read(os.fspath(tmp_path)) == read(tmp_path)


def nested(levels: int) -> tuple[object, ...]:
    """
    A value of a few bytes that would be written out as 2 ** levels.
    """
    value: tuple[object, ...] = ()
    for _ in range(levels):
        value = (value, value)
    return value


def metadata_of(**fields: object) -> bytes:
    made = Metadata({})
    made.__dict__.update(fields)
    return pickle.dumps(made)


def tensor_of(chunks: list[object], size: object = torch.Size([4])) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)  # type: ignore[arg-type]


SWELLING = {
    "chunks that all keys share": metadata_of(
        state_dict_metadata=dict.fromkeys(
            map(str, range(2_000)), tensor_of([ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))] * 2_000)
        )
    ),
    "a path that all keys share": metadata_of(
        state_dict_metadata={}, planner_data=dict.fromkeys(map(str, range(2_000)), ("a",) * 2_000)
    ),
}


@pytest.mark.parametrize("name", SWELLING)
def test_what_swells_is_left_alone(name: str) -> None:
    with pytest.raises(CostlyPickle, match="refers to the same data again and again"):
        parse(SWELLING[name])


@pytest.mark.parametrize(
    "size", [(2**64,), (10**4_000,), ("9" * 4_000,), (1,) * 65, (nested(60),)], ids=["64", "long", "text", "65", "deep"]
)
def test_a_shape_that_no_tensor_has_is_no_metadata(size: object) -> None:
    with pytest.raises(UnreadablePickle, match="unexpected form"):
        parse(metadata_of(state_dict_metadata={"w": tensor_of([], size)}))


def test_what_has_no_end_is_named_by_its_type() -> None:
    properties = TensorProperties(torch.float32)
    properties.dtype = nested(60)  # type: ignore[assignment]
    stored = {"w": TensorStorageMetadata(properties, torch.Size([4]), [])}
    read_back = parse(metadata_of(state_dict_metadata=stored, planner_data={"w": ("w", nested(60), 10**4_000)}))
    assert read_back.entries["w"] == Entry((4,), "tuple")
    assert read_back.paths == {"w": ("w", "tuple", "int")}


def test_a_layout_or_path_without_end_is_not_written_out() -> None:
    for module, name in (("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")):
        data = b"\x80\x02c%s\n%s\n)" % (module.encode(), name.encode()) + b"2\x86" * 100 + b"\x85R."
        with pytest.raises(UnreadablePickle):
            parse(data)
