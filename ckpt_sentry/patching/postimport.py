"""
Call somebody once a module has been imported, without importing it.

A finder at the head of `sys.meta_path` answers for awaited modules alone. It asks the finders behind it, and arms the
loader that they give: the loader stays the same object, of the same type, and tells us when it has executed a module.
Nothing here is noticed by the host: not by its exceptions, its reloads, its threads or its own finders.
"""

from __future__ import annotations

import _thread
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any, Protocol

    class Action(Protocol):
        """
        What is called with the module; `late` if it had been imported before anybody waited for it.
        """

        def __call__(self, module: ModuleType, /, *, late: bool) -> None: ...


_awaited: dict[str, list[Action]] = {}
_lock = _thread.allocate_lock()


def when_imported(module: str, action: Action) -> None:
    """
    Call `action(module, late=False)` after each execution of the module: its import, and its reloads.

    If it is there already, it is called at once, with `late=True`. `action` must not raise.
    """
    with _lock:
        _awaited.setdefault(module, []).append(action)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    if module in sys.modules:
        try:
            # Waits for another thread that is importing it at this moment, and is free where it is complete.
            __import__(module)
            action(sys.modules[module], late=True)
        except Exception:
            return


def forget() -> None:
    """
    Await nothing any more.
    """
    with _lock:
        _awaited.clear()
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)


class _Finder:
    """
    Finds awaited modules by way of the finders behind it.
    """

    def __init__(self) -> None:
        self._asked = _thread._local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """
        The spec that there would be without us, its loader armed. None for any module that nobody awaits.
        """
        # A finder behind us may ask all of `sys.meta_path` again: the inner question is not ours.
        if name not in _awaited or getattr(self._asked, "name", None) == name:
            return None
        self._asked.name = name
        try:
            spec = self._next_spec(name, path, target)
            if spec is not None:
                _arm(spec.loader)
        except Exception:
            # Ours or another finder's: the import goes on without us, and meets the other's error by itself.
            return None
        else:
            return spec
        finally:
            self._asked.name = None

    def _next_spec(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None


_FINDER = _Finder()


def _arm(loader: Any) -> None:
    """
    Have the loader call `_executed` after `exec_module`.

    Once for each loader, whichever the module, because loaders may be shared: a `zipimporter` loads all of its archive.
    """
    if type(loader).__name__ == "LazyLoader" and hasattr(loader, "loader"):
        # The outer `exec_module` only prepares the module; the inner one runs at the first use.
        loader = loader.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type) or hasattr(execute, "ckpt_sentry"):
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _executed(module)
        except Exception:  # noqa: S110 - the actions have said what there was to say; nothing may reach the host
            pass

    exec_module.ckpt_sentry = True  # type: ignore[attr-defined]
    loader.exec_module = exec_module


def _executed(module: ModuleType) -> None:
    # Outside the lock: an action imports, and an import may wait for a thread that waits for us.
    for action in list(_awaited.get(module.__name__, ())):
        action(module, late=False)
