from __future__ import annotations

import pytest

from ckpt_sentry import identity
from ckpt_sentry.integrations.dcp.participants import ALL, Together, together


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    One of four ranks, as its launcher says; without a process group.
    """
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert identity.identity().world_size == 4


def test_alone_in_the_world_all_loads_are_of_one_kind() -> None:
    assert together((), {"checkpoint_id": "/data/step-7", "no_dist": True}) == ALL


@pytest.mark.usefixtures("four")
def test_loads_alone_are_together_where_their_path_is_one() -> None:
    assert together(({},), {"checkpoint_id": "/a/rank_1"}) == Together("alone /a/rank_1", "1")
    assert together(({},), {}) == Together("alone ", "1")
