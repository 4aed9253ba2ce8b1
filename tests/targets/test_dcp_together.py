from __future__ import annotations

import pytest

from ckpt_sentry import identity
from ckpt_sentry.targets import dcp_together


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    One of four ranks, as its launcher says; without a process group.
    """
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert identity.identity().world_size == 4


def test_alone_in_the_world_all_loads_are_of_one_kind() -> None:
    assert dcp_together.kind((), {"checkpoint_id": "/data/step-7", "no_dist": True}) == ""


@pytest.mark.usefixtures("four")
def test_loads_alone_are_together_where_their_folders_are() -> None:
    kinds = {
        path: dcp_together.kind(({},), {"checkpoint_id": path}) for path in ("/a/step-1", "/a/step-2/", "/b/step-1")
    }
    assert kinds == {"/a/step-1": "alone in /a", "/a/step-2/": "alone in /a", "/b/step-1": "alone in /b"}


@pytest.mark.usefixtures("four")
def test_without_a_path() -> None:
    assert dcp_together.kind(({},), {}) == "alone"
