from __future__ import annotations

import gc
import io
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from ckpt_sentry import unify_keys
from ckpt_sentry.model import provenance
from tests.agents import Agent, hooked
from tests.integrations.nets import Net, values


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked():
        yield


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"state_dict": values(), "epoch": 3}, tmp_path / "epoch-3.pt")
    os.utime(tmp_path / "epoch-3.pt", (0, 86_400))
    return tmp_path / "epoch-3.pt"


def test_the_file_of_a_renamed_nested_dict_is_known(agent: Agent, saved: Path) -> None:
    loaded = torch.load(saved)
    Net().load_state_dict({f"x.{key}": value for key, value in loaded["state_dict"].items()}, strict=False)
    report = agent.last()
    assert (report.path, report.format) == (str(saved), "torch_save")
    (source,) = (finding for finding in report.findings if finding.code == "source_file")
    assert source.text == f"The values were read from {saved}, last written 1970-01-02 00:00:00 UTC."


def test_a_good_load_has_its_path(agent: Agent, tmp_path: Path) -> None:
    save_file(values(), tmp_path / "a.safetensors")
    Net().load_state_dict(load_file(tmp_path / "a.safetensors"))
    assert (agent.last().path, agent.last().format) == (str(tmp_path / "a.safetensors"), "safetensors")


@pytest.mark.usefixtures("agent")
def test_an_open_file_has_a_name_and_a_buffer_none(saved: Path) -> None:
    with saved.open("rb") as file:
        assert provenance.origin(torch.load(file)["state_dict"]) == str(saved)
    assert provenance.origin(torch.load(io.BytesIO(saved.read_bytes()))["state_dict"]) is None


@pytest.mark.usefixtures("agent")
def test_values_of_another_origin_have_none(saved: Path) -> None:
    loaded = torch.load(saved)
    assert provenance.origin(values()) is None
    assert provenance.origin(loaded) == str(saved)
    assert provenance.origin({}) is None


@pytest.mark.usefixtures("agent")
def test_nothing_is_kept_alive(saved: Path) -> None:
    loaded = torch.load(saved)
    tensors = [weakref.ref(value) for value in loaded["state_dict"].values()]
    assert provenance._known
    del loaded
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)
    assert provenance._known == {}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MOST_REMEMBERED", 5)
    provenance.forget()
    wide = {f"key{number}": torch.zeros(1) for number in range(1_000)}
    provenance.remember(wide, "/a")
    assert len(provenance._known) == 5
    assert provenance.origin(wide) == "/a"


def test_a_dict_of_any_size_costs_the_same() -> None:
    provenance.forget()
    wide = {f"key{number}": torch.zeros(1) for number in range(1_000)}
    provenance.remember(wide, "/a")
    assert len(provenance._known) == 2 * provenance.EDGE


@pytest.mark.parametrize("data", ["not", 3, None, [torch.zeros(1)], {1: "x"}])
def test_anything_may_be_loaded(data: object) -> None:
    provenance.forget()
    provenance.remember(data, "/a")
    assert provenance._known == {}


@pytest.mark.usefixtures("agent")
@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes came with Python 3.11")
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 5\n", "Git LFS"),
        ("a.pt", b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>\n", "a web page"),
        ("a.safetensors", b"", "a.safetensors has no content"),
        ("folder", None, "a distributed checkpoint (DCP)"),
    ],
    ids=["lfs", "html", "empty", "dcp"],
)
def test_an_error_says_what_the_file_is(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    if content is None:
        dcp.save({"model": values()}, checkpoint_id=path)
    else:
        path.write_bytes(content)
    with pytest.raises(Exception, match=r".*") as caught:
        (load_file if name.endswith(".safetensors") else torch.load)(path)
    assert type(caught.value).__module__ != "ckpt_sentry.errors"
    assert said in caught.value.__notes__[0]


@pytest.mark.usefixtures("agent")
def test_a_missing_file_needs_no_note(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        torch.load(tmp_path / "nope")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.usefixtures("agent")
def test_what_was_read_can_be_swapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save(dict(Net().named_parameters()), tmp_path / "a.pt")
    model = Net()
    loaded = torch.load(tmp_path / "a.pt")
    assert provenance.origin(loaded) == str(tmp_path / "a.pt")
    model.load_state_dict(loaded, assign=True)
    del loaded
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    assert model.double().head.weight.dtype is torch.float64


@pytest.mark.usefixtures("agent")
def test_what_has_no_storage_is_not_remembered(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    assert provenance.origin(torch.load(tmp_path / "a.pt")) is None


def test_what_unify_keys_gives_has_its_path(agent: Agent, saved: Path) -> None:
    loaded = unify_keys(torch.load(saved)["state_dict"], add_prefix="x.")
    Net().load_state_dict(loaded, strict=False)
    assert (agent.last().path, agent.last().verdict) == (str(saved), "no_op")
