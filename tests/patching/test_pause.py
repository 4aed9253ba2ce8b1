from __future__ import annotations

import contextlib
import gc
import threading

import pytest

from ckpt_sentry.patching.pause import uncollected


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_rests_while_an_action_runs(*, is_enabled: bool, fails: bool) -> None:
    seen: list[bool] = []

    def action() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ValueError

    threads = threading.active_count()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with contextlib.suppress(ValueError):
            uncollected(action)
        assert (seen, gc.isenabled()) == ([is_enabled and threads > 1], is_enabled)
    finally:
        gc.enable()


def test_the_collector_is_left_alone_beside_other_threads() -> None:
    done, seen = threading.Event(), []
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        uncollected(lambda: seen.append(gc.isenabled()))
    finally:
        done.set()
        other.join()
    assert seen == [gc.isenabled()] == [True]
