from __future__ import annotations

import argparse
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_sentry.core.report import Finding
from ckpt_sentry.formats import elements
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.formats.torch_save import file as pickle_


class Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def save(value: object, path: Path, how: str = "zip") -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=how == "zip")
    return path


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in tensors.items()}


@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_a_state_dict_and_its_samples(tmp_path: Path, how: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.BatchNorm1d(50)).to(torch.bfloat16)
    state = model.state_dict()
    path = save(state, tmp_path / "x.pt", how)

    facts = pickle_.read(path)

    assert facts.holds == "dict"
    assert dict(facts.inventory.entries) == described(state)
    assert (facts.nested_under, facts.opaque, facts.others) == (None, (), ())
    for key, tensor in state.items():
        indices, values = pickle_.sample(path, key)
        assert list(values) == tensor.double().flatten()[list(indices)].tolist()


@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_views_are_sampled_in_their_own_order(tmp_path: Path, how: str) -> None:
    base = torch.arange(600.0).reshape(20, 30)
    state = {"turned": base.t(), "part": base[3:9, 5:25:2], "wide": base[:1].expand(9, 30), "base": base}
    path = save(state, tmp_path / "x.pt", how)

    for key, tensor in state.items():
        indices, values = pickle_.sample(path, key)
        assert list(values) == tensor.flatten()[list(indices)].tolist()


@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_tied_tensors_share_a_storage_and_views_do_not_count_as_tied(tmp_path: Path, how: str) -> None:
    embed, flat = torch.ones(4, 3), torch.ones(10)
    state = {"embed": embed, "head": embed, "first": flat[:5], "second": flat[5:], "empty": flat[:0], "void": flat[:0]}

    assert pickle_.read(save(state, tmp_path / "x.pt", how)).inventory.ties == {"head": "embed"}


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_tensor_keeps_its_shape_and_type(tmp_path: Path) -> None:
    state = {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "uint16": torch.ones(3, dtype=torch.uint16),
        "float8": torch.ones(2, 3).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex128),
        "meta": torch.ones(3, 2, device="meta"),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "scalar": torch.tensor(3),
        "empty": torch.ones(0, 4),
    }
    facts = pickle_.read(save(state, tmp_path / "x.pt"))

    assert dict(facts.inventory.entries) == described(state)
    assert facts.opaque == ()
    cannot = {key for key, slot in facts.slots.items() if not elements.can_sample(slot)}
    assert cannot == {"complex", "meta", "coo", "csr", "quantized"}


def test_other_values_are_named_by_their_type(tmp_path: Path) -> None:
    state = {
        "tensor": torch.ones(1),
        "size": torch.Size([1]),
        "device": torch.device("cpu"),
        "none": None,
        "numpy": np.float64(1),
        "arguments": argparse.Namespace(lr=1),
        "path": Path("/x"),
        3: "a number as the key",
    }
    facts = pickle_.read(save(state, tmp_path / "x.pt"))

    assert {key: entry.dtype for key, entry in facts.inventory.entries.items()} == {
        "tensor": "float32",
        "size": "tuple",
        "device": "torch.device",
        "none": "NoneType",
        "numpy": "numpy._core.multiarray.scalar",
        "arguments": "argparse.Namespace",
        "path": "pathlib.PosixPath",
        "3": "str",
    }
    assert facts.opaque == ("argparse.Namespace", "numpy._core.multiarray.scalar", "numpy.dtype", "pathlib.PosixPath")


@pytest.mark.parametrize(
    ("value", "under", "others"),
    [
        ({"state_dict": {"a": 1}, "epoch": 3}, "state_dict", ("epoch",)),
        ({"model": {"a": 1}, "optimizer": {"state": {"a": 1, "b": 1}}}, "model", ("optimizer",)),
        ({"module": {"a": 1}, "ema": {"a": 1, "b": 1}}, "module", ("ema",)),
        ({"generator_7": {"a": 1}, "log": {"b": []}}, "generator_7", ("log",)),
        ({"checkpoint": {"net": {"a": 1, "b": 1}, "odd": {"a": 1}}}, "checkpoint.net", ()),
        ({"optimizer": {"exp_avg": {"a": 1}}}, None, ()),
        ({"a": 1, "model": {"a": 1, "b": 1}}, "model", ("a",)),
        ({"a": 1, "b": 1, "extra": {"a": 1, "b": 1, "c": 1}}, None, ()),
        ({}, None, ()),
    ],
)
def test_a_wrapped_state_dict_is_found(tmp_path: Path, value: Any, under: str | None, others: tuple[str, ...]) -> None:
    def fill(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: fill(item) for key, item in tree.items()}
        return torch.full((2,), 7.0) if tree == 1 else tree

    facts = pickle_.read(save(fill(value), tmp_path / "x.pt"))

    assert (facts.nested_under, facts.others) == (under, others)
    if under is None:
        assert facts.nested is None
    else:
        assert facts.nested is not None
        assert facts.nested.entries["a"] == ((2,), "float32")
        assert pickle_.sample(tmp_path / "x.pt", "a").values == (7.0, 7.0)


def test_one_dict_under_two_names_is_found_under_the_usual_one(tmp_path: Path) -> None:
    inner = {"a": torch.ones(1)}

    assert pickle_.read(save({"aaa": inner, "model": inner, "zzz": inner}, tmp_path / "x.pt")).nested_under == "model"


