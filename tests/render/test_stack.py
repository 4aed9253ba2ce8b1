from __future__ import annotations

from ckpt_sentry.render import stack

LIBRARY = "/venv/lib/python3.11/site-packages/torch/distributed"
ROWS = [
    'File "/home/me/train.py", line 60, in <module>',
    "  main()",
    'File "/home/me/train.py", line 54, in main',
    "  dcp.load(state)",
    f'File "{LIBRARY}/checkpoint/utils.py", line 197, in reduce_scatter',
    f'File "{LIBRARY}/c10d.py", line 3, in gather',
]


def test_the_programs_own_frames_come_first() -> None:
    assert stack.rows(ROWS, 3, 80, "…") == [
        "/home/me/train.py:60 in <module>: main()",
        "/home/me/train.py:54 in main: dcp.load(state)",
        "torch/distributed/c10d.py:3 in gather",
    ]


def test_the_innermost_ones_stay_where_there_is_little_room() -> None:
    assert stack.rows(ROWS, 2, 80, "…") == [
        "/home/me/train.py:54 in main: dcp.load(state)",
        "torch/distributed/c10d.py:3 in gather",
    ]
    assert stack.rows(ROWS, 1, 80, "…") == ["/home/me/train.py:54 in main: dcp.load(state)"]


def test_a_path_is_cut_at_its_left() -> None:
    (row,) = stack.rows([f'File "{"/deep" * 20}/train.py", line 5, in run'], 1, 30, "…")
    assert row == "…p/deep/deep/train.py:5 in run"


def test_what_is_no_stack_is_shown_as_it_is() -> None:
    assert stack.rows(["(no answer)"], 6, 80, "…") == ["(no answer)"]
    assert stack.rows([], 6, 80, "…") == []
