from __future__ import annotations

import pytest

from ckpt_sentry.render import words


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (3_400, "3.4 kB"), (999_600, "1.0 MB"), (1.2e9, "1.2 GB"), (4e17, "400 PB")],
)
def test_size(number: float, text: str) -> None:
    assert words.size(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0 s"), (0.4, "0.4 s"), (3.14, "3.1 s"), (42.4, "42 s"), (720, "12 min"), (7500, "2 h 5 min")],
)
def test_seconds(number: float, text: str) -> None:
    assert words.seconds(number) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0 %"), (1e-9, "<0.1 %"), (0.986, "98.6 %"), (0.29, "29.0 %"), (0.99999, "99.9 %"), (1.0, "100 %")],
)
def test_percent(part: float, text: str) -> None:
    assert words.percent(part) == text


def test_ranks() -> None:
    assert words.some_ranks("2") == "rank 2"
    assert words.some_ranks("0-1,3") == "ranks 0-1,3"
    many = ",".join(str(rank) for rank in range(0, 16_384, 2))
    assert words.some_ranks(many) == "ranks 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,... (8,192 ranks)"
