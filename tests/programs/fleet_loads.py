"""
Several loads in one job, one after the other: `fleet_loads.py SCENARIO,SCENARIO,… FOLDER [PAUSE]`.

The scenarios are those of `dcp_loads.py`, and `partial`. PAUSE are the seconds between them: a Prometheus that scrapes
in between sees each. Unlike that program, this one ends as programs do, so that what is still to be sent gets sent.
"""

from __future__ import annotations

import sys
import time

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


def main(scenarios: list[str], pause: float) -> None:
    """
    Run them; the first that raises ends the program.
    """
    for number, scenario in enumerate(scenarios):
        if number:
            time.sleep(pause)
            dist.barrier()
        (partial if scenario == "partial" else getattr(dcp_loads, scenario))()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1].split(","), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
    dist.destroy_process_group()
