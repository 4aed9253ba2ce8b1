from __future__ import annotations

import pytest

from ckpt_sentry.core.peers import failed_finding, lost_finding
from ckpt_sentry.core.report import LoadError

GLOO = (
    "[/__w/pytorch/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61598. This is typically "
    "caused by a remote worker crashing."
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (GLOO, "Connection closed by peer [127.0.0.1]:61598"),
        ("[1] Broken pipe\nand more", "[1] Broken pipe"),
        ("", "RuntimeError"),
    ],
)
def test_what_a_network_library_says_is_said_in_short(message: str, said: str) -> None:
    found = lost_finding(LoadError("RuntimeError", message))
    assert found.text == f"another rank went away or did not answer: {said}"


def test_ranks_that_failed_are_counted() -> None:
    assert failed_finding({1: None}).text.startswith("rank 1 failed; ")
    assert failed_finding({2: None, 3: None}).text.startswith("ranks 2-3 failed; ")
