from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from ckpt_sentry.patching.later import later


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waits.py").write_text(
        "import gc\nRESTS = not gc.isenabled()\nclass Made:\n    x = 1\ndef double(n):\n    return 2 * n\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "waits", raising=False)
    return "waits"


def test_nothing_is_imported_before_the_first_use(module: str) -> None:
    whole, double, made = later(module), later(f"{module}:double"), later(f"{module}:Made")
    assert module not in sys.modules
    assert double(2) == 4
    assert (whole.double(3), made.x, made().x) == (6, 1, 1)
    assert gc.isenabled()
    del sys.modules[module]


def test_what_is_patched_meanwhile_is_used(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, double = later(module), later(f"{module}:double")
    assert double(2) == 4
    monkeypatch.setattr(sys.modules[module], "double", lambda n: 3 * n)
    assert double(2) == whole.double(2) == 6
    del sys.modules[module]


def test_what_is_not_there_says_so_at_its_use() -> None:
    with pytest.raises(ModuleNotFoundError):
        later("no_such_module_at_all:x")()
    with pytest.raises(AttributeError):
        later("json:no_such_name")()
