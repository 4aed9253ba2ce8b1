from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ckpt_sentry.formats.regular import own, regular
from ckpt_sentry.formats.step import find_step

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


def test_an_own_file_is_made_and_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        os.close(own(tmp_path / "file", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_an_own_file_is_no_link_and_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("content")
    (tmp_path / "link").symlink_to("theirs")
    (tmp_path / "dangling").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(OSError, match=f"what lies at {name} is no regular file"):
            own(tmp_path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with pytest.raises(OSError, match="what lies at pipe is no regular file"):
        own(tmp_path / "pipe", os.O_RDONLY)
    assert os.listdir("/proc/self/fd") == before
    assert (tmp_path / "theirs").read_text() == "content"
    assert not (tmp_path / "nothing").exists()
