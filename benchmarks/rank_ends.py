"""
SIGKILL and SIGTERM to each rank in each phase of a load: whether the report names rank, signal and phase.

    python benchmarks/rank_ends.py [--world 4] [--ranks 0,1,2,3]

Prints a line for each of the combinations and how many were named. About ten seconds each on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.jobs import ranks

PHASES = ("before", "plan", "read", "barrier", "after")
SIGNALS = ("SIGKILL", "SIGTERM")


def named(load: dict[str, Any], phase: str, rank: int, signal: str) -> bool:
    """
    Whether a load of the report names the end; one after the load is no error of the load.
    """
    if phase == "after":
        text = f"rank {rank} was killed by {signal} after this load had ended there"
        return load["verdict"] == "ok" and text in ranks.texts(load, "rank_killed")
    return ranks.first(load) == (signal, rank, None if phase == "before" else phase)


def main() -> int:
    """
    Run all combinations; 1 if one was not named.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4, help="how many ranks there are")
    parser.add_argument("--ranks", help="those of them that are ended; all, if not given")
    given = parser.parse_args()
    chosen = [int(word) for word in given.ranks.split(",")] if given.ranks else list(range(given.world))
    launcher = [*ranks.TORCHRUN, "--nproc-per-node", str(given.world), ranks.PROGRAM]
    good, all_of_them = 0, list(itertools.product(PHASES, SIGNALS, chosen))
    for phase, signal, rank in all_of_them:
        with tempfile.TemporaryDirectory() as name:
            words = [phase, str(rank), signal, f"{name}/work"]
            done = ranks.launch([*launcher, *words], Path(name))
            loads = done.loads()
        found = bool(loads) and named(loads[-1], phase, rank, signal)
        good += found
        print(f"{'named' if found else 'NOT NAMED'}  {signal} to rank {rank}, {phase}", flush=True)
    print(f"{good} of {len(all_of_them)} named")
    return int(good < len(all_of_them))


if __name__ == "__main__":
    sys.exit(main())
