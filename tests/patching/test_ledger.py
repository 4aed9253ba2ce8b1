from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_sentry import _startup, integrations
from ckpt_sentry.patching import guard, ledger, patches, postimport
from ckpt_sentry.patching.ledger import PatchStatus
from tests.conftest import Environment

pytestmark = pytest.mark.usefixtures("fresh_hooks", "fresh_settings")

HOST = """
def load(x):
    return x

class Base:
    def inherited(self):
        return 1

class Model(Base):
    def method(self):
        return self

    @staticmethod
    def static(x):
        return x

    @classmethod
    def made(cls):
        return cls

    alias = method
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / "host.py").write_text(HOST)
    (tmp_path / "user.py").write_text("from host import load as mine, Model\nfrom host import *")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("host")
    for name in ("host", "user", "lazy_user", "host_targets", "later"):
        sys.modules.pop(name, None)


def counting(calls: list[Any]) -> ledger.Wrap:  # type: ignore[name-defined]
    def wrap(original: Callable[..., Any], patch: ledger.Patch) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if patch.active:
                calls.append(args)
            return original(*args, **kwargs)

        return wrapper

    return wrap


def own(owner: Any) -> dict[str, Any]:
    return dict(vars(owner))


def test_patch_and_restore_a_function(host: types.ModuleType) -> None:
    before, calls = own(host), []
    patch = ledger.patch(host, "load", counting(calls), target="t")
    held = host.load
    assert (host.load(1), calls) == (1, [(1,)])
    assert ledger.status() == (PatchStatus("t", "host.load", "applied", ""),)
    assert pickle.loads(pickle.dumps(held)) is held
    ledger.uninstall()
    assert own(host) == before
    assert ledger.status() == ()
    assert patch is not None
    assert not patch.active
    assert (held(2), calls) == (2, [(1,)])


def test_patch_class_attributes_of_every_kind(host: types.ModuleType) -> None:
    before, base, calls = own(host.Model), own(host.Base), []
    for name in ("method", "static", "made", "inherited"):
        ledger.patch(host.Model, name, counting(calls), target="t")
    model = host.Model()
    assert (model.method(), host.Model.static(1), host.Model.made()) == (model, 1, host.Model)
    assert (model.inherited(), host.Base().inherited()) == (1, 1)
    assert calls == [(model,), (1,), (host.Model,), (model,)]
    assert type(vars(host.Model)["static"]) is staticmethod
    assert own(host.Base) == base
    ledger.uninstall()
    assert own(host.Model) == before
    assert "inherited" not in vars(host.Model)


def test_an_absent_attribute(host: types.ModuleType) -> None:
    assert ledger.patch(host, "gone", counting([]), target="t") is None
    assert ledger.status() == (PatchStatus("t", "host.gone", "absent", "host has no gone"),)


def test_a_name_is_set_aside_for_a_while(host: types.ModuleType) -> None:
    original = host.load
    ledger.patch(host, "load", counting([]), target="t")
    wrapper = host.load
    first, second = ledger.set_aside(host, "load"), ledger.set_aside(host, "load")
    assert host.load is original
    assert first is not None
    assert second is not None
    first()
    assert host.load is original
    second()
    assert host.load is wrapper


def test_what_happens_to_a_name_that_is_set_aside(host: types.ModuleType) -> None:
    original = host.load
    ledger.patch(host, "load", counting([]), target="t")
    back = ledger.set_aside(host, "load")
    assert back is not None
    ledger.uninstall()
    back()
    assert host.load is original

    ledger.patch(host, "load", counting([]), target="t")
    back = ledger.set_aside(host, "load")
    assert back is not None
    host.load = len
    back()
    assert host.load is len


def test_what_is_not_ours_is_not_set_aside(host: types.ModuleType) -> None:
    assert ledger.set_aside(host, "load") is None
    assert ledger.set_aside(host, "gone") is None


def test_a_gated_attribute(host: types.ModuleType) -> None:
    ledger.gate(host.Model, "method", "torch 2.3 does it itself", target="t")
    assert ledger.status() == (PatchStatus("t", "host.Model.method", "version-gated", "torch 2.3 does it itself"),)


def test_a_wrap_that_raises_leaves_the_attribute(host: types.ModuleType) -> None:
    before = own(host)

    def wrap(_: Any, __: Any) -> Any:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        ledger.patch(host, "load", wrap, target="t")
    assert own(host) == before
    assert ledger.status() == (PatchStatus("t", "host.load", "failed", "ValueError: ours"),)


def test_nothing_is_wrapped_twice(host: types.ModuleType) -> None:
    calls: list[Any] = []
    first = ledger.patch(host, "load", counting(calls), target="t")
    second = ledger.patch(host, "load", counting(calls), target="t")
    host.load(1)
    assert (first is second, calls) == (True, [(1,)])


def test_a_later_patch_of_somebody_else_stays(host: types.ModuleType) -> None:
    calls: list[Any] = []
    ledger.patch(host, "load", counting(calls), target="t")
    ours = host.load

    def theirs(x: Any) -> Any:
        return ("theirs", ours(x))

    host.load = theirs
    ledger.uninstall()
    assert host.load is theirs
    assert (host.load(1), calls) == (("theirs", 1), [])


def test_a_late_patch_reaches_the_aliases_and_gives_them_back(host: types.ModuleType) -> None:
    user = importlib.import_module("user")
    user.Model.borrowed = host.load
    user.unrelated = None
    before = own(host), own(host.Model), own(user)
    calls: list[Any] = []
    ledger.when_imported("host", lambda module: ledger.patch(module, "load", counting(calls), target="t"))
    ledger.when_imported("host", lambda module: ledger.patch(module.Model, "method", counting(calls), target="t"))
    assert user.mine is user.load is host.load is host.Model.borrowed
    assert host.Model.alias is host.Model.method
    assert user.mine(3) == 3
    assert calls == [(3,)]
    ledger.uninstall()
    assert (own(host), own(host.Model), own(user)) == before


def test_an_early_patch_reaches_a_circular_import(host: types.ModuleType, tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(HOST + "\nimport user\n")
    del sys.modules["host"]
    sys.modules.pop("user", None)
    calls: list[Any] = []
    ledger.when_imported("host", lambda module: ledger.patch(module, "load", counting(calls), target="t"))
    fresh = importlib.import_module("host")
    assert fresh is not host
    sys.modules["user"].mine(1)
    assert calls == [(1,)]


@pytest.mark.usefixtures("host")
def test_the_sweep_loads_no_lazy_module(tmp_path: Path) -> None:
    (tmp_path / "lazy_user.py").write_text("raise AssertionError('was loaded')")
    spec = importlib.util.find_spec("lazy_user")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)  # type: ignore[arg-type]
    lazy = importlib.util.module_from_spec(spec)
    sys.modules["lazy_user"] = lazy
    spec.loader.exec_module(lazy)

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    sys.modules["user"] = Odd()  # type: ignore[assignment]
    ledger.when_imported("host", lambda module: ledger.patch(module, "load", counting([]), target="t"))
    assert ledger.status()[0].state == "applied"
    assert object.__getattribute__(lazy, "__class__").__name__ == "_LazyModule"


def test_the_sweep_moves_no_common_value(host: types.ModuleType) -> None:
    host.DEFAULT = None
    user = importlib.import_module("user")
    user.other = None
    ledger.when_imported("host", lambda module: ledger.patch(module, "DEFAULT", lambda _, __: 5, target="t"))
    assert (host.DEFAULT, user.other) == (5, None)


def test_a_reload_is_patched_again(host: types.ModuleType) -> None:
    calls: list[Any] = []
    ledger.when_imported("host", lambda module: ledger.patch(module, "load", counting(calls), target="t"))
    importlib.reload(host)
    host.load(1)
    assert calls == [(1,)]
    assert ledger.status() == (PatchStatus("t", "host.load", "applied", ""),)
    ledger.uninstall()
    assert not hasattr(host.load, "__wrapped__")


def targets_module(**functions: Callable[[types.ModuleType], object]) -> None:
    module = types.ModuleType("host_targets")
    vars(module).update(functions)
    sys.modules["host_targets"] = module


@pytest.mark.usefixtures("host")
def test_install_waits_applies_and_goes_on_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "later.py").write_text("def run(): return 1")

    def raising(_: types.ModuleType) -> None:
        raise ValueError("ours")

    calls: list[Any] = []
    targets_module(
        raising=raising,
        load=lambda module: ledger.patch(module, "load", counting(calls), target="t"),
        run=lambda module: ledger.patch(module, "run", counting(calls), target="t"),
    )
    caplog.set_level(logging.WARNING, "ckpt_sentry")
    ledger.install(
        [
            ("host", "host_targets:raising"),
            ("host", "host_targets:load"),
            ("host", "no_such.module:load"),
            ("later", "host_targets:run"),
            ("never", "host_targets:run"),
        ]
    )
    assert ledger.installed()
    failed = (
        PatchStatus("host_targets", "host", "failed", "ValueError: ours"),
        PatchStatus("host_targets", "never", "waiting", "not imported yet"),
        PatchStatus("module", "host", "failed", "ModuleNotFoundError: No module named 'no_such'"),
        PatchStatus("t", "host.load", "applied", ""),
    )
    assert ledger.status() == tuple(
        sorted([*failed, PatchStatus("host_targets", "later", "waiting", "not imported yet")])
    )
    assert importlib.import_module("later").run() == 1
    assert ledger.status() == tuple(sorted([*failed, PatchStatus("t", "later.run", "applied", "")]))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_install_twice_is_once_and_may_follow_uninstall(host: types.ModuleType) -> None:
    calls: list[Any] = []
    targets_module(load=lambda module: ledger.patch(module, "load", counting(calls), target="t"))
    original = vars(host)["load"]
    for _ in range(2):
        ledger.install([("host", "host_targets:load")])
        ledger.install([("host", "host_targets:load")])
        assert host.load.__wrapped__ is original
        ledger.uninstall()
        ledger.uninstall()
        assert host.load is original
        assert not ledger.installed()


def test_a_half_done_target_has_its_aliases_moved(host: types.ModuleType) -> None:
    user = importlib.import_module("user")

    def half(module: types.ModuleType) -> None:
        ledger.patch(module, "load", counting([]), target="t")
        raise ValueError("ours")

    targets_module(half=half)
    ledger.install([("host", "host_targets:half")])
    assert user.mine is host.load
    assert [(status.attribute, status.state) for status in ledger.status()] == [
        ("host", "failed"),
        ("host.load", "applied"),
    ]
    ledger.uninstall()
    assert user.mine is host.load
    assert not hasattr(host.load, "__wrapped__")


def test_the_registry_names_modules_of_this_package() -> None:
    for _, reference in integrations.SEAMS:
        module, _, function = reference.partition(":")
        assert importlib.util.find_spec(module) is not None
        assert function.startswith(("instrument", "prepare", "add_third_parties"))


def functions(module: types.ModuleType) -> list[tuple[types.ModuleType | type, str]]:
    """
    Every function that a module of ours defines, and every method.
    """
    found: list[tuple[types.ModuleType | type, str]] = []
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            found.append((module, name))
        elif isinstance(value, type) and value.__module__ == module.__name__ and name != "PatchStatus":
            found += [(value, member) for member, inner in vars(value).items() if isinstance(inner, types.FunctionType)]
    return found


BREAKABLE = [
    pytest.param(owner, name, id=f"{owner.__name__}.{name}")
    for module in (ledger, patches, postimport, guard)
    for owner, name in functions(module)
    # `find_spec` is what the import system itself calls, and all of it that can fail is in one `try`.
    if name not in {"uninstall", "find_spec"}
]


@pytest.mark.parametrize(("owner", "name"), BREAKABLE)
def test_any_function_broken_leaves_the_host_alone(
    host: types.ModuleType, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Switched on, imported, called, reloaded, while one function of ours raises whenever it is called.
    """
    monkeypatch.setenv("CKPT_SENTRY_GUARD", "swallow")
    monkeypatch.setenv("CKPT_SENTRY", "1")
    monkeypatch.setattr(integrations, "SEAMS", [("host", "host_targets:load"), ("user", "host_targets:none")])
    targets_module(load=lambda module: ledger.patch(module, "load", counting([]), target="t"), none=lambda _: None)
    expected = sorted(vars(host))
    del sys.modules["host"]

    def broken(*_: object, **__: object) -> Any:
        raise OSError(name)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        _startup.install()
        fresh = importlib.import_module("host")
        assert sorted(vars(fresh)) == expected
        assert fresh.load(5) == 5
        assert importlib.import_module("user").mine(6) == 6
        assert importlib.reload(fresh).load(7) == 7
    _startup.uninstall()
    assert not hasattr(fresh.load, "__wrapped__")


