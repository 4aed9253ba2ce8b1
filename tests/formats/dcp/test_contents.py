"""
Archives of `torch.save` that are still what was saved, and those that are not; how much of them is looked at.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_sentry.formats.dcp import contents as dcp_contents
from ckpt_sentry.formats.dcp import metadata as dcp_metadata
from ckpt_sentry.formats.dcp import shards as dcp_shards
from ckpt_sentry.formats.dcp.contents import Damage, damage
from ckpt_sentry.formats.dcp.metadata import DcpMetadata, Stored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEYS = 40


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {f"w{number:02}": torch.full((4096,), number + 1.0) for number in range(KEYS)} | {"note": "of a run"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "step-1"))
    return tmp_path / "step-1"


def place_of(metadata: DcpMetadata, key: str) -> Stored:
    return next(stored for (name, _), stored in metadata.storage.items() if name == key)


def overwrite(path: Path, key: str, at: int, data: bytes) -> DcpMetadata:
    metadata = dcp_metadata.read(path)
    stored = place_of(metadata, key)
    with (path / stored.file).open("r+b") as file:
        file.seek(stored.offset + at)
        file.write(data)
    return metadata


def test_what_was_saved_is_whole(checkpoint: Path) -> None:
    assert damage(str(checkpoint), dcp_metadata.read(checkpoint)) == Damage()


def test_a_zeroed_middle_is_seen_by_the_checksum(checkpoint: Path) -> None:
    metadata = overwrite(checkpoint, "w07", 8192, bytes(64))
    assert damage(str(checkpoint), metadata) == Damage((("w07", (0,)),))


def test_no_checksum_is_no_damage(tmp_path: Path) -> None:
    options = pytest.importorskip("torch.serialization")
    if not hasattr(options, "set_crc32_options"):
        pytest.skip("this torch always writes checksums")
    options.set_crc32_options(False)
    try:
        dcp.save({"w": torch.ones(100)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    finally:
        options.set_crc32_options(True)
    assert damage(str(tmp_path), dcp_metadata.read(tmp_path)) == Damage()


def test_other_formats_are_not_judged(checkpoint: Path) -> None:
    metadata = overwrite(checkpoint, "w07", 0, bytes(64))
    zipped = {part: stored._replace(transforms=("zstd",)) for part, stored in metadata.storage.items()}
    assert damage(str(checkpoint), dataclasses.replace(metadata, storage=zipped)) == Damage()
    overwrite(checkpoint, "w07", 0, b"PK\x03\x04")
    metadata = overwrite(checkpoint, "note", 0, b"\x80\x02}q\x00.")
    assert ("note", None) not in damage(str(checkpoint), metadata).parts


@pytest.mark.parametrize("head", [b"\x80\x02\x8a", b"\x40\x00\x00\x00\x00\x00\x00\x00{"])
def test_a_tensor_in_another_format_is_not_judged(checkpoint: Path, head: bytes) -> None:
    metadata = overwrite(checkpoint, "w07", 0, head)
    assert damage(str(checkpoint), metadata) == Damage()


def test_a_place_that_no_file_has(checkpoint: Path) -> None:
    metadata = dcp_metadata.read(checkpoint)
    far = {part: stored._replace(offset=2**70) for part, stored in metadata.storage.items()}
    assert damage(str(checkpoint), dataclasses.replace(metadata, storage=far)).parts == ()


def test_names_that_lead_out_of_the_folder_are_not_opened(checkpoint: Path) -> None:
    metadata = dcp_metadata.read(checkpoint)
    storage = {("w", (0,)): Stored("../secret", 0, 100)}
    (checkpoint.parent / "secret").write_bytes(bytes(100))
    assert damage(str(checkpoint), dataclasses.replace(metadata, storage=storage)) == Damage()


def test_files_that_cannot_be_read_accuse_nobody(checkpoint: Path) -> None:
    metadata = dcp_metadata.read(checkpoint)
    for file in metadata.files:
        (checkpoint / file).unlink()
    assert damage(str(checkpoint), metadata) == Damage(whole=False)


def test_the_part_in_hand_is_looked_at_first(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = overwrite(checkpoint, "w33", 0, bytes(64))
    monkeypatch.setattr(dcp_contents, "MAX_PARTS", 1)
    assert damage(str(checkpoint), metadata) == Damage(whole=False)
    assert damage(str(checkpoint), metadata, [("w33", (0,)), ("gone", None)]) == Damage((("w33", (0,)),), whole=False)


def test_few_parts_are_spread_over_all() -> None:
    assert sorted(dcp_contents._spread(range(1000), 10)) == list(range(0, 1000, 100))
    assert sorted(dcp_contents._spread(range(7), 10)) == list(range(7))
    assert dcp_contents._spread(range(512), 512)[:4] == [0, 16, 32, 48]
    assert dcp_contents._spread([], 5) == []


def test_bytes_are_bounded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = overwrite(checkpoint, "w07", 8192, bytes(64))
    monkeypatch.setattr(dcp_contents, "MAX_BYTES", 10_000)
    assert damage(str(checkpoint), metadata) == Damage(whole=False)


def test_time_is_bounded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = overwrite(checkpoint, "w07", 0, bytes(64))
    monkeypatch.setattr(dcp_contents, "MAX_SECONDS", -1.0)
    begun = time.monotonic()
    assert damage(str(checkpoint), metadata) == Damage(whole=False)
    assert time.monotonic() - begun < 1


def test_what_was_not_looked_at_is_said(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = overwrite(checkpoint, "w33", 0, bytes(64))
    monkeypatch.setattr(dcp_contents, "MAX_PARTS", 1)
    found = dcp_shards.damaged(str(checkpoint), metadata, [("w33", (0,))])
    held = "is damaged, 1 of 1 files, written by rank 0; held 41 of 41 keys, whole or in part: "
    assert [(one.code, one.level) for one in found] == [("shard_damaged", "error"), ("shards_not_checked", "info")]
    assert found[0].text.startswith(f"{checkpoint}/__0_0.distcp {held}")
    assert found[1].text == f"not all of the 41 parts in the files of {checkpoint} were looked at"
