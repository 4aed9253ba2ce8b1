"""
Post-import hooks and the ledger of everything that is patched.

`install` registers each entry of `TARGETS` to run once its host module has been imported; nothing of the host is
imported for it. A target calls `patch` for each attribute it replaces. Every replacement is written down, together with
the aliases that a late `install` finds, so that `uninstall` gives back the original objects and `status` tells what
became of each patch.

This module is imported when the interpreter starts: it keeps to modules that are loaded anyway or cost next to
nothing, and starts no thread.
"""

from __future__ import annotations

import _thread
import sys
from collections import namedtuple
from types import ModuleType

from ckpt_sentry import guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any, NamedTuple

    Action = Callable[[ModuleType], object]
    Wrap = Callable[[Any, "Patch"], Any]

    class PatchStatus(NamedTuple):
        """See below: at run time a plain `namedtuple`, which spares the import of `typing`."""

        target: str
        attribute: str
        state: str
        detail: str
else:
    PatchStatus = namedtuple("PatchStatus", "target attribute state detail")  # noqa: PYI024
    PatchStatus.__doc__ = """
    What became of one patch.

    `state` is one of `APPLIED`, `ABSENT` (this version of the host has no such attribute), `GATED` (left alone on
    purpose, `detail` says why), `FAILED` (`detail` is the error) and `WAITING` (the host module is not imported yet).
    """

APPLIED = "applied"
ABSENT = "absent"
GATED = "version-gated"
FAILED = "failed"
WAITING = "waiting"

TARGETS: list[tuple[str, str]] = [
    ("torch.distributed.checkpoint.utils", "ckpt_sentry.targets.dcp:instrument_utils"),
    ("torch.distributed.checkpoint.state_dict_loader", "ckpt_sentry.targets.dcp:instrument_loader"),
    ("torch.distributed.checkpoint.format_utils", "ckpt_sentry.targets.dcp:instrument_format_utils"),
    ("torch.distributed.launcher.api", "ckpt_sentry.targets.torchrun:instrument"),
]
"""(host module to wait for, "module:function" of this package that is then called with the host module)."""

_MISSING = object()


class Patch:
    """
    One replaced attribute: where, by what, and where else the original was found.

    `active` is True until `uninstall`; a wrapper that somebody still holds afterwards reads it and passes through.
    """

    __slots__ = ("active", "aliases", "attribute", "inherited", "original", "owner", "replacement", "target")

    def __init__(self, target: str, owner: Any, attribute: str, original: Any) -> None:
        self.target = target
        self.owner = owner
        self.attribute = attribute
        self.original = original
        self.replacement: Any = _MISSING
        self.inherited = attribute not in _namespace(owner)
        self.aliases: list[tuple[Any, str]] = []
        self.active = True

    def apply(self, wrap: Wrap) -> None:
        """
        Put the wrapper in place; a `staticmethod` or `classmethod` is wrapped on the inside and stays one.
        """
        kind = type(self.original)
        if kind in (staticmethod, classmethod):
            self.replacement = kind(wrap(self.original.__func__, self))
        else:
            self.replacement = wrap(self.original, self)
        setattr(self.owner, self.attribute, self.replacement)

    def redirect(self, owner: Any, attribute: str) -> None:
        """
        Point another name of the original at the wrapper.
        """
        setattr(owner, attribute, self.replacement)
        self.aliases.append((owner, attribute))

    def restore(self) -> None:
        """
        Give every name back to the original, unless somebody else has replaced it since.
        """
        self.active = False
        for owner, attribute in [*self.aliases, (self.owner, self.attribute)]:
            if _namespace(owner).get(attribute, _MISSING) is not self.replacement:
                continue
            if self.inherited and owner is self.owner and attribute == self.attribute:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, self.original)
        self.aliases.clear()