def test_a_module_saved_whole_is_named(tmp_path: Path) -> None:
    facts = pickle_.read(save(torch.nn.Linear(2, 2), tmp_path / "x.pt"))

    assert facts.holds == "torch.nn.modules.linear.Linear"
    assert facts.opaque == ("torch.nn.modules.linear.Linear",)
    assert pickle_.read(save([1], tmp_path / "x.pt")).holds == "list"
    assert pickle_.read(save(torch.ones(1), tmp_path / "x.pt")).holds == "tensor"


@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_a_hostile_pickle_is_named_and_never_run(tmp_path: Path, how: str) -> None:
    witness = tmp_path / "witness"
    path = save({"a": torch.ones(1), "b": Hostile(f"touch {witness}")}, tmp_path / "x.pt", how)

    facts = pickle_.read(path)

    assert facts.opaque == ("posix.system",)
    assert facts.inventory.entries["b"] == (None, "posix.system")
    assert not witness.exists()


def archive_of(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    return path


@pytest.mark.parametrize(
    ("pickled", "compression", "reason"),
    [
        (
            b"](" + b"N" * 100_000 + b"eq\x000cbuiltins\nset\nq\x010](" + b"h\x01h\x00\x85R" * 200 + b"e.",
            zipfile.ZIP_STORED,
            "refers to the same data again and again, as no checkpoint does",
        ),
        (b"N0" * 2_000_000 + b"N.", zipfile.ZIP_DEFLATED, "is compressed beyond what a checkpoint allows"),
    ],
    ids=["copies", "compressed"],
)
def test_a_pickle_that_swells_is_not_compared_and_not_blamed(
    tmp_path: Path, pickled: bytes, compression: int, reason: str
) -> None:
    path = archive_of(tmp_path / "x.bin", b"\x80\x02" + pickled, compression)
    with pytest.raises(HeaderError) as caught:
        pickle_.read(path)
    assert caught.value.finding() == Finding(
        "not_compared", "info", f"x.bin could not be compared: its pickle {reason}"
    )


def test_strides_of_endless_digits_are_refused(tmp_path: Path) -> None:
    size = b"(" + (b"\x8a\x08" + b"\xff" * 7 + b"\x1f") * 60 + b"t"
    tensor = (
        b"ctorch._utils\n_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\nX\x10\0\0\0torch.sparse_coo\x85R"
    )
    values = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n)))tR"
    path = archive_of(tmp_path / "x.bin", b"\x80\x02" + tensor + b"(N" + values + size + b"ttR.")
    with pytest.raises(HeaderError, match="has a tensor with a bad shape"):
        pickle_.read(path)


def test_very_many_names_of_one_tensor_cost_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = pickle_._slot
    monkeypatch.setattr(pickle_, "_slot", lambda *args: made.append(args) or real(*args))
    path = save(dict.fromkeys(map(str, range(1_000)), torch.ones(2)), tmp_path / "x.pt")
    facts = pickle_.read(path)
    assert len(made) == 1
    assert facts.inventory.ties == dict.fromkeys(map(str, range(1, 1_000)), "0")


def test_a_key_that_many_dicts_share_is_not_written_out_for_each(tmp_path: Path) -> None:
    # 2 kB of file a dict; the names of all that is in them, written out, would take 100 GB.
    long = "x" * 1_000_000
    path = save({long: {str(n): {long: {}} for n in range(10_000)}}, tmp_path / "x.pt")
    assert pickle_.read(path).nested_under is None


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_a_cut_file_is_said_to_be_cut(tmp_path: Path, how: str, keep: float) -> None:
    path = save({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "x.pt", how)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])

    with pytest.raises(HeaderError) as caught:
        pickle_.read(path)
    assert caught.value.code == "truncated_file"
    assert caught.value.text.startswith("x.pt ")


def test_a_plain_pickle_is_no_torch_file(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": 1}))

    with pytest.raises(HeaderError, match=r"the pickle in x\.pt was not written by torch\.save"):
        pickle_.read(tmp_path / "x.pt")


def test_a_compressed_storage_is_not_sampled(tmp_path: Path) -> None:
    source = save({"a": torch.ones(100)}, tmp_path / "x.pt")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))

    facts = pickle_.read(tmp_path / "y.pt")

    assert facts.inventory.entries == {"a": ((100,), "float32")}
    assert not elements.can_sample(facts.slots["a"])


def test_a_tensor_beyond_its_storage_is_not_sampled(tmp_path: Path) -> None:
    source = save({"a": torch.ones(3)}, tmp_path / "x.pt")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name)[: 8 if name.endswith("data/0") else None])

    assert not elements.can_sample(pickle_.read(tmp_path / "y.pt").slots["a"])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_a_header_error_or_nothing(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pt"
    how = data.draw(st.sampled_from(["zip", "legacy"]))
    save({"a": torch.ones(3), "b": {"c": torch.ones(1, 2)}}, path, how)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)

    try:
        facts = pickle_.read(path)
    except HeaderError as error:
        code = error.code
        assert code in {"truncated_file", "pickle_invalid"}
    else:
        assert set(facts.slots) <= set(facts.inventory.entries)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02"]), st.binary(max_size=200))
def test_any_bytes_are_a_header_error(tmp_path_factory: Any, start: bytes, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pt"
    path.write_bytes(start + raw)

    with pytest.raises(HeaderError):
        pickle_.read(path)
