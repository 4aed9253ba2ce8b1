"""
Several loads in one job, one after the other: `fleet_loads.py SCENARIO,SCENARIO,… FOLDER [PAUSE]`.

The scenarios are those of `dcp_loads.py`, `partial` and `killed`. PAUSE are the seconds between them: a Prometheus that
scrapes in between sees each. Unlike that program, this one ends as programs do, so that what is still to be sent gets
sent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import dcp_loads
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def partial() -> None:
    """
    Three parameters that the checkpoint lacks, and the program says that this is fine.
    """
    dcp_loads.save(dcp_loads.Net())
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp_loads.load(dcp_loads.Net(adapters=3), planner=planner)


class KillingReader(dcp.FileSystemReader):
    """
    Reads on all ranks but one, which is killed as the kernel kills what needs too much memory.
    """

    def read_data(self, *arguments: Any) -> Any:
        if dcp_loads.RANK == 2:
            time.sleep(2)  # what the rank has told so far has left by then
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_data(*arguments)


def killed() -> None:
    """
    Rank 2 is killed while it reads.
    """
    dcp_loads.save(dcp_loads.Net())
    dcp_loads.load(dcp_loads.Net(), storage_reader=KillingReader(dcp_loads.CHECKPOINT))


def main(scenarios: list[str], pause: float) -> None:
    """
    Run them; the first that raises ends the program.
    """
    for number, scenario in enumerate(scenarios):
        if number:
            time.sleep(pause)
            dist.barrier()
        (globals().get(scenario) or getattr(dcp_loads, scenario))()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1].split(","), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
    dist.destroy_process_group()
