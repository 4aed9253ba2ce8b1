"""
One run of real loads on four ranks through real services, for all tests that look at what came of it.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ckpt_sentry.core.report import Identity
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import LoadStalled
from tests.fleet import services
from tests.jobs import harness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVICE = "llama-pretrain"
VERDICTS = ["ok", "ok", "partial", "failed"]


@dataclass(frozen=True)
class Fleet:
    """
    Services that have seen the loads of `VERDICTS` on four ranks, and a stall.
    """

    collector: services.Collector
    jaeger: services.Jaeger
    prometheus: services.Prometheus
    outcome: harness.Outcome


@dataclass(frozen=True)
class Credentials:
    """
    A certificate for localhost, which is its own authority, and a token.
    """

    variables: dict[str, str]
    token: str = "a-token-of-the-tests"


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = tmp_path_factory.mktemp("credentials")
    certificate, key, token = folder / "tls.crt", folder / "tls.key", folder / "token"
    command = [services.binary("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    token.write_text(Credentials.token)
    return Credentials(
        {
            "CKPT_SENTRY_TOKEN_FILE": str(token),
            "CKPT_SENTRY_CA_FILE": str(certificate),
            "CKPT_SENTRY_CERT_FILE": str(certificate),
            "CKPT_SENTRY_KEY_FILE": str(key),
        }
    )


def run_loads(scenarios: str, folder: Path, endpoint: str, pause: float = 0.0) -> harness.Outcome:
    """
    Run `fleet_loads.py` on four ranks that export to a Collector.
    """
    words = (scenarios, str(folder / "checkpoints"), str(pause))
    exporter = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": SERVICE}
    return harness.run("fleet_loads.py", *words, folder=folder, ranks=4, **exporter)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """
    Three scrapes lie between loads: what rises has risen by then.
    """
    folder = tmp_path_factory.mktemp("fleet")
    with services.Jaeger(folder) as jaeger:
        backend = {
            "CKPT_SENTRY_BACKEND_ENDPOINT": f"http://127.0.0.1:{jaeger.otlp}",
            "CKPT_SENTRY_TRACE_EXPORTERS": "[file/records, otlp_http/backend]",
        }
        with (
            services.Collector(folder, "collector", services.BASE, **backend) as collector,
            services.Prometheus(folder, collector) as prometheus,
        ):
            outcome = run_loads("good,good,partial,missing", folder, collector.endpoint, pause=3.0)
            assert collector.post("logs", otlp_json.encode(_stall())) == 200
            services.eventually(lambda: len(collector.spans()) >= 13 * 2)
            yield Fleet(collector, jaeger, prometheus, outcome)


def _stall() -> list[LoadStalled]:
    now = time.time()
    ranks = (Identity(run_id="hanging", rank=rank, world_size=4, node="n1", pid=100 + rank) for rank in range(4))
    return [
        LoadStalled(identity=who, at=now, load_id="5" * 32, phase="barrier", since=now - 300, stack="wait()")
        for who in ranks
    ]
