"""
The built wheel and an environment with it, once for all tests that start interpreters.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_sentry import config
from ckpt_sentry.patching import guard, ledger

if TYPE_CHECKING:
    from tests.agents import Agent

guard.under_test = True

ROOT = Path(__file__).parent.parent

OF_THE_MACHINE = (
    "root may write anywhere",
    "notes came with Python 3.11",
    "no IPv6 loopback",
    "this torch ",
    "this transformers ",
    "this accelerate ",
)
"""Why a test may be skipped even where nothing is to be: the machine, or the version under test, is as it is."""


@dataclass(frozen=True)
class Environment:
    """
    A virtual environment. `run` starts its Python with a clean environment of variables.
    """

    prefix: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.prefix / "lib" / version / "site-packages"

    def command(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """
        Run a command in the environment's `bin`. The keyword arguments are variables of the environment.
        """
        return subprocess.run(
            [self.prefix / "bin" / command[0], *command[1:]],
            env={"PATH": os.defpath, "HOME": str(self.prefix), **self.variables, **variables},
            cwd=self.prefix,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def run(self, *arguments: str | Path, **variables: str) -> str:
        """
        What Python prints to standard output; it has to exit with 0 and print nothing to standard error.
        """
        done = self.command("python", *arguments, **variables)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


def pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)


def make_environment(prefix: Path) -> Environment:
    """
    A new environment that borrows the libraries of ours, but none of the `.pth` files there.
    """
    venv.create(prefix, with_pip=False, symlinks=True)
    made = Environment(prefix)
    libraries = sysconfig.get_path("purelib")
    (made.site_packages / "zz_libraries.pth").write_text(f"{libraries}\n")
    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """
    An environment without the package's start-up files.
    """
    return make_environment(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """
    An environment with the wheel. Not to be changed: copy what you need with `make_environment`.
    """
    made = make_environment(tmp_path_factory.mktemp("installed"))
    pip("--python", made.python, "install", "--no-deps", "--no-index", wheel)
    return made


@pytest.fixture
def fresh_hooks() -> Iterator[None]:
    """
    No hooks installed before, and none left behind.
    """
    ledger.uninstall()
    yield
    ledger.uninstall()


@pytest.fixture
def fresh_settings() -> Iterator[None]:
    config.reset()
    yield
    config.reset()


def pytest_collection_finish() -> None:
    """
    Let `dcp.load` and `dcp.save` take `no_dist` on a torch that has it not yet: without a process group, as in these
    tests, it says what is so anyway.
    """
    dcp = sys.modules.get("torch.distributed.checkpoint")
    for name in () if dcp is None else ("load", "save"):
        function = getattr(dcp, name)
        if "no_dist" not in inspect.signature(function).parameters:
            setattr(dcp, name, _without_no_dist(function))


def _without_no_dist(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("no_dist", None)
        # By its module's name for it, as a program would: that is what the agent patches.
        return getattr(sys.modules[function.__module__], function.__name__)(*args, **kwargs)

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """
    Under `NO_SKIP`, as in CI, a tool that is missing is a failure.
    """
    report = yield
    if report.skipped and os.environ.get("NO_SKIP"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(known in reason for known in OF_THE_MACHINE):
            report.outcome = "failed"
            report.longrepr = f"{reason} (NO_SKIP is set)"
    return report


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """
    The agent in this very process, for the length of a test.
    """
    from tests.agents import fresh  # imports torch

    with fresh(tmp_path / "records", monkeypatch) as made:
        yield made
