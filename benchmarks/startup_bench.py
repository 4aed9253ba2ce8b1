"""
What the agent costs an interpreter that starts: not installed, installed, switched on.

    python benchmarks/startup_bench.py [--json FILE] [--rounds N]

Two virtual environments with the libraries of this one, with and without the start-up files of the package. The
three cases alternate within each round; a ratio is taken within a round, so that a slow moment hits all of its sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(prefix: Path, start_up: tuple[Path, ...]) -> Path:
    """
    A virtual environment; returns its interpreter.
    """
    venv.create(prefix, symlinks=True)
    site = next(prefix.glob("lib/*/site-packages"))
    (site / "aa_libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    for file in start_up:
        shutil.copy(file, site)
    return prefix / "bin" / "python"


def seconds(python: Path, **settings: str) -> float:
    """
    From the start of an interpreter that does nothing to its end.
    """
    began = time.perf_counter()
    done = subprocess.run(
        [python, "-c", "pass"], env={"PATH": os.defpath, **settings}, check=True, stderr=subprocess.PIPE
    )
    took = time.perf_counter() - began
    if done.stderr:
        raise SystemExit(done.stderr.decode())
    return took


def spread(values: list[float]) -> dict[str, float]:
    """
    Median and quartiles.
    """
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def main() -> None:
    """
    Measure and print.
    """
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures to this file")
    arguments.add_argument("--rounds", type=int, default=60)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bare = environment(Path(folder, "bare"), ())
        ready = environment(Path(folder, "ready"), tuple((ROOT / "startup").iterdir()))
        cases = {"not installed": (bare, {}), "unset": (ready, {}), "CKPT_SENTRY=1": (ready, {"CKPT_SENTRY": "1"})}
        rounds = [
            {name: seconds(python, **settings) for name, (python, settings) in cases.items()}
            for _ in range(options.rounds + 3)
        ][3:]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name in cases:
        figures[name] = {
            "seconds": spread([one[name] for one in rounds]),
            "added": spread([one[name] - one["not installed"] for one in rounds]),
            "ratio": spread([one[name] / one["not installed"] for one in rounds]),
        }
        added, ratio = figures[name]["added"], figures[name]["ratio"]
        print(
            f"{name:14}  {1000 * figures[name]['seconds']['median']:6.1f} ms   "
            f"added {1000 * added['median']:+6.2f} ms ({1000 * added['quartile_1']:+.2f} to "
            f"{1000 * added['quartile_3']:+.2f})   ratio {ratio['median']:.3f} "
            f"({ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f})"
        )
    if options.json:
        options.json.write_text(json.dumps({"rounds": options.rounds, "cases": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