class _Awaited:
    """
    An action and the host module it waits for; `entry` is what `status` shows of it, if anything.
    """

    __slots__ = ("action", "detail", "module", "state", "target")

    def __init__(self, module: str, action: Action, target: str | None) -> None:
        self.module = module
        self.action = action
        self.target = target
        self.state = WAITING
        self.detail = f"{module} is not imported yet"

    def run(self, module: ModuleType, *, late: bool) -> None:
        """
        Call the action; whatever it raises is noted here and goes no further, for it would fail the host's import.
        """
        first_new = len(_patches)
        try:
            self.action(module)
        except Exception as error:
            self.state, self.detail = FAILED, f"{type(error).__name__}: {error}"
            _report(f"hooks.{self.module}", error)
        else:
            self.state, self.detail = APPLIED, ""
        try:
            _sweep(_patches[first_new:], into_classes=late)
        except Exception as error:
            _report("hooks.sweep", error)


_awaited: dict[str, list[_Awaited]] = {}
_patches: list[Patch] = []
_statuses: dict[tuple[str, str], PatchStatus] = {}
_installed = False
_lock = _thread.allocate_lock()


def install(targets: Sequence[tuple[str, str]] | None = None) -> None:
    """
    Register every target (default: `TARGETS`). Those whose host module is imported already are applied at once.

    Calling it again does nothing until `uninstall`. Never raises: a target that fails is "failed" in `status`.
    """
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    for module, reference in TARGETS if targets is None else targets:
        _wait(_Awaited(module, _resolver(reference), reference.partition(":")[0].rpartition(".")[2]))


def uninstall() -> None:
    """
    Give back every original, aliases included, and forget what was awaited.

    Names that somebody else has patched since keep that patch; our wrapper below it passes through.
    """
    global _installed
    with _lock:
        _installed = False
        patches = _patches[::-1]
        _patches.clear()
        _statuses.clear()
        _awaited.clear()
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
    for patch_ in patches:
        try:
            patch_.restore()
        except Exception as error:
            _report("hooks.restore", error)


def installed() -> bool:
    """
    Whether `install` has been called and not been undone.
    """
    return _installed


def status() -> tuple[PatchStatus, ...]:
    """
    What became of each patch, and which targets still wait or have failed; sorted.
    """
    with _lock:
        entries = list(_statuses.values())
        awaited = [item for items in _awaited.values() for item in items]
    entries += [
        PatchStatus(item.target, item.module, item.state, item.detail)
        for item in awaited
        if item.target is not None and item.state != APPLIED
    ]
    return tuple(sorted(entries))


def when_imported(module: str, action: Action) -> None:
    """
    Call `action` with the module once it has been imported, and again whenever it is reloaded.

    At once if it is there already. An exception in `action` is logged and does not reach the host.
    """
    _wait(_Awaited(module, action, None))


def patch(owner: Any, attribute: str, wrap: Wrap, *, target: str) -> Patch | None:
    """
    Replace `owner.attribute` (a module's or a class's) by `wrap(original, patch)` and write it down.

    Returns None, and notes "absent", if there is no such attribute. An attribute that holds one of our wrappers
    already is left as it is. What `wrap` raises is noted as "failed" and raised.
    """
    name = f"{_name(owner)}.{attribute}"
    original = _lookup(owner, attribute)
    if original is _MISSING:
        _note(target, name, ABSENT, f"{_name(owner)} has no {attribute}")
        return None
    for known in _patches:
        if known.replacement is original:
            return known
    made = Patch(target, owner, attribute, original)
    try:
        made.apply(wrap)
    except Exception as error:
        _note(target, name, FAILED, f"{type(error).__name__}: {error}")
        raise
    _patches.append(made)
    _note(target, name, APPLIED, "")
    return made


def gate(owner: Any, attribute: str, reason: str, *, target: str) -> None:
    """
    Note that `owner.attribute` is left alone in this version of the host, and why.
    """
    _note(target, f"{_name(owner)}.{attribute}", GATED, reason)


def _note(target: str, name: str, state: str, detail: str) -> None:
    with _lock:
        _statuses[target, name] = PatchStatus(target, name, state, detail)


def _resolver(reference: str) -> Action:
    """
    The function behind "module:function", imported only when it is called.
    """
    module, _, function = reference.partition(":")

    def call(host: ModuleType) -> None:
        __import__(module)
        getattr(sys.modules[module], function)(host)

    return call


