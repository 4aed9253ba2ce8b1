from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ckpt_sentry.core.report import Finding
from ckpt_sentry.formats import safetensors, sniff, state_file
from ckpt_sentry.formats.safetensors import HeaderError

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: object, body: bytes) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + body)
    return path


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except SafetensorError:
        return False
    return True


DTYPES = [
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool",
    "complex64 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
]


@pytest.mark.parametrize("dtype", " ".join(DTYPES).split())
def test_names_shapes_and_types_are_those_of_torch(tmp_path: Path, dtype: str) -> None:
    tensors = {
        "a": torch.ones(3, 5).to(getattr(torch, dtype)),
        "scalar": torch.ones(()).to(getattr(torch, dtype)),
        "none": torch.ones(0, 4).to(getattr(torch, dtype)),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})

    header = safetensors.read(tmp_path / "x.safetensors")

    assert header.metadata == {"format": "pt"}
    assert {k: (v.shape, v.dtype) for k, v in header.inventory.entries.items()} == {
        k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES[0].split())
@pytest.mark.parametrize("shape", [(7,), (130, 70), (2, 3, 4), (), (0,)])
def test_samples_are_the_tensors_own_values(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).abs().to(getattr(torch, dtype))
    save_file({"before": torch.ones(3), "x": tensor}, tmp_path / "x.safetensors")

    indices, values = safetensors.sample(tmp_path / "x.safetensors", "x")

    assert indices == safetensors.sample_indices(tensor.numel())
    assert list(values) == tensor.double().flatten()[list(indices)].tolist()


HEADERS: dict[str, tuple[object, bytes]] = {
    "good": ({"a": A}, b"x" * 8),
    "trailing bytes": ({"a": A}, b"x" * 9),
    "short": ({"a": A}, b"x" * 7),
    "two names, one place": ({"a": A, "b": A}, b"x" * 8),
    "hole": ({"a": A, "b": {**A, "data_offsets": [9, 17]}}, b"x" * 17),
    "hole at the start": ({"b": {**A, "data_offsets": [1, 9]}}, b"x" * 9),
    "wrong size": ({"a": {**A, "shape": [3]}}, b"x" * 8),
    "unknown type": ({"a": {**A, "dtype": "F99"}}, b"x" * 8),
    "one field more": ({"a": {**A, "more": 1}}, b"x" * 8),
    "one field less": ({"a": {"dtype": "F32", "shape": [2]}}, b"x" * 8),
    "float shape": ({"a": {**A, "shape": [2.0]}}, b"x" * 8),
    "negative shape": ({"a": {**A, "shape": [-2]}}, b"x" * 8),
    "metadata of numbers": ({"a": A, "__metadata__": {"x": 1}}, b"x" * 8),
    "no metadata": ({"a": A, "__metadata__": None}, b"x" * 8),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{json.dumps(A)}}}', b"x" * 8),
    "space before": (f" {json.dumps({'a': A})}", b"x" * 8),
    "space behind": (f"{json.dumps({'a': A})}   ", b"x" * 8),
    "list": ([], b""),
    "empty": ({}, b""),
    "no elements": ({"a": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}, "b": A}, b"x" * 8),
    "nan": ('{"a": NaN}', b""),
    "surrogate": (f'{{"\\ud800":{json.dumps(A)}}}', b"x" * 8),
    "deep": ('{"a":' * 3000, b""),
    "huge shape": ({"a": {**A, "shape": [2**63, 2**63]}}, b"x" * 8),
    "half a byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"x"),
    "twice the same": (f'{{"a":{json.dumps(A)},"a":{json.dumps(A)}}}', b"x" * 8),
    "twice": (f'{{"a":{json.dumps(A)},"a":{json.dumps({**A, "data_offsets": [8, 16]})}}}', b"x" * 16),
}


@pytest.mark.parametrize("case", HEADERS)
def test_what_the_library_refuses_is_refused_and_nothing_else(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "x.safetensors", *HEADERS[case])

    if library_reads(path):
        safetensors.read(path)
    else:
        with pytest.raises(HeaderError) as caught:
            safetensors.read(path)
        assert caught.value.code == ("truncated_file" if case == "short" else "header_invalid")
        assert "x.safetensors" in caught.value.finding().text


def test_a_name_that_the_json_holds_twice_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", *HEADERS["twice the same"])

    assert safetensors.read(path).duplicates == ("a",)
    assert safetensors.read(write(path, *HEADERS["good"])).duplicates == ()


_FIELDS = '"dtype":"F32","shape":[2],"data_offsets":[0,8]'
_ESCAPED = _FIELDS.replace("_", r"\u005f")


