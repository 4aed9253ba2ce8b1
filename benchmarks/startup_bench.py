"""
What the agent costs a process that starts: an interpreter that does nothing, `import torch`, `import accelerate`.

    python benchmarks/startup_bench.py [--pairs 15] [--pool FILE] [--only torch]

Seconds of the CPU from the start of the process, with `CKPT_SENTRY=1` and `0`. "unset" compares an environment that has
the start-up files of the package, `CKPT_SENTRY` being unset, with one that has not. See `pairs.py`.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import venv
from pathlib import Path

import pairs

ROOT = Path(__file__).parent.parent
WORKS = [
    pairs.Work("start", ("start",)),
    pairs.Work("import torch", ("imports", "torch")),
    pairs.Work("import torch.distributed.checkpoint", ("imports", "torch.distributed.checkpoint")),
    pairs.Work("import accelerate", ("imports", "accelerate")),
]


def start() -> None:
    with pairs.measured_from_the_start():
        pass


def imports(module: str) -> None:
    with pairs.measured_from_the_start():
        __import__(module)


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


def milliseconds(python: Path) -> float:
    """
    The CPU's time of an interpreter that does nothing.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", "pass"], env={"PATH": os.defpath}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1_000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def unset(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bare = environment(Path(folder, "bare"), ())
        ready = environment(Path(folder, "ready"), tuple((ROOT / "startup").iterdir()))
        added = [milliseconds(ready) - milliseconds(bare) for _ in range(rounds + 3)][3:]
    low, middle, high = statistics.quantiles(added, n=4)
    print(f"unset: {middle:+.2f} ms of the CPU ({low:+.2f} to {high:+.2f}), {rounds} pairs")


def main() -> None:
    options = pairs.arguments(__doc__, pairs=15).parse_args()
    if options.work:
        pairs.do({"start": start, "imports": imports}, options.work)
        return
    pairs.compare(__file__, pairs.chosen(WORKS, options), options)
    if options.only in "unset" and options.pairs:
        unset(4 * options.pairs)


if __name__ == "__main__":
    main()
