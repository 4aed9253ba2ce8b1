from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.agents import Agent, fresh


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    with fresh(tmp_path / "records", monkeypatch) as made:
        yield made
