from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.conftest import Environment

pytest.importorskip("opentelemetry.instrumentation", reason="opentelemetry-instrumentation is not installed")
if find_spec("torch") is None:
    pytest.skip("opentelemetry-instrument leaves out what has nothing to instrument: no torch", allow_module_level=True)

COMMAND = "import sys; from opentelemetry.instrumentation.auto_instrumentation import run; sys.exit(run())"
WAYS = (
    "from ckpt_sentry import _startup, config; from ckpt_sentry.patching import ledger;"
    "print(*_startup.ways(), ledger.installed(), config.settings().mode)"
)
QUIET = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


def instrumented(environment: Environment, program: str, **variables: str) -> str:
    """
    What `opentelemetry-instrument python -c program` prints.
    """
    return environment.run("-c", COMMAND, environment.python, "-c", program, **QUIET, **variables)


def test_the_command_switches_the_agent_on(installed: Environment) -> None:
    assert instrumented(installed, WAYS) == "opentelemetry-instrument True on\n"


def test_the_variable_decides(installed: Environment) -> None:
    assert instrumented(installed, WAYS, CKPT_SENTRY="0") == "False off\n"
    assert instrumented(installed, WAYS, CKPT_SENTRY="strict") == "site opentelemetry-instrument True strict\n"


def test_the_command_can_leave_it_out(installed: Environment) -> None:
    assert instrumented(installed, WAYS, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="ckpt_sentry") == "False off\n"


def test_the_instrumentor_in_code(installed: Environment) -> None:
    program = (
        "import sys\n"
        "from ckpt_sentry.instrumentor import CkptSentryInstrumentor\n"
        "from ckpt_sentry.patching import ledger\n"
        "assert 'torch' not in sys.modules\n"
        "CkptSentryInstrumentor().instrument(); print(ledger.installed())\n"
        "CkptSentryInstrumentor().uninstrument(); print(ledger.installed())\n"
    )
    assert installed.run("-c", program) == "True\nFalse\n"
