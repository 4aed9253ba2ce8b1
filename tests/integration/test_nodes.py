"""
One job on two hosts, as far as one machine can have them: two network namespaces and host names, joined by a cable.

Each host has a torchrun with two ranks; `ckpt-sentry collect` on the first hears both.
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

from tests.integration import ranks
from tests.integration.harness import TIMEOUT, Outcome, environment

TAG = f"{os.getpid() % 10_000:04d}"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT = 4318


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

    def collect(self) -> subprocess.Popen[str]:
        """
        The collector, on host a; returns once it listens.
        """
        (self.folder / "token").write_text("sesame\n")
        line = [*ranks.CKPT_SENTRY, "collect", "--listen", f"{ADDRESSES['a']}:{PORT}"]
        line += ["--token-file", str(self.folder / "token"), "--dir", str(self.folder / "central")]
        number = len(self.processes)
        process = self.on("a", *line)
        self.until(lambda: "listening" in self.said("a", number))
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
            "CKPT_SENTRY_COLLECTOR": f"{ADDRESSES['a']}:{PORT}",
            "CKPT_SENTRY_TOKEN_FILE": str(self.folder / "token"),
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


def end(collector: subprocess.Popen[str]) -> None:
    collector.terminate()
    assert collector.wait(TIMEOUT) == 0


def test_one_report_of_four_ranks_on_two_nodes(cable: Cable) -> None:
    collector = cable.collect()
    jobs = [cable.torchrun(host, "plan", "3", "raise") for host in ADDRESSES]
    assert [job.wait(TIMEOUT) for job in jobs] == [1, 1]
    cable.until(lambda: "ckpt_sentry ✗" in cable.said("a", 0))
    end(collector)
    load = ranks.last(cable.records("central"))
    assert ranks.first(load) == ("ValueError", 3, "plan")
    assert (load["ranks_reported"], load["error"]["order_by"]) == ("0-3", "clock")
    assert [group["ranks"] for group in load["groups"]] == ["0-2", "3"]
    assert cable.said("a", 0).count("ckpt_sentry ✗") == 1
    assert ranks.last(cable.records("records-b"))["ranks_reported"] == "2-3"


def test_a_cable_cut_amid_a_load_leaves_what_each_side_knew(cable: Cable) -> None:
    collector = cable.collect()
    jobs = [cable.torchrun(host, "none", "0", "none", SLOW_READ="6", PG_TIMEOUT="10") for host in ADDRESSES]
    cable.until(lambda: all(cable.has(f"records-{host}", '"read"') for host in ADDRESSES))
    cable.until(lambda: cable.has("central", "node-b"))
    ip("-n", f"b{TAG}", "link", "set", f"b{TAG}v", "down")
    for job in jobs:
        job.wait(TIMEOUT)
    end(collector)
    near, far, whole = (ranks.last(cable.records(name)) for name in ("records-a", "records-b", "central"))
    assert (near["verdict"], near["ranks_reported"]) == ("failed", "0-1")
    assert (far["verdict"], far["ranks_reported"]) == ("failed", "2-3")
    assert (whole["verdict"], whole["ranks_reported"]) == ("failed", "0-1")
    silent = [row for row in whole["unfinished"] if row["why"] == "nothing more was heard"]
    assert [row["ranks"] for row in silent] == ["2-3"]


def test_a_collector_that_is_killed_and_started_again_has_everything(cable: Cable) -> None:
    collector = cable.collect()
    jobs = [cable.torchrun(host, "none", "0", "none", SLOW_READ="6") for host in ADDRESSES]
    cable.until(lambda: cable.has("central", '"ckpt_sentry.load.started"'))
    os.killpg(collector.pid, signal.SIGKILL)
    collector.wait()
    collector = cable.collect()
    assert [job.wait(TIMEOUT) for job in jobs] == [0, 0]
    end(collector)
    load = ranks.last(cable.records("central"))
    assert (load["verdict"], load["ranks_reported"]) == ("ok", "0-3")
