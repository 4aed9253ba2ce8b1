"""
Steps by names, files and keys; and the many digits that are none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.formats.dcp import metadata as dcp_metadata
from ckpt_sentry.formats.dcp.metadata import DcpMetadata, Stored
from ckpt_sentry.formats.dcp.peek import peek_step
from ckpt_sentry.formats.step import MAX_STEP, Step, find_step, step_in_name

pytestmark = pytest.mark.filterwarnings("ignore")

BY_NAME = {
    "outputs/checkpoint/step-100/": Step(100, "folder name"),
    "ckpt/iter_0001000/": Step(1000, "folder name"),
    "out/checkpoint-500/pytorch_model_fsdp_0/": Step(500, "parent folder name"),
    "out/checkpoint-500": Step(500, "folder name"),
    "lightning_logs/epoch=0-step=3.ckpt/": Step(3, "folder name"),
    "lightning_logs/epoch=0-step=3-v1.ckpt": Step(3, "folder name"),
    "m--val_loss=2.34-step=999-consumed_samples=8000.0-last/weights/": Step(999, "parent folder name"),
    "ckpt/global_step1000/mp_rank_00_model_states.pt": Step(1000, "folder name"),
    "checkpoints/ep1-ba100": Step(100, "folder name"),
    "checkpoints/ep1-ba100-rank0.pt": Step(100, "file name"),
    "out/step_200": Step(200, "folder name"),
    "s3://bucket/run/step-7?versionId=step-9": Step(7, "folder name"),
    "checkpoints/checkpoint_3": None,
    "step-5/checkpoint_3/pytorch_model_fsdp_0": None,
    "out/epoch_1": None,
    "step-5/epoch_1": None,
    "step-5/epoch=1": None,
    "ckpt/release": None,
    "run-2024/model": None,
    "llama-7b/weights": None,
    "loss=0.5-step=3-step=4": None,
    "a-step=9.5": None,
    "checkpoint500": None,
    "step-100-copy-2": None,
    "misstep-100": None,
    "step-": None,
    "step-" + "9" * 30: None,
    "step-100/a/b/c/d": None,
    "": None,
    "/": None,
}


@pytest.mark.parametrize("path", BY_NAME)
def test_by_name(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_step(path) == BY_NAME[path]


@pytest.mark.parametrize("name", ["step=3.ckpt", "step-3.pt"])
def test_a_file_is_no_folder_whatever_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / name).touch()
    (tmp_path / "folder" / name).mkdir(parents=True)
    assert find_step(tmp_path / "file" / name) == Step(3, "file name")
    assert find_step(tmp_path / "folder" / name) == Step(3, "folder name")
    assert find_step(tmp_path / "folder" / name / "weights") == Step(3, "parent folder name")


@given(step=st.integers(0, MAX_STEP), form=st.sampled_from(["step-{}", "iter_{:07}", "global_step{}", "checkpoint-{}"]))
def test_a_step_in_a_name_is_read_back(step: int, form: str) -> None:
    assert step_in_name(form.format(step)) == step


@given(name=st.text())
def test_any_name_gives_a_step_that_stands_in_it(name: str) -> None:
    step = step_in_name(name)
    assert step is None or str(step) in name


@given(path=st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))))
def test_any_path_is_harmless(path: str) -> None:
    find_step(os.path.join("/nowhere-at-all", path.lstrip("/")))


def test_null_byte_and_surrogate() -> None:
    assert find_step("/tmp/\0/x") is None
    assert find_step("/tmp/\udcff\ud800") is None


def test_trainer_state_in_the_folder_and_for_its_parts(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 42}))
    expected = Step(42, "trainer_state.json")
    assert find_step(tmp_path) == expected
    assert find_step(tmp_path / "pytorch_model_fsdp_0") == expected
    assert find_step(tmp_path / "other") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"global_step": "7"}', '{"global_step": true}', "[" * 100_000])
def test_a_broken_trainer_state_is_no_step(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    assert find_step(tmp_path) is None


def test_sidecars_of_megatron_and_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step30\n")
    assert find_step(tmp_path) == Step(30, "latest")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2000\n")
    assert find_step(tmp_path) == Step(2000, "latest_checkpointed_iteration.txt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert find_step(tmp_path) == Step(30, "latest")


def peeked(path: Path, state: dict[str, object]) -> Step | None:
    dcp.save(state, checkpoint_id=path)
    return peek_step(path, dcp_metadata.read(path))


@pytest.mark.parametrize(
    "value",
    [7, torch.tensor(7), torch.tensor([7]), torch.tensor(7, dtype=torch.int32), torch.tensor(7, dtype=torch.uint8)],
    ids=["int", "0-d", "1-d", "int32", "uint8"],
)
def test_peek(tmp_path: Path, value: object) -> None:
    assert peeked(tmp_path, {"train_state": {"step": value}, "w": torch.ones(3)}) == Step(7, 'key "train_state.step"')


@pytest.mark.parametrize(
    "value",
    ["7", True, 7.0, -1, None, torch.tensor(7.0), torch.tensor([1, 2]), torch.tensor(-7), {"a": 1}, 10**20],
)
def test_peek_at_something_else(tmp_path: Path, value: object) -> None:
    assert peeked(tmp_path, {"step": value}) is None


def test_peek_at_keys_that_agree_or_not(tmp_path: Path) -> None:
    assert peeked(tmp_path / "a", {"step": 3, "iteration": 3}) == Step(3, 'key "iteration"')
    assert peeked(tmp_path / "b", {"step": 3, "iteration": 4}) is None
    assert peeked(tmp_path / "c", {"optim": {"state": {"0": {"step": torch.tensor(3)}}}}) is None


def test_peek_never_leaves_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    peeked(path, {"step": 3})
    whole = dcp_metadata.read(path)
    (place, stored), *_ = whole.storage.items()
    for file in ("../ck/__0_0.distcp", str(path / "__0_0.distcp")):
        moved = DcpMetadata(whole.entries, storage={place: Stored(file, stored.offset, stored.length)})
        assert peek_step(path, moved) is None


@pytest.mark.parametrize("damage", ["gone", "cut", "noise"])
def test_peek_at_a_broken_file(tmp_path: Path, damage: str) -> None:
    peeked(tmp_path, {"step": 3})
    metadata = dcp_metadata.read(tmp_path)
    file = tmp_path / "__0_0.distcp"
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        os.truncate(file, 100)
    else:
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert peek_step(tmp_path, metadata) is None
