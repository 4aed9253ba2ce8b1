"""
Real Collectors, Jaeger and Prometheus on free ports of 127.0.0.1, stopped whatever happens.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[2]
BASE = ROOT / "otel-collector.yaml"
AGENT = ROOT / "deploy" / "agent.yaml"
GATEWAY = ROOT / "deploy" / "gateway.yaml"
START = 60.0
"""Seconds for a program to come up: the machine may be busy with other tests."""


def binary(name: str, variable: str | None = None) -> str:
    """
    The path of a program, by its variable or on the PATH; without one the test skips, or fails where that is asked for.
    """
    given = os.environ.get(variable, "") if variable else ""
    found = shutil.which(given or name)
    if found is None:
        reason = f"no {name}: not on the PATH" + (f", and {variable} does not name one" if variable else "")
        if os.environ.get("NO_SKIP") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def otelcol() -> str:
    return binary("otelcol-contrib" if shutil.which("otelcol-contrib") else "otelcol", "CKPT_SENTRY_OTELCOL")


def eventually(look: Callable[[], Any], seconds: float = START, every: float = 0.2) -> Any:
    """
    What `look` gives as soon as it is true; it is asked again until then, and its last answer is in the failure.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = look()
        if answer:
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"still {answer!r} after {seconds} s: {look.__doc__ or look.__name__}")
        time.sleep(every)


_taken: set[int] = set()


def port() -> int:
    """
    A free port below those that the kernel gives to outgoing connections, so that none of these takes it.
    """
    while True:
        number = random.randint(10_000, 30_000)
        with socket.socket() as probe:
            if number not in _taken and probe.connect_ex(("127.0.0.1", number)):
                _taken.add(number)
                return number


