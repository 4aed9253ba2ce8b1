from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ckpt_sentry.checkpoints.regular import regular
from ckpt_sentry.checkpoints.step import find_step

if TYPE_CHECKING:
    from pathlib import Path


def test_a_regular_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with open(tmp_path / "file", "rb", opener=regular) as file:
        assert file.read() == b"content"


def test_nothing_else_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    for path, kind in ((tmp_path / "pipe", OSError), (tmp_path, IsADirectoryError), (tmp_path / "no", OSError)):
        with pytest.raises(kind):
            regular(str(path), os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid"):
        regular(os.devnull, os.O_RDONLY)
    assert os.listdir("/proc/self/fd") == before


def test_a_pipe_in_the_place_of_a_sidecar_tells_no_step(tmp_path: Path) -> None:
    for name in ("trainer_state.json", "latest"):
        os.mkfifo(tmp_path / name)

    assert find_step(tmp_path) is None
