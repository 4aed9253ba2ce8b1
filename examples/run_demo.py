"""
What `make demo` does: resume a job that cannot be resumed, under the agent, and read its report again from disk.

The job fails on purpose; this program fails if it does not, or if the report does not say why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def shown(command: list[str], environ: dict[str, str]) -> int:
    """
    Print a command as one would type it and run it.
    """
    words = ["ckpt-sentry" if word == "ckpt_sentry" else word for word in command[1:] if word != "-m"]
    words = ["torchrun" if word == "torch.distributed.run" else word for word in words]
    setting = "CKPT_SENTRY=1 " if words[0] == "torchrun" else ""
    print(f"\n$ {setting}{' '.join(words)}\n", flush=True)
    return subprocess.run(command, env=environ, check=False).returncode


def main() -> int:
    """
    Run the job, then the report.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-sentry-demo-") as folder:
        environ = {**os.environ, "CKPT_SENTRY": "1", "OMP_NUM_THREADS": "1"}
        script = os.path.relpath(HERE / "resume_gpt.py")
        job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script, folder]
        if shown(job, environ) == 0:
            print("the job was meant to fail, and did not", file=sys.stderr)
            return 1
        report = [sys.executable, "-m", "ckpt_sentry", "report"]
        if shown(report, environ) != 0:
            return 1
        done = subprocess.run([*report, "--json"], env=environ, check=True, capture_output=True, text=True)
        (load,) = json.loads(done.stdout)["loads"]
        return 0 if load["verdict"] == "failed" and load["missing"]["count"] and load["mismatched"]["count"] else 1


if __name__ == "__main__":
    sys.exit(main())
