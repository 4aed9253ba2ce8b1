"""
Listings, sizes and rights of many files, with bounded work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_sentry.formats.dcp import files as dcp_files
from ckpt_sentry.formats.dcp.files import Listing, Shards, ShardSize, examine, listing, nearest_existing, needed_sizes
from ckpt_sentry.formats.dcp.metadata import DcpMetadata, Stored

if TYPE_CHECKING:
    import pytest

COUNT = 4096


def test_what_is_gone_is_seen_in_the_listing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {f"__{rank}_0.distcp": 10 for rank in range(COUNT)}
    for name in ("__0_0.distcp", "__4095_0.distcp"):
        (tmp_path / name).write_bytes(b"0" * 10)
    asked: list[str] = []
    true_stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path: asked.append(os.path.basename(path)) or true_stat(path))
    shards = examine(str(tmp_path), needed, listing(str(tmp_path)))
    assert (shards.files, shards.checked, len(shards.missing)) == (COUNT, 2, COUNT - 2)
    assert shards.missing[:2] == ("__1_0.distcp", "__2_0.distcp")
    assert asked == ["__0_0.distcp", "__4095_0.distcp"]


def test_suspects_come_first_when_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(b"0")
    monkeypatch.setattr(dcp_files, "MAX_STATS", 1)
    needed = {f"__{rank}_0.distcp": 10 for rank in range(4)}
    shards = examine(str(tmp_path), needed, listing(str(tmp_path)), first=["__3_0.distcp", "other"])
    assert shards == Shards(files=4, checked=1, short=(ShardSize("__3_0.distcp", 1, 10),))


def test_a_cut_listing_accuses_nobody(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0")
    (tmp_path / "b").write_bytes(b"0")
    found = listing(str(tmp_path), most=1)
    assert found is not None
    assert (found.cut, len(found.names)) == (True, 1)
    assert examine(str(tmp_path), {"a": 1, "b": 1, "c": 1}, found) == Shards(files=3, checked=3, missing=("c",))


def test_listing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert listing(str(tmp_path)) == Listing(frozenset({"file"}), frozenset({"folder"}))
    assert listing(str(tmp_path / "gone")) is None


def test_needed_sizes_go_by_the_last_entry_and_stay_inside() -> None:
    files = {
        "a": Stored("x", 0, 5),
        "b": Stored("x", 5, 7),
        "c": Stored("../y", 0, 1),
        "d": Stored("/etc/passwd", 0, 1),
    }
    metadata = DcpMetadata({}, storage={(key, None): stored for key, stored in files.items()})
    assert needed_sizes(metadata) == {"x": 12}


def test_nearest_existing(tmp_path: Path) -> None:
    assert nearest_existing(str(tmp_path / "a" / "b" / "c")) == (str(tmp_path), "a", "b/c")
    assert nearest_existing(str(tmp_path / "a")) == (str(tmp_path), "a", "")
    assert nearest_existing("/no-such-root") == ("/", "no-such-root", "")
