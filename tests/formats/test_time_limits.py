"""
A time limit of the host's, raised by a signal handler while a header is read, ends the host's call.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_sentry.formats import folder, index, sniff, state_file
from ckpt_sentry.formats.dcp import diagnosis
from ckpt_sentry.formats.step import find_step


@contextmanager
def limited() -> Iterator[None]:
    """
    Each look at the disk takes too long.
    """

    def expire(_: int, __: FrameType | None) -> None:
        raise TimeoutError("the host's limit")

    def expiring(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            signal.raise_signal(signal.SIGALRM)
            return original(*args, **kwargs)

        return call

    before = signal.signal(signal.SIGALRM, expire)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "listdir", "scandir"):
            patch.setattr(os, name, expiring(getattr(os, name)))
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, before)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "model.bin")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    (tmp_path / "latest").write_text("step_7")
    (tmp_path / ".metadata").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        lambda path: state_file.read(path / "model.safetensors"),
        lambda path: state_file.read(path / "model.bin"),
        lambda path: index.read(path / "model.safetensors.index.json"),
        lambda path: folder.choose(str(path)),
        lambda path: sniff.findings(str(path / "model.bin")),
        find_step,
        lambda path: list(diagnosis.diagnose(str(path))),
    ],
    ids=["safetensors", "torch_save", "index", "folder", "sniff", "step", "dcp"],
)
def test_a_limit_is_let_through(checkpoint: Path, read: Callable[[Path], object]) -> None:
    with limited(), pytest.raises(TimeoutError, match="the host's limit"):
        read(checkpoint)