@pytest.mark.parametrize(
    "header",
    [
        f'{{"a":{{{_FIELDS}}},"a":{{{_FIELDS}}}}}',
        f'{{"a" :{{{_FIELDS}}},"a":{{{_FIELDS}}}}}',
        f'{{"a"\n:{{{_FIELDS}}},\n"a":{{{_FIELDS}}}}}',
        f'{{"a":{{{_FIELDS}}},"\\u0061":{{{_FIELDS}}}}}',
        f'{{"a":{{{_ESCAPED}}},"a":{{{_FIELDS}}}}}',
        f'{{"a":{{}},"a":{{{_FIELDS}}}}}',
        f'{{"a":null,"a":{{{_FIELDS}}}}}',
        f'{{"__metadata__":{{":b":":"}},"a" :{{{_FIELDS}}},"a" :{{{_FIELDS}}}}}',
    ],
)
def test_a_name_is_seen_twice_however_it_is_written(tmp_path: Path, header: str) -> None:
    assert safetensors.read(write(tmp_path / "x.safetensors", header, bytes(8))).duplicates == ("a",)


@pytest.mark.parametrize(
    "header",
    [
        f'{{"__metadata__":{{"a":"b"}},"\\u005f_metadata__":{{"c":"d"}},"a":{{{_FIELDS}}}}}',
        f'{{"a":{{{_FIELDS},"dtype":"F32"}}}}',
        f'{{"a":{{{_FIELDS},"shape" :[2]}}}}',
    ],
)
def test_what_may_not_be_there_twice_is_refused_as_the_library_does(tmp_path: Path, header: str) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(8))
    assert not library_reads(path)
    with pytest.raises(HeaderError):
        safetensors.read(path)


@pytest.mark.parametrize("name", ["data_offsets", ":", 'a":', "dtype", "\\", '"', " ", "ü"])
def test_any_name_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    save_file({name: torch.ones(2), "b": torch.zeros(1)}, tmp_path / "x.safetensors", metadata={":": '": '})
    header = safetensors.read(tmp_path / "x.safetensors")
    assert (header.slots.keys(), header.duplicates) == ({name, "b"}, ())


def test_packed_elements_are_counted_as_torch_counts_them(tmp_path: Path) -> None:
    info = {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}
    path = write(tmp_path / "x.safetensors", {"a": info}, b"x" * 8)

    assert safetensors.read(path).inventory.entries["a"] == ((4, 2), "float4_e2m1fn_x2")
    with safe_open(path, framework="pt") as file:
        assert tuple(file.get_tensor("a").shape) == (4, 2)


def test_a_cut_file_says_how_much_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(10), "b": torch.ones(10), "c": torch.ones(10)}, path)
    path.write_bytes(path.read_bytes()[:-50])

    with pytest.raises(HeaderError) as caught:
        safetensors.read(path)
    assert caught.value.code == "truncated_file"
    assert caught.value.text == "x.safetensors has 70 of 120 bytes of tensors: 2 of 3 tensors are cut"


def test_a_cut_header_is_a_cut_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": A}, b"x" * 8)
    path.write_bytes(path.read_bytes()[:20])

    with pytest.raises(HeaderError) as caught:
        safetensors.read(path)
    assert (caught.value.code, caught.value.text) == (
        "truncated_file",
        "x.safetensors ends inside its header (20 bytes)",
    )


@pytest.mark.parametrize(("length", "code"), [(100_000_000, None), (100_000_001, "header_too_large")])
def test_only_a_header_beyond_the_librarys_limit_is_too_large(tmp_path: Path, length: int, code: str | None) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}".ljust(length))

    assert library_reads(path) is (code is None)
    with pytest.raises(HeaderError, match=f"{length:,} bytes") as caught:
        safetensors.read(path)
    assert (caught.value.code, caught.value.level) == ((code, "error") if code else ("not_compared", "info"))


@pytest.mark.parametrize("more", [0, 1])
def test_a_header_beyond_all_measure_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    monkeypatch.setattr(safetensors, "MAX_PARSED", 100)
    path = write(tmp_path / "x.safetensors", "{}".ljust(100 + more), b"")
    found = state_file.read(path)
    assert found.readable is not bool(more)
    text = "x.safetensors could not be compared: its header has 101 bytes"
    assert found.findings == ((Finding("not_compared", "info", text),) if more else ())


@pytest.mark.parametrize("header", ['{"a', '{"a": 1}', "[]", json.dumps({"a": A, "b": A}), "{}"])
def test_a_bad_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    read = []
    real = safetensors._parse
    monkeypatch.setattr(safetensors, "_parse", lambda *args: read.append(args) or real(*args))
    path = write(tmp_path / "x.safetensors", header, b"\0" * 4)
    assert not state_file.read(path).readable
    assert sniff.findings(path)
    assert len(read) == (2 if header[0] == "{" else 0)


def test_an_error_holds_on_to_no_header(tmp_path: Path) -> None:
    with pytest.raises(HeaderError) as caught:
        safetensors.read(write(tmp_path / "x.safetensors", '{"a"', b""))
    assert caught.value.__context__ is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
tensor_like = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F4", "U8", "XX", 3]),
        "shape": st.lists(st.integers(-1, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 16), max_size=3) | json_values,
    }
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=3), tensor_like | json_values, max_size=3), st.binary(max_size=24))
def test_any_header_is_read_or_refused_as_the_library_does(tmp_path_factory: Any, header: Any, body: bytes) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.safetensors", header, body)

    try:
        safetensors.read(path)
    except HeaderError:
        assert not library_reads(path)
    else:
        assert library_reads(path)
