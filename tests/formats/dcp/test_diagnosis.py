"""
Real checkpoints, broken as storage breaks them; the findings that follow, word for word.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.core.report import Finding
from ckpt_sentry.formats.dcp import metadata as dcp_metadata
from ckpt_sentry.formats.dcp.diagnosis import diagnose, rank_local

HOST = os.uname().nodename
NOBODY = 65534

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step-100"
    state = {"model": nn.Linear(4, 4).state_dict(), "step": 100}
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)  # as many files as entries
    dcp.save(state, storage_writer=writer)
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run" / "step-100"))


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def failure_of(path: Path, **options: object) -> BaseException:
    state = {"model": nn.Linear(4, 4).state_dict(), "step": 0}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, checkpoint_id=path, **options)
    return caught.value.failures[0][0]


def shard_of(path: Path, key: str) -> str:
    storage = dcp_metadata.read(path).storage
    return next(stored.file for (name, _), stored in storage.items() if name == key)


def only(findings: tuple[Finding, ...]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def of_files(code: str, which: str, lost: str) -> Finding:
    step = "copy it again from where it was saved; else load another checkpoint, or save again"
    return Finding(code, "error", f"{which}; {lost}", step, (("which", which), ("lost", lost)))


def test_a_good_checkpoint_has_no_findings(checkpoint: Path) -> None:
    assert diagnose(checkpoint) == ()


def test_missing_path_names_the_steps_that_exist(checkpoint: Path) -> None:
    run = checkpoint.parent
    (run / "step-90").mkdir()
    (run / "logs").mkdir()
    assert only(diagnose(run / "step-200")) == Finding(
        "path_missing",
        "error",
        f"{run}/step-200 does not exist; its folder exists: {run}, with step-100, step-90",
        f"load {run}/step-100, the newest there",
    )


def test_missing_path_far_below_what_exists(tmp_path: Path) -> None:
    assert only(diagnose(tmp_path / "does_not_exist" / "step-100")) == Finding(
        "path_missing",
        "error",
        f"{tmp_path}/does_not_exist/step-100 does not exist; the nearest folder that does is {tmp_path}",
        "check the path, and that its file system is mounted on this host",
    )


def test_a_slip_of_the_hand_is_found(checkpoint: Path) -> None:
    slip = checkpoint.parent / "setp-100"
    assert only(diagnose(slip)).next == f"did you mean {checkpoint}?"
    in_parent = checkpoint.parent.parent / "runs" / "step-100"
    assert only(diagnose(in_parent)).next == f"did you mean {checkpoint}?"


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    assert only(diagnose(tmp_path / "latest")) == Finding(
        "path_missing", "error", f"{tmp_path}/latest is a link to {tmp_path}/gone, which does not exist"
    )


def test_path_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "step-100"
    path.write_text("x")
    assert only(diagnose(path)) == Finding(
        "path_is_file",
        "error",
        f"{path} is a file, not the folder of a DCP checkpoint",
        "give the folder of the checkpoint, the one that holds .metadata",
    )
    assert only(diagnose(path / "inner")) == Finding(
        "path_is_file", "error", f"{path} is a file, so {path}/inner cannot exist", "give the folder of the checkpoint"
    )


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_torch_save_file(tmp_path: Path, options: dict[str, bool]) -> None:
    path = tmp_path / "model"
    torch.save(nn.Linear(2, 2).state_dict(), path, **options)
    finding = only(diagnose(path))
    assert (finding.code, finding.level) == ("torch_save_file", "error")
    assert str(path) in finding.text
    assert "torch.load" in (finding.next or "")


def test_safetensors_file_and_folder(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, path)
    assert only(diagnose(path)).code == "safetensors_file"
    assert only(diagnose(tmp_path)) == Finding(
        "safetensors_file",
        "error",
        f"{tmp_path} holds safetensors files (model.safetensors), no DCP checkpoint",
        "give storage_reader=HuggingFaceStorageReader(path), or load them with safetensors",
    )
    assert diagnose(tmp_path, reader="HuggingFaceStorageReader") == ()


def test_shard_instead_of_folder(checkpoint: Path) -> None:
    shard = checkpoint / shard_of(checkpoint, "model.weight")
    finding = only(diagnose(shard))
    assert (finding.code, finding.next) == ("path_is_file", f"give the folder: {checkpoint}")


def test_metadata_missing_folds_the_shards(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.parent / "step-90")
    (checkpoint / ".metadata").unlink()
    assert only(diagnose(checkpoint, error=failure_of(checkpoint))) == Finding(
        "metadata_missing",
        "error",
        f"{checkpoint} has no .metadata, so its save never finished: 3 shards are there (__0_{{0-2}}.distcp)",
        f"load {checkpoint.parent}/step-90, or save again",
    )


def test_empty_folder_and_folder_of_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert only(diagnose(empty)) == Finding(
        "no_checkpoint_files",
        "error",
        f"{empty} holds neither .metadata nor shards: it is empty",
        "load another checkpoint, or save again",
    )
    assert only(diagnose(checkpoint.parent)) == Finding(
        "no_checkpoint_files",
        "error",
        f"{checkpoint.parent} is no checkpoint, but holds some: step-100",
        f"load {checkpoint}",
    )


def test_hugging_face_reader_without_files(tmp_path: Path, checkpoint: Path) -> None:
    error = failure_of(tmp_path, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "run")))
    (tmp_path / "other").mkdir()
    assert only(diagnose(tmp_path / "other", error=error)) == Finding(
        "no_checkpoint_files",
        "error",
        f"{tmp_path}/other holds no .safetensors file: it is empty",
        "check the path, and that its file system is mounted on this host",
    )
    assert only(diagnose(checkpoint, reader="HuggingFaceStorageReader")).code == "dcp_checkpoint"


def test_which_hugging_face_file_is_damaged(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save_file({name: torch.ones(400)}, tmp_path / f"{name}.safetensors")
    reader = dcp.HuggingFaceStorageReader(str(tmp_path))
    os.truncate(tmp_path / "b.safetensors", 200)
    found = only(diagnose(tmp_path, error=failure_of(tmp_path, storage_reader=reader)))
    assert found == Finding(
        "shard_truncated",
        "error",
        f"{tmp_path}/b.safetensors has 128 of 1,600 bytes of tensors: 1 of 1 tensors are cut",
        "copy or download it again",
    )
    (tmp_path / "c.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert only(diagnose(tmp_path, reader="HuggingFaceStorageReader")).text == f"{found.text}; and 1 more file"
    (tmp_path / "b.safetensors").unlink()
    assert only(diagnose(tmp_path, reader="HuggingFaceStorageReader")).code == "lfs_pointer"


def test_metadata_of_a_class_that_is_not_here(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = types.ModuleType("gone")
    gone.Extra = type("Extra", (), {"__module__": "gone"})  # type: ignore[attr-defined]
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.extra = gone.Extra()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gone", gone)
        file.write_bytes(pickle.dumps(metadata))
    error = failure_of(checkpoint)
    assert only(diagnose(checkpoint, error=error)) == Finding(
        "metadata_unreadable",
        "error",
        f"{file} cannot be read here: No module named 'gone'; it holds gone.Extra",
        "install what it was saved with, in the same version, and load again",
    )


@pytest.mark.parametrize(
    ("keep", "reason"), [(0, "is empty"), (0.5, "ends before its end")], ids=["empty", "truncated"]
)
def test_metadata_unreadable(checkpoint: Path, keep: float, reason: str) -> None:
    file = checkpoint / ".metadata"
    size = int(file.stat().st_size * keep)
    os.truncate(file, size)
    assert only(diagnose(checkpoint, error=failure_of(checkpoint))) == Finding(
        "metadata_unreadable",
        "error",
        f"{file} {reason} ({size:,} bytes)",
        "load another checkpoint, or save again",
    )


def test_metadata_of_something_else(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"\x80\x04}.")
    assert "holds a dict, not the metadata of torch.distributed.checkpoint" in only(diagnose(checkpoint)).text


def test_missing_shard(checkpoint: Path) -> None:
    file = checkpoint / shard_of(checkpoint, "model.weight")
    file.unlink()
    assert only(diagnose(checkpoint, error=failure_of(checkpoint))) == of_files(
        "shard_missing",
        f"{file} is missing, 1 of 3 files, written by rank 0",
        "held 1 of 3 keys, whole or in part: model.weight",
    )


def test_several_missing_shards(checkpoint: Path) -> None:
    for key in ("model.weight", "model.bias"):
        (checkpoint / shard_of(checkpoint, key)).unlink()
    assert only(diagnose(checkpoint)).text == (
        f"2 of 3 files of {checkpoint} are missing: __0_{{0-1}}.distcp, written by rank 0; "
        "held 2 of 3 keys, whole or in part: model.{bias,weight}"
    )


def test_truncated_shard(checkpoint: Path) -> None:
    file = checkpoint / shard_of(checkpoint, "model.weight")
    size = file.stat().st_size
    os.truncate(file, size // 2)
    assert only(diagnose(checkpoint, error=failure_of(checkpoint))) == of_files(
        "shard_truncated",
        f"{file} is cut off: {size // 2:,} of at least {size:,} bytes",
        "1 of 3 keys, whole or in part, lie beyond: model.weight",
    )


def test_empty_shard(checkpoint: Path) -> None:
    file = checkpoint / shard_of(checkpoint, "model.bias")
    os.truncate(file, 0)
    finding = only(diagnose(checkpoint, error=failure_of(checkpoint)))
    assert (finding.code, finding.text) == (
        "shard_empty",
        f"{file} is empty (0 bytes), 1 of 3 files, written by rank 0; held 1 of 3 keys, whole or in part: model.bias",
    )


DAMAGE = {
    "random": lambda data: random.Random(0).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "end": lambda data: data[:-200] + bytes(200),
    "beginning": lambda data: bytes(8) + data[8:],
    "directory": lambda data: data[:-300] + bytes(100) + data[-200:],
}


@pytest.mark.parametrize("key", ["model.weight", "step"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shard(checkpoint: Path, damage: str, key: str) -> None:
    file = checkpoint / shard_of(checkpoint, key)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert only(diagnose(checkpoint, error=failure_of(checkpoint))) == of_files(
        "shard_damaged",
        f"{file} is damaged, 1 of 3 files, written by rank 0",
        f"1 of 3 keys, whole or in part, no longer hold what was saved: {key}",
    )


def test_damage_is_not_looked_for_where_torch_could_read(checkpoint: Path) -> None:
    file = checkpoint / shard_of(checkpoint, "model.weight")
    file.write_bytes(bytes(file.stat().st_size))
    assert diagnose(checkpoint) == ()
    assert diagnose(checkpoint, error=ValueError("of the program itself")) == ()


def test_many_missing_shards_stay_short(tmp_path: Path) -> None:
    storage = {(f"w{rank}", None): dcp_metadata.Stored(f"__{rank}_0.distcp", 0, 8) for rank in range(4096)}
    metadata = dcp_metadata.DcpMetadata({key: Entry(None, None) for key, _ in storage}, storage=storage)
    for rank in range(0, 4096, 2):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(b"12345678")
    finding = only(diagnose(tmp_path, metadata=metadata))
    assert finding.code == "shard_missing"
    assert finding.text.startswith(f"2048 of 4096 files of {tmp_path} are missing: ")
    assert "written by 2048 ranks; held 2048 of 4096 keys" in finding.text
    assert len(finding.text) < 1000


@pytest.fixture
def reachable(checkpoint: Path) -> Path:
    for folder in (checkpoint, *checkpoint.parents):
        if os.stat(folder).st_mode & 0o5 != 0o5 and folder != Path("/"):
            folder.chmod(0o755)
    return checkpoint


@as_root
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_permission_of_a_file(reachable: Path, name: str) -> None:
    file = reachable / name
    file.chmod(0)
    with as_user(NOBODY):
        found = diagnose(reachable)
    assert only(found) == Finding(
        "permission_denied",
        "error",
        f"{file} may not be read by user {NOBODY} on {HOST}: mode 0000, owner 0:0",
        f"as its owner: chmod a+r {file}; or run as that user",
    )


@as_root
def test_permission_of_the_folder(reachable: Path) -> None:
    reachable.chmod(0o700)
    with as_user(NOBODY):
        found = diagnose(reachable)
        below = diagnose(reachable / "inner")
    text = f"{reachable} may not be entered by user {NOBODY} on {HOST}: mode 0700, owner 0:0"
    assert only(found).text == text
    assert only(below).text == text


def test_permission_that_only_the_error_tells(checkpoint: Path) -> None:
    file = str(checkpoint / "__0_0.distcp")
    error = PermissionError(errno.EACCES, "Permission denied", file)
    finding = only(diagnose(checkpoint, error=error))
    assert finding.code == "permission_denied"
    assert finding.text.startswith(f"{file} may not be read by user {os.geteuid()} on {HOST}: mode 0644")


def test_rank_local_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").rename(checkpoint / "__1.metadata")
    where = f"the common .metadata of {checkpoint} cannot be read; rank 1 saved its own"
    step = "load with as many ranks as saved it, or save again so that the ranks coordinate"
    assert diagnose(checkpoint, rank=1) == (
        Finding(
            "rank_local_metadata",
            "warning",
            f"{where}: __1.metadata was used, which knows the parts of that rank alone",
            step,
        ),
    )
    text, facts = f"{where}, rank 0 has none", (("where", where),)
    assert diagnose(checkpoint, rank=0) == (Finding("rank_local_metadata", "error", text, step, facts),)
    assert rank_local(str(checkpoint), 1) == diagnose(checkpoint, rank=1)[0]


def test_no_rank_local_metadata_is_said_where_the_common_one_can_be_read(checkpoint: Path) -> None:
    shutil.copy(checkpoint / ".metadata", checkpoint / "__1.metadata")
    assert rank_local(str(checkpoint), 1) is None


def test_disk_full(checkpoint: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/scratch/offload")
    finding = only(diagnose(checkpoint, error=error))
    assert finding.code == "disk_full"
    assert finding.text.startswith("no space is left for /scratch/offload; ")


def test_lost_entries_of_a_writer(checkpoint: Path) -> None:
    whole = dcp_metadata.read(checkpoint)
    storage = {place: stored for place, stored in whole.storage.items() if place[0] != "model.bias"}
    lost = dcp_metadata.DcpMetadata(whole.entries, whole.chunks, storage, version=whole.version)
    finding = only(diagnose(checkpoint, metadata=lost))
    assert (finding.code, finding.text) == (
        "index_incomplete",
        f"{checkpoint}/.metadata names 1 of 3 keys that no file holds: model.bias; a writer of the save failed",
    )


def test_an_error_of_the_planner_opens_no_file(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"other": torch.ones(1)}, checkpoint_id=checkpoint)
    assert diagnose(checkpoint, error=caught.value.failures[0][0]) == ()


def test_a_remote_path_is_left_alone() -> None:
    assert diagnose("s3://key:secret@bucket/step-100") == ()


def test_credentials_and_control_characters_stay_out(tmp_path: Path) -> None:
    finding = only(diagnose(f"{tmp_path}/a\x1b[31m?token=hunter2"))
    assert "hunter2" not in finding.text
    assert "\x1b" not in finding.text
    assert "a\\x1b[31m?token=***" in finding.text


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert only(diagnose("out/step-100")).code == "path_missing"
