"""
What a wheel and an editable install put where, and that nothing stays after uninstalling.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from ckpt_sentry import __version__
from ckpt_sentry.package import _instruments
from tests.conftest import ROOT, Environment, make_environment, pip

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

STARTUP = {"ckpt_sentry.pth", "ckpt_sentry.start"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def at_top(environment: Environment) -> set[str]:
    return {path.name for path in environment.site_packages.iterdir() if "ckpt_sentry" in path.name}


def test_the_wheel_holds_the_startup_files_at_its_root(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name in STARTUP:
            assert archive.read(name) == (ROOT / "startup" / name).read_bytes()
    top = {name.partition("/")[0] for name in names}
    assert top == STARTUP | {"ckpt_sentry", f"ckpt_sentry-{__version__}.dist-info"}
    assert {"ckpt_sentry/py.typed", "ckpt_sentry/_bootstrap/sitecustomize.py"} <= names


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "ckpt_sentry").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == sources


def test_the_pth_file_is_one_import_line() -> None:
    lines = (ROOT / "startup" / "ckpt_sentry.pth").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import os; ")


def test_the_start_file_names_the_function() -> None:
    assert (ROOT / "startup" / "ckpt_sentry.start").read_text() == "ckpt_sentry._startup:start\n"


def test_a_wheel_comes_and_goes(tmp_path: Path, wheel: Path) -> None:
    environment = make_environment(tmp_path)
    pip("--python", environment.python, "install", "--no-deps", "--no-index", wheel)
    assert at_top(environment) == STARTUP | {"ckpt_sentry", f"ckpt_sentry-{__version__}.dist-info"}
    pip("--python", environment.python, "uninstall", "--yes", "ckpt-sentry")
    assert at_top(environment) == set()


def test_an_editable_install_comes_and_goes(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    pip("--python", environment.python, "install", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    assert at_top(environment) >= STARTUP
    program = "import sys, ckpt_sentry; print(ckpt_sentry.__file__, 'ckpt_sentry.patching.ledger' in sys.modules)"
    file = ROOT / "ckpt_sentry" / "__init__.py"
    assert environment.run("-c", program, CKPT_SENTRY="1") == f"{file} True\n"
    assert environment.run("-c", program) == f"{file} False\n"
    pip("--python", environment.python, "uninstall", "--yes", "ckpt-sentry")
    assert at_top(environment) == set()


def test_metadata_of_the_wheel(installed: Environment) -> None:
    metadata = PathDistribution(installed.site_packages / f"ckpt_sentry-{__version__}.dist-info")
    assert {entry.group: (entry.name, entry.value) for entry in metadata.entry_points} == {
        "console_scripts": ("ckpt-sentry", "ckpt_sentry.cli:main"),
        "opentelemetry_instrumentor": ("ckpt_sentry", "ckpt_sentry.instrumentor:CkptSentryInstrumentor"),
    }
    required = [line for line in metadata.requires or [] if "extra ==" not in line]
    assert not [line for line in required if line.startswith(("torch", "accelerate", "transformers", "numpy"))]


def test_what_is_instrumented_is_said_in_one_way() -> None:
    assert [line.replace(" ", "") for line in _instruments] == PROJECT["optional-dependencies"]["instruments"]