def get(
    url: str, body: bytes | None = None, context: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, bytes]:
    """
    Status and body of a request; status 0 where nobody answers.
    """
    request = urllib.request.Request(url, body, {name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


@dataclass
class Service:
    """
    One program, its log, and how to tell that it is up. Used in a `with`; `kill` is SIGKILL.
    """

    command: list[str]
    log: Path
    ready_url: str
    environ: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_SENTRY", "OTEL_"))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=kept | dict(self.environ), stdout=log, stderr=log)
        try:
            eventually(self._is_up)
        except BaseException:
            self.kill()
            raise

    def _is_up(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            pytest.fail(f"{self.command[0]} has ended: {self.text()[-2000:]}")
        return get(self.ready_url)[0] == 200

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop(self) -> int | None:
        """
        SIGTERM, and SIGKILL if that is not heeded; the exit code.
        """
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Collector(Service):
    """
    A Collector of our files. Decisions and flushes come soon, as tests do not wait for minutes.
    """

    def __init__(self, folder: Path, name: str, *configs: Path, **environ: str) -> None:
        self.records = folder / name / "records.jsonl"
        self.http, self.grpc, self.prometheus, self.own, health = (port() for _ in range(5))
        variables = {
            "CKPT_SENTRY_OTLP_HTTP_ENDPOINT": f"127.0.0.1:{self.http}",
            "CKPT_SENTRY_OTLP_GRPC_ENDPOINT": f"127.0.0.1:{self.grpc}",
            "CKPT_SENTRY_PROMETHEUS_ENDPOINT": f"127.0.0.1:{self.prometheus}",
            "CKPT_SENTRY_HEALTH_ENDPOINT": f"127.0.0.1:{health}",
            "CKPT_SENTRY_SELF_HOST": "127.0.0.1",
            "CKPT_SENTRY_SELF_PORT": str(self.own),
            "CKPT_SENTRY_RECORDS": str(self.records),
            "CKPT_SENTRY_QUEUE_DIR": str(folder / name / "queue"),
            "CKPT_SENTRY_DECISION_WAIT": "2s",
            "CKPT_SENTRY_METRICS_FLUSH": "1s",
        }
        super().__init__(
            [otelcol(), *(f"--config={config}" for config in configs)],
            folder / f"{name}.log",
            f"http://127.0.0.1:{health}",
            variables | environ,
        )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def post(self, signal_name: str, request: Mapping[str, Any]) -> int:
        """
        Send one request in OTLP/JSON; the status of the answer, 0 without one.
        """
        body = json.dumps(request).encode()
        return get(f"{self.endpoint}/v1/{signal_name}", body, Content_Type="application/json")[0]

    def series(self) -> list[str]:
        """
        What Prometheus would scrape: `name{labels} value`, one a line.
        """
        text = get(f"http://127.0.0.1:{self.prometheus}/metrics")[1].decode()
        return [line for line in text.splitlines() if not line.startswith("#")]

    def own_metric(self, name: str) -> float:
        """
        The sum of a metric of the Collector about itself.
        """
        text = get(f"http://127.0.0.1:{self.own}/metrics")[1].decode()
        lines = (line for line in text.splitlines() if line.partition("{")[0] == name)
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def stored(self, kind: str, part: str, item: str) -> list[dict[str, Any]]:
        """
        The spans or log records in its file, in order of arrival.
        """
        if not self.records.exists():
            return []
        lines = [line for line in self.records.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [
            one
            for line in lines
            for resource in json.loads(line).get(kind, ())
            for scope in resource[part]
            for one in scope[item]
        ]

    def log_records(self) -> list[dict[str, Any]]:
        return self.stored("resourceLogs", "scopeLogs", "logRecords")

    def spans(self) -> list[dict[str, Any]]:
        return self.stored("resourceSpans", "scopeSpans", "spans")


class Jaeger(Service):
    def __init__(self, folder: Path) -> None:
        self.otlp, self.query, grpc, health = (port() for _ in range(4))
        super().__init__(
            [binary("jaeger", "CKPT_SENTRY_JAEGER"), "--config", str(Path(__file__).parent / "jaeger.yaml")],
            folder / "jaeger.log",
            f"http://127.0.0.1:{self.query}/api/services",
            {
                "JAEGER_OTLP_ENDPOINT": f"127.0.0.1:{self.otlp}",
                "JAEGER_QUERY_ENDPOINT": f"127.0.0.1:{self.query}",
                "JAEGER_GRPC_ENDPOINT": f"127.0.0.1:{grpc}",
                "JAEGER_HEALTH_ENDPOINT": f"127.0.0.1:{health}",
            },
        )

    def traces(self, service: str) -> list[dict[str, Any]]:
        body = get(f"http://127.0.0.1:{self.query}/api/traces?service={service}")[1]
        return json.loads(body or b"{}").get("data") or []


class Prometheus(Service):
    """
    Prometheus with our rules, scraping and evaluating each second.
    """

    def __init__(self, folder: Path, *collectors: Collector) -> None:
        import yaml

        self.web = port()
        source = ROOT / "deploy" / "prometheus"
        config = yaml.safe_load((source / "prometheus.yml").read_text())
        rules = yaml.safe_load((source / "rules.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(folder / "rules.yml")]
        ports = {"ckpt-sentry": "prometheus", "ckpt-sentry-collector": "own"}
        for job in config["scrape_configs"]:
            targets = [f"127.0.0.1:{getattr(one, ports[job['job_name']])}" for one in collectors]
            job["static_configs"] = [{"targets": targets}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        command = [binary("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{self.web}"]
        super().__init__(command, folder / "prometheus.log", f"http://127.0.0.1:{self.web}/-/ready")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """
        The samples that an expression gives now. An expression that Prometheus refuses fails the test.
        """
        from urllib.parse import urlencode

        body = urlencode({"query": expression}).encode()
        status, answer = get(f"http://127.0.0.1:{self.web}/api/v1/query", body)
        assert status == 200, (expression, answer)
        return json.loads(answer)["data"]["result"]

    def alerts(self) -> set[str]:
        answer = json.loads(get(f"http://127.0.0.1:{self.web}/api/v1/alerts")[1])
        return {one["labels"]["alertname"] for one in answer["data"]["alerts"] if one["state"] == "firing"}
