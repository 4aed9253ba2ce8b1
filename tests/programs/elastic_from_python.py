"""
Two ranks of `rank_ends.py`, started by `elastic_launch` from Python, in processes of `multiprocessing`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PROGRAM = Path(__file__).with_name("rank_ends.py")


def work(*words: str) -> None:
    """
    One rank.
    """
    sys.argv = [str(PROGRAM), *words]
    runpy.run_path(str(PROGRAM), run_name="__main__")


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="from-python",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    try:
        elastic_launch(config, work)(*sys.argv[1:])
    except ChildFailedError as error:
        print("CAUGHT", type(error).__name__)
