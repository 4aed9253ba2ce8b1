"""
Prometheus with our configuration and rules, by promtool and in a real run.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.fleet import services
from tests.fleet.conftest import SERVICE
from tests.fleet.services import ROOT, eventually

if TYPE_CHECKING:
    from tests.fleet.conftest import Fleet

FOLDER = ROOT / "deploy" / "prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}

FIRING = {"CheckpointLoadFailed", "CheckpointLoadPartial", "CheckpointLoadStalled", "CheckpointCoverageLow"}
"""Alerts of what the fleet of the tests has gone through."""

WEEK = "ckpt_sentry:load_seconds:mean7d offset 1d"
"""What no test can wait for; rules_week_test.yml has it."""


def promtool(*words: str) -> str:
    line = [services.binary("promtool"), *words]
    done = subprocess.run(line, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_is_valid() -> None:
    assert "SUCCESS: 1 rule files found" in promtool("check", "config", "prometheus.yml")


def test_the_rules_are_valid() -> None:
    assert f"SUCCESS: {len(RULES)} rules found" in promtool("check", "rules", "rules.yml")


def test_the_rules_say_what_they_should() -> None:
    assert promtool("test", "rules", "rules_test.yml", "rules_week_test.yml").count("SUCCESS") == 2


def test_every_alert_has_a_test() -> None:
    tested = {
        alert["alertname"]
        for name in ("rules_test.yml", "rules_week_test.yml")
        for test in yaml.safe_load((FOLDER / name).read_text())["tests"]
        for alert in test["alert_rule_test"]
        if alert["exp_alerts"]
    }

    assert tested == ALERTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_expression_returns_data(fleet: Fleet, name: str) -> None:
    assert eventually(lambda: fleet.prometheus.query(RECORDED[name]))
    assert eventually(lambda: fleet.prometheus.query(name))


@pytest.mark.slow
def test_what_went_wrong_fires_and_nothing_else(fleet: Fleet) -> None:
    eventually(lambda: fleet.prometheus.alerts() >= FIRING)

    assert fleet.prometheus.alerts() == FIRING
    for name in FIRING:
        assert {sample["metric"]["job"] for sample in fleet.prometheus.query(ALERTS[name])} <= {SERVICE, "ckpt_sentry"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALERTS.keys() - FIRING))
def test_the_base_of_a_silent_alert_returns_data(fleet: Fleet, name: str) -> None:
    alert = ALERTS[name].strip()
    # Slow loads are compared with the week before, which is not there yet; all others with a number.
    base = alert.partition(f" > 2 * ({WEEK})")[0] if WEEK in alert else re.sub(r"\s(==|>) [\d.]+$", "", alert)

    assert base != alert
    assert eventually(lambda: fleet.prometheus.query(base))


def documented() -> list[str]:
    blocks = re.findall(r"```promql\n(.*?)```", (ROOT / "docs" / "fleet.md").read_text(), re.DOTALL)
    return [expression.strip() for block in blocks for expression in block.split("\n\n")]


@pytest.mark.slow
@pytest.mark.parametrize("expression", documented())
def test_a_documented_expression_returns_data(fleet: Fleet, expression: str) -> None:
    assert eventually(lambda: fleet.prometheus.query(expression))