def _wait(item: _Awaited) -> None:
    with _lock:
        _awaited.setdefault(item.module, []).append(item)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    if item.module in sys.modules:
        # Waits for another thread that is just importing it; returns at once where it is complete or our own thread is.
        try:
            __import__(item.module)
        except Exception:
            return
        module = sys.modules.get(item.module)
        if module is not None:
            item.run(module, late=True)


def _imported(module: ModuleType) -> None:
    """
    Run what waits for a module that has just been executed.
    """
    with _lock:
        items = list(_awaited.get(module.__name__, ()))
    for item in items:
        item.run(module, late=False)


class _Finder:
    """
    Finds awaited modules by way of the finders behind it, and arms their loaders.
    """

    def __init__(self) -> None:
        self._busy = _thread._local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # A finder behind us may ask all of meta_path again: then it, not we, answers the inner question.
        if name not in _awaited or getattr(self._busy, "name", None) == name:
            return None
        self._busy.name = name
        try:
            spec = _first_spec(_behind(self), name, path, target)
            if spec is not None:
                _arm(spec.loader)
        except Exception:
            # Ours or another finder's: the import goes on as if we were not here, and meets the other's error itself.
            return None
        else:
            return spec
        finally:
            self._busy.name = None


_FINDER = _Finder()


def _behind(finder: _Finder) -> list[Any]:
    finders = list(sys.meta_path)
    return finders[finders.index(finder) + 1 :] if finder in finders else finders


def _first_spec(finders: list[Any], name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
    for finder in finders:
        find_spec = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def _arm(loader: Any) -> None:
    """
    Make this loader tell us when it has executed a module. It stays the same object, of the same type.

    The telling asks for the module's name, because loaders may be shared (a `zipimporter` loads all of its archive).
    """
    if type(loader).__name__ == "LazyLoader" and hasattr(loader, "loader"):
        # The outer `exec_module` only prepares the module; the inner one runs at the first use.
        loader = loader.loader
    execute = getattr(loader, "exec_module", None)
    if isinstance(loader, type) or execute is None or hasattr(execute, "ckpt_sentry"):
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _imported(module)
        except Exception:  # noqa: S110 - `_imported` has logged what there is to say; nothing may reach the host
            pass

    exec_module.ckpt_sentry = True  # type: ignore[attr-defined]
    loader.exec_module = exec_module


def _sweep(patches: list[Patch], *, into_classes: bool) -> None:
    """
    Redirect whatever holds an original under another name (`from torch.distributed.checkpoint import load`).

    One pass over all modules for all patches. Namespaces are read past `__getattr__` and `__getattribute__`, so that no
    lazy module loads for it.
    """
    wanted = {id(item.original): item for item in patches}
    if not wanted:
        return
    for owner, attribute, value in _names(into_classes=into_classes):
        found = wanted.get(id(value))
        if found is None or found.original is not value:
            continue
        try:
            found.redirect(owner, attribute)
        except (AttributeError, TypeError):
            continue


def _names(*, into_classes: bool) -> Iterator[tuple[Any, str, Any]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "ckpt_sentry":
            continue
        for attribute, value in list(_namespace(module).items()):
            yield module, attribute, value
            if into_classes and type(value) is type and value.__module__ == name:
                for member, inner in list(_namespace(value).items()):
                    yield value, member, inner


def _namespace(owner: Any) -> Any:
    """
    The own attributes of a module or class, without running code of the owner.
    """
    try:
        return type.__dict__["__dict__"].__get__(owner) if isinstance(owner, type) else object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}


def _lookup(owner: Any, attribute: str) -> Any:
    for namespace in map(_namespace, owner.__mro__ if isinstance(owner, type) else (owner,)):
        if attribute in namespace:
            return namespace[attribute]
    return _MISSING


def _name(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(getattr(owner, "__name__", owner))


def _report(point: str, error: Exception) -> None:
    try:
        guard.log(point, error)
    except Exception:  # noqa: S110
        pass
