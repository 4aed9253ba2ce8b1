"""
The agent in this very process, for tests of single targets: installed, with records of its own, and taken out again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_sentry import config, integrations
from ckpt_sentry.collector import records
from ckpt_sentry.core.report import LoadReport
from ckpt_sentry.integrations.torch_module import report as module_report
from ckpt_sentry.model import provenance
from ckpt_sentry.patching import ledger
from ckpt_sentry.session import process_reporter
from ckpt_sentry.transport.events import LoadFinished


@dataclass(frozen=True)
class Agent:
    directory: Path
    monkeypatch: pytest.MonkeyPatch

    def set(self, **variables: str) -> None:
        """
        Set CKPT_SENTRY_<NAME>, for the loads that follow.
        """
        for name, value in variables.items():
            self.monkeypatch.setenv(f"CKPT_SENTRY_{name}", value)
        config.reset()

    def mode(self, mode: str) -> None:
        self.monkeypatch.setenv("CKPT_SENTRY", mode)
        config.reset()

    def reports(self) -> list[LoadReport]:
        """
        The reports so far, in the order in which the loads ended.
        """
        if not self.directory.exists():
            return []
        events = (event for sourced in records.read(self.directory) for event in sourced.events)
        return [event.report for event in events if isinstance(event, LoadFinished)]

    def last(self) -> LoadReport:
        reports = self.reports()
        assert reports, "no load was seen: is `hooked(…)` in force for this framework?"
        return reports[-1]


@contextmanager
def hooked(*modules: str) -> Iterator[None]:
    """
    Install the hooks in this process, once for many tests: looking for other names of what is patched takes long.

    `modules` of the host are imported before.
    """
    for name in modules:
        importlib.import_module(name)
    ledger.uninstall()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_SENTRY", "1")
        config.reset()
        ledger.install(integrations.seams())
        try:
            yield
        finally:
            ledger.uninstall()
    config.reset()


@contextmanager
def fresh(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """
    Switch the installed agent on, with settings and records of its own, and nothing remembered.
    """
    monkeypatch.setenv("CKPT_SENTRY", "1")
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(directory))
    config.reset()
    monkeypatch.setattr(process_reporter, "_own", None)
    module_report.forget()
    provenance.forget()
    yield Agent(directory, monkeypatch)
    config.reset()


def codes(report: LoadReport, *levels: str) -> list[str]:
    """
    The codes of a report's findings, of the given levels (default: those that are more than information).
    """
    wanted = levels or ("error", "warning")
    return [finding.code for finding in report.findings if finding.level in wanted]