TORCH = """
import sys, types
import torch.distributed.checkpoint as dcp, torch.distributed.checkpoint.format_utils, torch.distributed.run
import torch.distributed.checkpoint.state_dict
from torch.distributed.checkpoint import load as mine

def everything():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed"):
            for attribute, value in list(vars(module).items()):
                found[name, attribute] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found.update({(name, attribute, member): id(inner) for member, inner in vars(value).items()})
    return found

before, original = everything(), id(mine)
keep = [list(vars(module).values()) for module in sys.modules.values() if isinstance(module, types.ModuleType)]
import ckpt_sentry
from ckpt_sentry.patching import ledger
ckpt_sentry.install()
changed = id(mine) != original and mine is dcp.load is dcp.state_dict_loader.load
states = sorted({status.state for status in ledger.status() if status.attribute.startswith("torch.")})
ckpt_sentry.uninstall()
after = everything()
print(changed, states, [key for key, value in before.items() if after.get(key) != value], id(mine) == original)
"""


@pytest.mark.slow
def test_a_late_install_in_torch_is_undone_to_the_last_name(installed: Environment) -> None:
    pytest.importorskip("torch")
    done = installed.command("python", "-c", TORCH)
    assert (done.returncode, done.stdout) == (0, "True ['applied'] [] True\n"), done.stderr
