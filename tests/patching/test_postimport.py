"""
Real modules in real folders and archives, imported by the real import system.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from ckpt_sentry.patching import postimport

Seen = list[tuple[str, bool]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = list(sys.meta_path)
    yield
    postimport.forget()
    assert sys.meta_path == before


@pytest.fixture
def seen() -> Seen:
    return []


def note(seen: Seen) -> Callable[..., None]:
    def action(module: ModuleType, *, late: bool) -> None:
        assert sys.modules[module.__name__] is module
        seen.append((module.__name__, late))

    return action


def test_called_after_the_module_has_run(folder: Path) -> None:
    (folder / "host_a.py").write_text("VALUE = 1")
    values = []
    postimport.when_imported("host_a", lambda module, *, late: values.append((module.VALUE, late)))
    assert values == []
    importlib.import_module("host_a")
    importlib.import_module("host_a")
    assert values == [(1, False)]


def test_called_at_once_where_it_is_there(seen: Seen) -> None:
    postimport.when_imported("json", note(seen))
    assert seen == [("json", True)]


def test_actions_in_the_order_of_registration(folder: Path) -> None:
    (folder / "host_b.py").write_text("")
    order: list[int] = []
    for number in range(3):
        postimport.when_imported("host_b", lambda _, *, late, number=number: order.append(number))  # noqa: ARG005
    importlib.import_module("host_b")
    assert order == [0, 1, 2]


def test_a_parent_is_not_its_child(folder: Path, seen: Seen) -> None:
    (folder / "host_c").mkdir()
    (folder / "host_c" / "__init__.py").write_text("from host_c import child")
    (folder / "host_c" / "child.py").write_text("")
    postimport.when_imported("host_c.child", note(seen))
    postimport.when_imported("host_c", note(seen))
    importlib.import_module("host_c")
    assert seen == [("host_c.child", False), ("host_c", False)]


def test_called_again_after_a_reload(folder: Path, seen: Seen) -> None:
    (folder / "host_d.py").write_text("")
    postimport.when_imported("host_d", note(seen))
    importlib.reload(importlib.import_module("host_d"))
    assert seen == [("host_d", False), ("host_d", False)]


def test_an_import_that_fails_fails_as_before_and_may_succeed_later(folder: Path, seen: Seen) -> None:
    path = folder / "host_e.py"
    path.write_text("raise LookupError('theirs')")
    postimport.when_imported("host_e", note(seen))
    with pytest.raises(LookupError, match=r"^theirs$"):
        importlib.import_module("host_e")
    assert seen == []
    assert "host_e" not in sys.modules
    path.write_text("# It works now.")
    importlib.invalidate_caches()
    importlib.import_module("host_e")
    assert seen == [("host_e", False)]


def test_a_missing_module_is_missing_as_before(seen: Seen) -> None:
    postimport.when_imported("host_missing", note(seen))
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'host_missing'$"):
        importlib.import_module("host_missing")
    assert importlib.util.find_spec("host_missing") is None


def test_an_action_that_raises_does_not_fail_the_import(folder: Path) -> None:
    (folder / "host_f.py").write_text("")

    def action(_: ModuleType, *, late: bool) -> None:
        raise RuntimeError(late)

    postimport.when_imported("host_f", action)
    assert importlib.import_module("host_f") is sys.modules["host_f"]


def test_looking_for_a_spec_imports_nothing(folder: Path, seen: Seen) -> None:
    (folder / "host_g.py").write_text("")
    postimport.when_imported("host_g", note(seen))
    spec = importlib.util.find_spec("host_g")
    assert spec is not None
    assert type(spec.loader) is SourceFileLoader
    assert seen == []
    # Whoever loads it by hand from this spec is served as well.
    module = importlib.util.module_from_spec(spec)
    sys.modules["host_g"] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    assert seen == [("host_g", False)]


def test_a_lazy_module_stays_lazy(folder: Path, seen: Seen) -> None:
    (folder / "host_h.py").write_text("VALUE = 1")
    postimport.when_imported("host_h", note(seen))
    spec = importlib.util.find_spec("host_h")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)  # type: ignore[arg-type]
    module = importlib.util.module_from_spec(spec)
    sys.modules["host_h"] = module
    spec.loader.exec_module(module)
    assert seen == []
    assert module.VALUE == 1
    assert seen == [("host_h", False)]


def test_modules_in_an_archive(folder: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        for name in ("host_i", "host_j", "host_k"):
            archive.writestr(f"{name}.py", "")
    monkeypatch.syspath_prepend(str(folder / "archive.zip"))
    postimport.when_imported("host_i", note(seen))
    postimport.when_imported("host_k", note(seen))
    for name in ("host_i", "host_j", "host_k"):
        importlib.import_module(name)
    assert seen == [("host_i", False), ("host_k", False)]


class AskingFinder:
    """
    A finder like wrapt's and ddtrace's: it asks the whole of `sys.meta_path` for the module that it was asked for.
    """

    def __init__(self) -> None:
        self.busy = False
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:  # noqa: ARG002
        if self.busy:
            return None
        self.busy = True
        self.asked.append(name)
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False


@pytest.mark.parametrize("position", [0, 1])
def test_beside_another_finder_of_our_kind(
    folder: Path, seen: Seen, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "host_l.py").write_text("")
    other = AskingFinder()
    postimport.when_imported("host_l", note(seen))
    finders = list(sys.meta_path)
    finders.insert(position, other)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", finders)
        importlib.import_module("host_l")
    assert seen == [("host_l", False)]
    assert other.asked == ["host_l"]


def test_a_finder_that_raises_raises_as_before(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising:
        def find_spec(self, name: str, *_: object) -> None:
            raise OSError(name)

    postimport.when_imported("host_m", note(seen))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", [sys.meta_path[0], Raising()])
        with pytest.raises(OSError, match=r"^host_m$"):
            importlib.import_module("host_m")


def test_once_for_all_threads(folder: Path, seen: Seen) -> None:
    (folder / "host_n.py").write_text("import threading\nBY = threading.get_ident()")
    postimport.when_imported("host_n", note(seen))
    barrier = threading.Barrier(8)

    def load() -> None:
        barrier.wait()
        importlib.import_module("host_n")

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [("host_n", False)]


def test_registered_while_another_thread_imports(folder: Path) -> None:
    (folder / "host_o.py").write_text("import gate_o\ngate_o.entered.set()\nassert gate_o.leave.wait(30)\nVALUE = 1")
    gate = ModuleType("gate_o")
    gate.entered, gate.leave = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    sys.modules["gate_o"] = gate
    values = []
    importing = threading.Thread(target=importlib.import_module, args=("host_o",))
    importing.start()
    assert gate.entered.wait(30)
    registering = threading.Thread(
        target=postimport.when_imported,
        args=("host_o", lambda module, *, late: values.append((module.VALUE, late))),
    )
    registering.start()
    gate.leave.set()
    importing.join()
    registering.join()
    assert values == [(1, True)]


def test_forget_leaves_loaders_silent(folder: Path, seen: Seen) -> None:
    (folder / "host_p.py").write_text("")
    postimport.when_imported("host_p", note(seen))
    spec = importlib.util.find_spec("host_p")
    postimport.forget()
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    importlib.import_module("host_p")
    assert seen == []
