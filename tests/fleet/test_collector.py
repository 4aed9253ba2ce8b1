"""
The Collector's files with a real Collector: valid, and what goes in comes out as reports, series and traces.
"""

from __future__ import annotations

import json
import shlex
import ssl
import subprocess
import threading
import time
from configparser import RawConfigParser
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from ckpt_sentry.core.report import Coverage, Identity, LoadReport
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import LoadFinished, LoadStarted
from tests.fleet import services
from tests.fleet.conftest import SERVICE, VERDICTS, run_loads
from tests.fleet.services import AGENT, BASE, GATEWAY, ROOT, Collector, eventually, get
from tests.jobs import harness

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fleet.conftest import Credentials, Fleet

CONFIGS = {"alone": (BASE,), "agent": (AGENT,), "gateway": (BASE, GATEWAY)}
IMAGE = {
    "receivers": {"otlp"},
    "processors": {"memory_limiter", "resource", "tail_sampling", "transform"},
    "exporters": {"otlp_grpc", "otlp_http", "file", "prometheus", "load_balancing", "debug"},
    "connectors": {"forward", "span_metrics", "count", "signal_to_metrics"},
    "extensions": {"health_check", "file_storage", "bearertokenauth"},
}
"""Components of the image, by their present names."""


def reports(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = harness.command("report", "--json", *words, str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["loads"]


def unordered(loads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Loads without the word on who failed first. The launcher hears of failures in their order; a Collector gets them
    when exporters get to it, so its report goes by clock, and of ranks that fail for one cause at once it may name
    another.
    """
    words = ("first_rank", "order_by")
    return [
        load | {"error": load["error"] and {name: load["error"][name] for name in load["error"] if name not in words}}
        for load in loads
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_valid_and_says_nothing(name: str) -> None:
    line = [services.otelcol(), "validate", *(f"--config={path}" for path in CONFIGS[name])]

    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", [BASE, AGENT, GATEWAY], ids=lambda path: path.name)
def test_only_components_of_the_image_by_their_present_names(path: Path) -> None:
    config = yaml.safe_load(path.read_text())

    for section, known in IMAGE.items():
        assert {name.partition("/")[0] for name in config.get(section, {})} <= known


def test_the_memory_limiter_is_first_behind_every_receiver() -> None:
    for path in (BASE, AGENT):
        for name, pipeline in yaml.safe_load(path.read_text())["service"]["pipelines"].items():
            if "otlp" in pipeline["receivers"]:
                assert pipeline["processors"][0] == "memory_limiter", name


@pytest.mark.slow
def test_the_collectors_records_make_the_report_of_the_launcher(fleet: Fleet) -> None:
    own = fleet.outcome.loads()

    assert [load["verdict"] for load in own] == VERDICTS
    assert [load["ranks_reported"] for load in own] == ["0-3"] * 4
    collected = reports(fleet.collector.records.parent, "--run", own[0]["run_id"])
    assert unordered(collected) == unordered(own)
    assert (own[3]["error"]["order_by"], collected[3]["error"]["order_by"]) == ("arrival", "clock")


@pytest.mark.slow
def test_a_killed_rank_is_in_the_collectors_report_as_in_the_launchers(tmp_path: Path) -> None:
    with Collector(tmp_path, "collector", BASE) as collector:
        outcome = run_loads("killed", tmp_path, collector.endpoint)
        (own,) = outcome.loads()

        assert own["error"]["first_rank"] == 2
        assert {one["code"]: one["ranks"] for one in own["findings"]}["rank_killed"] == "2"

        def collected() -> list[dict[str, Any]]:
            found = reports(collector.records.parent) if collector.records.exists() else []
            return found if unordered(found) == unordered([own]) else []

        (load,) = eventually(collected, every=1)
        assert load["error"]["first_rank"] == 2


@pytest.mark.slow
def test_every_bad_trace_is_kept_with_all_ranks_below_one_root(fleet: Fleet) -> None:
    bad = {load["load_id"] for load in fleet.outcome.loads() if load["verdict"] != "ok"}

    def kept() -> dict[str, list[dict[str, Any]]]:
        found = {one["traceID"]: one["spans"] for one in fleet.jaeger.traces(SERVICE)}
        return found if bad <= found.keys() else {}

    traces = eventually(kept)

    assert len(bad) == 2
    for load_id in bad:
        (root,) = [span for span in traces[load_id] if not span["references"]]
        below = [span for span in traces[load_id] if [one["spanID"] for one in span["references"]] == [root["spanID"]]]
        assert {span["operationName"] for span in below} == {root["operationName"]} == {"checkpoint.load"}
        ranks = {tag["value"] for span in below for tag in span["tags"] if tag["key"] == "nv.dl.rank"}
        assert (len(below), ranks) == (4, {0, 1, 2, 3})


@pytest.mark.slow
def test_nothing_is_deprecated_or_dropped(fleet: Fleet) -> None:
    text = fleet.collector.text().lower()

    assert "deprecat" not in text
    assert "misaligned" not in text
    assert "\terror\t" not in text


def finished(rank: int, world: int) -> LoadFinished:
    who = Identity(run_id=f"run-{world}", rank=rank, world_size=world, node=f"n{rank // 8}", pid=1000 + rank)
    report = LoadReport(
        load_id=f"{world:032x}",
        ordinal=0,
        identity=who,
        framework="dcp",
        entry_point="dcp.load",
        verdict="ok",
        started_at=1_700_000_000.0,
        ended_at=1_700_000_002.0,
        path=f"/data/{world}",
        coverage=Coverage(1.0, 1.0),
        bytes_read=10,
    )
    return LoadFinished(identity=who, at=report.ended_at, report=report)


def span(event: LoadFinished, name: str = "checkpoint.load", scope: str = "ckpt_sentry") -> dict[str, Any]:
    """
    A span of this rank as OTLP/JSON, alone in its resource.
    """
    logs = otlp_json.encode([event])["resourceLogs"][0]
    one = {
        "traceId": event.report.load_id,
        "spanId": f"{event.identity.rank + 1:016x}",
        "name": name,
        "startTimeUnixNano": str(int(event.report.started_at * 1e9)),
        "endTimeUnixNano": str(int(event.report.ended_at * 1e9)),
        "attributes": logs["scopeLogs"][0]["logRecords"][0]["attributes"],
    }
    return {"resource": logs["resource"], "scopeSpans": [{"scope": {"name": scope}, "spans": [one]}]}


def measured(folder: Path, world: int) -> dict[str, float]:
    """
    The series of one load of so many ranks, each rank with a request of its own.
    """
    with Collector(folder, f"world-{world}", BASE) as collector:
        for rank in range(world):
            event = finished(rank, world)
            assert collector.post("logs", otlp_json.encode([event])) == 200
            assert collector.post("traces", {"resourceSpans": [span(event)]}) == 200
        wanted = {"ckpt_sentry_calls_total", "ckpt_sentry_rank_loads_total", "ckpt_sentry_load_coverage_count"}

        def all_counted() -> dict[str, float]:
            found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in collector.series()}
            counts = {name: value for name, value in found.items() if name.partition("{")[0] in wanted}
            return found if sorted(counts.values()) == [world] * len(wanted) else {}

        return eventually(all_counted)


def test_series_do_not_grow_with_ranks_and_count_each(tmp_path: Path) -> None:
    few, many = measured(tmp_path, 2), measured(tmp_path, 300)

    assert few.keys() == many.keys()
    assert len(many) < 60
    assert not any(word in name for name in many for word in ("rank=", "run", "pid", "host", "/data", "instance"))


def test_spans_of_others_make_one_series(tmp_path: Path) -> None:
    with Collector(tmp_path, "collector", BASE) as collector:
        for number in range(50):
            foreign = span(finished(number, 50), name=f"GET /users/{number}", scope="requests")
            assert collector.post("traces", {"resourceSpans": [foreign]}) == 200

        calls = eventually(lambda: [line for line in collector.series() if line.startswith("ckpt_sentry_calls_total")])

        (line,) = calls
        assert 'span_name="other"' in line


def test_a_stop_amid_waiting_traces_is_clean(tmp_path: Path) -> None:
    with Collector(tmp_path, "collector", BASE, CKPT_SENTRY_DECISION_WAIT="300s") as collector:
        failing = span(finished(0, 1))
        failing["scopeSpans"][0]["spans"][0]["status"] = {"code": 2}
        assert collector.post("traces", {"resourceSpans": [failing]}) == 200
        assert collector.post("logs", otlp_json.encode([finished(0, 1)])) == 200

        assert collector.stop() == 0

        assert "panic" not in collector.text()
        assert len(collector.log_records()) == 1


def test_a_gateway_asks_for_one_of_its_tokens_over_tls(tmp_path: Path, credentials: Credentials) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("old\nnew\n")
    variables = credentials.variables | {"CKPT_SENTRY_TOKEN_FILE": str(tokens)}
    with Collector(tmp_path, "gateway", BASE, GATEWAY, **variables) as gateway:
        url = f"https://localhost:{gateway.http}/v1/logs"
        context = ssl.create_default_context(cafile=variables["CKPT_SENTRY_CA_FILE"])

        def status(**headers: str) -> int:
            return get(url, b"{}", context, Content_Type="application/json", **headers)[0]

        assert get(url.replace("https", "http"), b"{}", Content_Type="application/json")[0] == 400
        assert status() == 401
        assert status(Authorization="Bearer wrong") == 401
        assert status(Authorization="Bearer old") == 200
        assert status(Authorization="Bearer new") == 200


def test_two_gateways_get_whole_loads_each(tmp_path: Path, credentials: Credentials) -> None:
    secure = credentials.variables
    with (
        Collector(tmp_path, "one", BASE, GATEWAY, **secure) as one,
        Collector(tmp_path, "two", BASE, GATEWAY, CKPT_SENTRY_SAMPLE_PERCENT="100", **secure) as two,
    ):
        gateways = f"[localhost:{one.grpc}, localhost:{two.grpc}]"
        with Collector(tmp_path, "agent", AGENT, CKPT_SENTRY_GATEWAYS=gateways, **secure) as agent:
            loads = range(4, 24)
            for world in loads:
                assert agent.post("logs", otlp_json.encode([finished(rank, world) for rank in range(4)])) == 200

            def by_gateway() -> list[list[str]]:
                found = [[record["traceId"] for record in gateway.log_records()] for gateway in (one, two)]
                return found if sum(map(len, found)) == 4 * len(loads) else []

            first, second = eventually(by_gateway)

    assert not set(first) & set(second)
    assert first
    assert second
    assert "deprecat" not in agent.text().lower() + one.text().lower()


class Sender(threading.Thread):
    """
    A rank that sends numbered events, each until it is acknowledged, and knows which were.
    """

    def __init__(self, agent: Collector, rank: int) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[str] = []
        self.refused = 0
        self._agent, self._rank, self._closing = agent, rank, threading.Event()

    def run(self) -> None:
        who = Identity(run_id="numbered", rank=self._rank, world_size=4, node="n1", pid=self._rank)
        number = 0
        while not self._closing.is_set():
            load_id = f"{self._rank + 1:016x}{number:016x}"
            event = LoadStarted(
                identity=who, at=time.time(), load_id=load_id, ordinal=number, framework="dcp", entry_point="dcp.load"
            )
            if self._agent.post("logs", otlp_json.encode([event])) == 200:
                self.acknowledged.append(load_id)
                number += 1
            else:
                self.refused += 1

    def close(self) -> None:
        self._closing.set()
        self.join(60)


@pytest.mark.slow
def test_an_agent_that_is_killed_loses_nothing_it_has_acknowledged(tmp_path: Path, credentials: Credentials) -> None:
    """
    The gateway is away, so all lies in the agent's queue; the agent is killed twice while four ranks send.
    """
    gateway = Collector(tmp_path, "gateway", BASE, GATEWAY, **credentials.variables)
    to_gateway = {"CKPT_SENTRY_GATEWAYS": f"[localhost:{gateway.grpc}]", "CKPT_SENTRY_FLUSH": "200ms"}
    with Collector(tmp_path, "agent", AGENT, **to_gateway, **credentials.variables) as agent:
        senders = [Sender(agent, rank) for rank in range(4)]
        try:
            for sender in senders:
                sender.start()
            for kills in (1, 2):
                eventually(lambda kills=kills: min(len(sender.acknowledged) for sender in senders) >= 100 * kills)
                agent.kill()
                agent.start()
            eventually(lambda: min(len(sender.acknowledged) for sender in senders) >= 300)
        finally:
            for sender in senders:
                sender.close()
        acknowledged = {load_id for sender in senders for load_id in sender.acknowledged}
        assert sum(sender.refused for sender in senders) > 0
        assert not gateway.records.exists()

        with gateway:

            def arrived() -> list[str]:
                found = [record["traceId"] for record in gateway.log_records()]
                return found if acknowledged <= set(found) else []

            stored = eventually(arrived, seconds=120)

    print(f"{len(acknowledged)} acknowledged, 0 of them lost, {len(stored) - len(set(stored))} sent twice")
    assert len(acknowledged) >= 1200


@pytest.mark.slow
def test_a_run_is_reported_in_full_although_the_agent_is_killed_amid_it(
    tmp_path: Path, credentials: Credentials
) -> None:
    with Collector(tmp_path, "gateway", BASE, GATEWAY, **credentials.variables) as gateway:
        to_gateway = {"CKPT_SENTRY_GATEWAYS": f"[localhost:{gateway.grpc}]"}
        with Collector(tmp_path, "agent", AGENT, **to_gateway, **credentials.variables) as agent:
            outcomes: list[harness.Outcome] = []
            run = threading.Thread(
                target=lambda: outcomes.append(run_loads("good,missing", tmp_path, agent.endpoint, pause=10.0))
            )
            run.start()
            try:
                eventually(lambda: agent.own_metric("otelcol_receiver_accepted_log_records") > 0, seconds=100)
                agent.kill()
                agent.start()
            finally:
                run.join(harness.TIMEOUT)
            (outcome,) = outcomes
            own = outcome.loads()

            assert [load["verdict"] for load in own] == ["ok", "failed"]

            def collected() -> bool:
                return gateway.records.exists() and unordered(reports(gateway.records.parent)) == unordered(own)

            eventually(collected, every=1)


UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


def configs(words: list[str]) -> list[str]:
    """
    The files of this repository behind the `--config` of a command line, as installed in /etc/ckpt-sentry.
    """
    paths = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    assert all(path.startswith("/etc/ckpt-sentry/") for path in paths)
    return [path.removeprefix("/etc/ckpt-sentry/") for path in paths]


def test_units_start_the_files_of_this_repository() -> None:
    used = {}
    for path in UNITS:
        unit = RawConfigParser(strict=False)
        unit.optionxform = str
        unit.read(path)
        used[path.stem] = configs(shlex.split(unit["Service"]["ExecStart"]))

    assert used == {
        "ckpt-sentry-agent": ["agent.yaml"],
        "ckpt-sentry-gateway": ["otel-collector.yaml", "gateway.yaml"],
    }


def test_manifests_start_the_files_of_this_repository() -> None:
    used = {}
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            assert {"apiVersion", "kind", "metadata"} <= document.keys(), path
            if document["kind"] in ("DaemonSet", "Deployment"):
                (container,) = document["spec"]["template"]["spec"]["containers"]
                used[document["kind"]] = configs(container["args"])
                assert container["image"].startswith("otel/opentelemetry-collector-contrib:")

    assert used["DaemonSet"] == ["agent.yaml", "agent-dns.yaml"]
    assert used["Deployment"] == ["otel-collector.yaml", "gateway.yaml"]


def test_the_agents_resolver_for_kubernetes_is_valid(credentials: Credentials) -> None:
    line = [services.otelcol(), "validate", f"--config={AGENT}"]
    line += [f"--config={ROOT / 'deploy' / 'kubernetes' / 'overlay' / 'agent-dns.yaml'}"]

    done = subprocess.run(line, env=credentials.variables, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_slurm_prologs_never_fail_and_lead_ranks_to_the_agent(tmp_path: Path) -> None:
    folder = ROOT / "deploy" / "slurm"

    def run(name: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        return subprocess.run(
            ["sh", str(folder / name)], env=environ, capture_output=True, text=True, check=False, timeout=60
        )

    failing = tmp_path / "systemctl"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)

    assert run("prolog.sh").returncode == 0
    task = run("task_prolog.sh")
    assert task.returncode == 0
    assert task.stdout.splitlines() == [
        "export CKPT_SENTRY=1",
        "export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318",
    ]
