from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_sentry import errors
from ckpt_sentry.core import frames


@pytest.mark.parametrize(
    "file", [os.__file__, errors.__file__, "/v/lib/python3.12/site-packages/torch/x.py", "<frozen runpy>"]
)
def test_libraries(file: str) -> None:
    assert frames.is_library(file)


@pytest.mark.parametrize("file", [__file__, "/home/me/train.py", "train.py", "<stdin>"])
def test_programs(file: str) -> None:
    assert not frames.is_library(file)


def test_the_innermost_line_of_the_program() -> None:
    with pytest.raises(TypeError) as caught:
        os.path.join(1)  # type: ignore[call-overload]
    assert frames.innermost(caught.value.__traceback__) == f"{Path(__file__).name}:{caught.traceback[0].lineno + 1}"
    assert frames.innermost(None) is None
