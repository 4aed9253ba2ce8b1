from __future__ import annotations

import itertools
import os

import pytest
import torch
from accelerate.utils.offload import OffloadedWeightsLoader
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt_sentry.formats import safetensors, state_file
from ckpt_sentry.integrations.accelerate import offload
from ckpt_sentry.model import proof
from ckpt_sentry.model.proof import Claim, Holder

DEPTHS = ["sample", "full"]


def proved(model, tensors, folder, depth="sample", extra=None):
    path = folder / "model.safetensors"
    save_file(tensors, path)
    slots = safetensors.read(path).slots
    return proof.prove(Holder(model, extra), [Claim(name, (slot,)) for name, slot in slots.items()], depth)


def holding(**values):
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, value)
    return model


REAL = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
WHOLE = [torch.int64, torch.int32]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("saved", "wanted"), [*itertools.product(REAL, REAL), *itertools.product(WHOLE, WHOLE)], ids=str
)
def test_a_cast_is_no_difference(tmp_path, saved, wanted, depth):
    value = (torch.randn(5, 100) * 100).to(saved)

    outcome = proved(holding(a=value.to(wanted)), {"a": value}, tmp_path, depth)

    assert (outcome.checked, outcome.differing) == (["a"], [])


@pytest.mark.parametrize("depth", DEPTHS)
def test_complex_values_are_compared_in_both_parts(tmp_path, depth):
    value = torch.randn(40, 30, dtype=torch.complex64)
    other = value.clone()
    other[-1, -1] += 1j

    outcome = proved(
        holding(a=value, b=other, c=value.T.contiguous().T, d=torch.conj(value)),
        {name: value.clone() for name in "abc"} | {"d": torch.conj(value).resolve_conj()},
        tmp_path,
        depth,
    )

    assert (sorted(outcome.checked), outcome.differing) == (["a", "b", "c", "d"], ["b"])


@pytest.mark.parametrize("depth", DEPTHS)
def test_other_values_differ(tmp_path, depth):
    outcome = proved(
        holding(a=torch.randn(300), b=torch.zeros(3)), {"a": torch.randn(300), "b": torch.ones(3)}, tmp_path, depth
    )

    assert outcome.differing == ["a", "b"]


def test_one_wrong_value_is_found_when_all_are_compared(tmp_path):
    value = torch.randn(100_000)
    other = value.clone()
    other[50_001] += 1

    assert proved(holding(a=other), {"a": value}, tmp_path, "full").differing == ["a"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_constant_tensor_shows_nothing(tmp_path, depth):
    outcome = proved(holding(a=torch.ones(30)), {"a": torch.ones(30)}, tmp_path, depth)

    assert (outcome.checked, outcome.differing) == ([], [])


@given(st.permutations([0, 1, 2]))
def test_a_tensor_in_another_order_of_memory(tmp_path_factory, order):
    value = torch.randn(7, 9, 11)
    back = [order.index(axis) for axis in range(3)]
    held = value.permute(*order).contiguous().permute(*back)

    assert proved(holding(a=held), {"a": value}, tmp_path_factory.mktemp("order")).differing == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_nan_in_the_checkpoint_is_equal_and_said(tmp_path, depth):
    value = torch.randn(40)
    value[3] = torch.nan
    outcome = proved(holding(a=value.clone()), {"a": value}, tmp_path, depth)

    assert (outcome.differing, outcome.not_finite) == ([], ["a"])


def test_what_a_quantizer_packed_is_left_out(tmp_path):
    outcome = proved(holding(a=torch.zeros(4, dtype=torch.int8)), {"a": torch.randn(4)}, tmp_path)

    assert outcome.checked == []


def test_any_of_several_places_may_have_filled_a_name(tmp_path):
    save_file({"a": torch.arange(4.0), "b": torch.arange(4.0) + 1}, tmp_path / "x.safetensors")
    slots = safetensors.read(tmp_path / "x.safetensors").slots
    claim = Claim("a", (slots["a"], slots["b"]))

    assert proof.prove(Holder(holding(a=torch.arange(4.0) + 1)), [claim], "sample").differing == []
    assert proof.prove(Holder(holding(a=torch.arange(4.0) + 2)), [claim], "sample").differing == ["a"]
    assert proof.vary(claim.slots)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_values_are_read_where_they_lie(tmp_path, dtype, depth):
    from accelerate.utils.offload import PrefixedDataset, offload_state_dict

    value = torch.randn(20, 30).to(dtype)
    offload_state_dict(tmp_path / "off", {"part.a": value})
    model = nn.ModuleDict({"part": holding(a=torch.empty(20, 30, dtype=dtype, device="meta"))})
    hook = nn.Identity()
    hook.weights_map = PrefixedDataset(OffloadedWeightsLoader(save_folder=str(tmp_path / "off")), "part.")

    folder = offload.contents(tmp_path / "off")
    assert proved(model, {"part.a": value}, tmp_path, depth, folder).checked == ["part.a"]
    assert proved(model, {"part.a": value}, tmp_path, depth).checked == []
    model["part"]._hf_hook = hook
    assert proved(model, {"part.a": value}, tmp_path, depth).offloaded == {"part.a"}
    assert proved(model, {"part.a": value + 1}, tmp_path, depth).differing == ["part.a"]


def test_an_offload_folder_that_is_none(tmp_path):
    (tmp_path / "index.json").write_text("[")

    assert offload.contents(tmp_path) is None
    assert offload.contents(None) is None
    assert offload.contents(tmp_path / "nowhere") is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["a.safetensors", "a.bin"])
def test_the_largest_whole_numbers_are_equal_to_themselves(tmp_path, name, depth):
    value = torch.tensor([2**63 - 1, -(2**63), 2**53 + 1])
    path = tmp_path / name
    (save_file if name == "a.safetensors" else torch.save)({"a": value}, path)
    slots = state_file.read(path).slots

    assert proof.prove(Holder(holding(a=value.clone())), [Claim("a", (slots["a"],))], depth).differing == []


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
def test_modes_of_the_host_make_no_difference(tmp_path, mode):
    proof._indices.cache_clear()
    value = torch.randn(7, 11).half()
    save_file({"a": value}, tmp_path / "model.safetensors")
    claims = [Claim("a", (safetensors.read(tmp_path / "model.safetensors").slots["a"],))]
    model = holding(a=value.float())
    with mode():
        assert proof.prove(Holder(model), claims, "sample").checked == ["a"]
    assert proof.prove(Holder(model), claims, "sample").checked == ["a"]


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
    file = tmp_path / "weights.safetensors"
    weights = OffloadedWeightsLoader(index={"a": {"safetensors_file": str(file), "weight_name": "a"}})
    for tensors in ({"a": torch.zeros(2)}, {"a": torch.zeros(2).double(), "b": torch.zeros(3)}):
        save_file(tensors, file)
        assert proof.in_map(weights, "a") == safetensors.read(file).slots["a"]


def test_a_pipe_in_the_place_of_the_index_of_an_offload_folder(tmp_path):
    os.mkfifo(tmp_path / "index.json")

    assert offload.contents(tmp_path) is None
