"""
Runs the tests on the versions of torch, accelerate and transformers that are claimed.

    python tests/compat.py [--quick | --tests TESTS …] [VERSION …]      # of torch; all of `CLAIMED` where none is named

Each version gets an environment below `$XDG_CACHE_HOME/ckpt_sentry/compat`: made once, with the interpreter that runs
this, and kept. A CUDA build of torch takes 5 to 7 GB and some minutes; it runs on a CPU. What pytest says lies beside
the environment. `--quick` is what tells most of how the versions differ, in one process. Exits with 1 if a test has
failed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TESTS = ("tests/integrations", "tests/model", "tests/api", "tests/jobs")
QUICK = (
    "tests/integrations/dcp/test_step.py",
    "tests/integrations/dcp/test_keys.py",
    "tests/integrations/dcp/test_planning.py",
    "tests/integrations/dcp/test_reads.py",
    "tests/integrations/dcp/test_values.py",
    "tests/integrations/dcp/test_exceptions.py",
    "tests/integrations/accelerate/test_facts.py",
    "tests/model/test_proof.py",
    "tests/integrations/transformers/test_seams.py",
    "tests/integrations/test_policy_table.py",
    "tests/api/test_dcp.py",
)


class Host(NamedTuple):
    """
    Versions that were the newest at one time.
    """

    torch: str
    accelerate: str
    transformers: str


CLAIMED = (
    Host("2.4.1", "1.2.1", "4.48.3"),
    Host("2.6.0", "1.4.0", "4.50.3"),
    Host("2.8.0", "1.10.1", "4.57.1"),
    Host("2.10.0", "1.12.0", "5.0.0"),
    Host("2.12.0", "1.13.0", "5.8.0"),
    Host("2.13.0", "1.14.0", "5.14.1"),
    Host("2.14.1", "1.15.0", "5.24.0"),
)


class Result(NamedTuple):
    """
    What a run came to. `failed` counts errors as well.
    """

    passed: int
    failed: int
    skipped: int
    seconds: float


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "ckpt_sentry", "compat")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """
    Nobody else uses the environment meanwhile: the package is installed into it anew for each run.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepared(host: Host, folder: Path) -> Path:
    """
    The interpreter of the version's environment, with this very checkout. What is there already is not installed again.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    wanted = [f"{name}=={version}" for name, version in host._asdict().items()]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    subprocess.run([*pip, *wanted, "--editable", f"{ROOT}[test]"], check=True)
    return python


def tested(python: Path, folder: Path, options: Sequence[str]) -> Result:
    """
    Run the tests; all that pytest says goes to a file, and what failed to standard output as well.
    """
    said, counted = (folder.with_name(folder.name + kind) for kind in (".txt", ".xml"))
    began = time.monotonic()
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={counted}", *options]
    with said.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    lines = said.read_text(errors="replace").splitlines()
    print(*(line for line in lines if line.startswith(("FAILED", "ERROR"))), f"all of it: {said}", sep="\n", flush=True)
    if code not in (0, 1):
        print(*lines[-20:], sep="\n", flush=True)
        return Result(0, 1, 0, time.monotonic() - began)
    suite = next(ET.parse(counted).iter("testsuite"))
    total, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    return Result(total - failed - skipped, failed, skipped, time.monotonic() - began)


def table(results: dict[Host, Result]) -> str:
    head = ("torch", "accelerate", "transformers", "passed", "failed", "skipped", "minutes")
    rows = [
        (*host, str(one.passed), str(one.failed), str(one.skipped), f"{one.seconds / 60:.1f}")
        for host, one in results.items()
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in (head, *rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", choices=[[], *(host.torch for host in CLAIMED)])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    arguments = parser.parse_args()
    options = QUICK if arguments.quick else arguments.tests
    results: dict[Host, Result] = {}
    for host in CLAIMED:
        if arguments.versions and host.torch not in arguments.versions:
            continue
        folder = cache() / f"torch-{host.torch}-python{sys.version_info.major}.{sys.version_info.minor}"
        print(f"== torch {host.torch}, accelerate {host.accelerate}, transformers {host.transformers}", flush=True)
        with locked(folder):
            results[host] = tested(prepared(host, folder), folder, options)
    print(table(results))
    return 1 if any(one.failed for one in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
