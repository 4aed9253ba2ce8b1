"""
The floors of the house, as pyproject.toml draws them.
"""

from __future__ import annotations

import ast
from pathlib import Path

from importlinter.application.use_cases import SUCCESS, lint_imports
from importlinter.configuration import configure

from tests import compat

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ckpt_sentry"


def test_imports_go_downwards() -> None:
    configure()
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None, show_timings=False) == SUCCESS


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_torch_and_the_frameworks_are_imported_by_integrations_and_model_alone() -> None:
    hosts = {"torch", "accelerate", "transformers", "safetensors", "numpy"}
    outside = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in {"integrations", "model"} and hosts & imported(path)
    }
    assert outside == set()


def test_the_tests_of_other_versions_are_there() -> None:
    root = PACKAGE.parent
    assert [path for path in (*compat.QUICK, *compat.TESTS) if not (root / path).exists()] == []
