from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckpt_sentry import lastwords

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_torchrun_prints_holds_no_secret_and_steers_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise RuntimeError("cannot open s3://AKIA:hunter2@bucket/x \x1b[31m")  # noqa: TRY301
    except RuntimeError as error:
        lastwords.say(error)

    message = json.loads(file.read_text())["message"]
    for text in (message["message"], message["extraInfo"]["py_callstack"]):
        assert r"cannot open s3://***@bucket/x \x1b[31m" in text
        assert "\x1b" not in text
    assert "hunter2" not in message["message"]
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):\n")
