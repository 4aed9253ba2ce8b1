"""
One job on two hosts, as far as one machine can have them: two network namespaces and host names, joined by a cable.

Each host has a torchrun with two ranks, and says what it knows of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ranks
from tests.jobs.harness import TIMEOUT, Outcome, environment

TAG = f"{os.getpid() % 10_000:04d}"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def missing() -> str | None:
    """
    What this machine lacks for two namespaces, or None.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool}: apt-get install iproute2 util-linux"
    try:
        ip("netns", "add", f"probe{TAG}")
        ip("netns", "del", f"probe{TAG}")
    except subprocess.CalledProcessError:
        return "this machine does not allow network namespaces"
    return None


pytestmark = [pytest.mark.slow]


@dataclass
class Cable:
    """
    The two hosts, and the processes on them.
    """

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def on(self, host: str, *line: str, **settings: str) -> subprocess.Popen[str]:
        """
        Start a program on a host.
        """
        inside = f'hostname node-{host}; exec "$@"'
        command = ["ip", "netns", "exec", f"{host}{TAG}", "unshare", "--uts", "sh", "-c", inside, "sh", *line]
        with (self.folder / f"{host}-{len(self.processes)}.err").open("w") as err:
            environ = environment(**settings)
            process = subprocess.Popen(command, env=environ, stderr=err, text=True, start_new_session=True)
        self.processes.append(process)
        return process

    def torchrun(self, host: str, *words: str, **settings: str) -> subprocess.Popen[str]:
        """
        Two ranks of `rank_ends.py`.
        """
        rank = list(ADDRESSES).index(host)
        line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        line += ["--nproc-per-node", "2", "--master-addr", ADDRESSES["a"], "--master-port", "29555", ranks.PROGRAM]
        mine = {
            "CKPT_SENTRY": "1",
            "CKPT_SENTRY_DIR": str(self.folder / f"records-{host}"),
            "GLOO_SOCKET_IFNAME": f"{host}{TAG}v",
        }
        return self.on(host, *line, *words, str(self.folder / "work"), **(mine | settings))

    def said(self, host: str, number: int) -> str:
        return (self.folder / f"{host}-{number}.err").read_text(errors="replace")

    def until(self, condition: Any) -> None:
        """
        Wait for a condition, as long as a program may take.
        """
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, [file.read_text() for file in self.folder.glob("*.err")]
            time.sleep(0.1)

    def records(self, name: str) -> Outcome:
        return Outcome(0, "", "", self.folder / name)

    def has(self, name: str, text: str) -> bool:
        files = (self.folder / name).glob("*.jsonl") if (self.folder / name).exists() else ()
        return any(text in file.read_text(errors="replace") for file in files)


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Cable]:
    if reason := missing():
        pytest.skip(reason)
    a, b = (f"{host}{TAG}" for host in ADDRESSES)
    for space in (a, b):
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
    ip("link", "add", f"{a}v", "netns", a, "type", "veth", "peer", "name", f"{b}v", "netns", b)
    for space, address in ((a, ADDRESSES["a"]), (b, ADDRESSES["b"])):
        ip("-n", space, "addr", "add", f"{address}/24", "dev", f"{space}v")
        ip("-n", space, "link", "set", f"{space}v", "up")
    made = Cable(tmp_path)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for space in (a, b):
            ip("netns", "del", space)


def test_each_node_says_what_its_ranks_saw(cable: Cable) -> None:
    jobs = [cable.torchrun(host, "plan", "3", "raise") for host in ADDRESSES]
    assert [job.wait(TIMEOUT) for job in jobs] == [1, 1]
    loads = [ranks.last(cable.records(f"records-{host}")) for host in ADDRESSES]
    assert [load["ranks_reported"] for load in loads] == ["0-1", "2-3"]
    assert ranks.first(loads[1]) == ("ValueError", 3, "plan")
    assert len({load["load_id"] for load in loads}) == 1
    assert [cable.said(host, number).count("ckpt_sentry ✗") for number, host in enumerate(ADDRESSES)] == [1, 1]


def test_a_cable_cut_amid_a_load_leaves_what_each_side_knew(cable: Cable) -> None:
    jobs = [cable.torchrun(host, "none", "0", "none", SLOW_READ="6", PG_TIMEOUT="10") for host in ADDRESSES]
    cable.until(lambda: all(cable.has(f"records-{host}", '"read"') for host in ADDRESSES))
    ip("-n", f"b{TAG}", "link", "set", f"b{TAG}v", "down")
    for job in jobs:
        job.wait(TIMEOUT)
    near, far = (ranks.last(cable.records(f"records-{host}")) for host in ADDRESSES)
    assert (near["verdict"], near["ranks_reported"]) == ("failed", "0-1")
    assert (far["verdict"], far["ranks_reported"]) == ("failed", "2-3")
