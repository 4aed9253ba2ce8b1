"""
What is patched: the ledger.

`install` has the functions of a registry (`ckpt_sentry.integrations.SEAMS`) called once their host modules have been
imported; nothing of the host is imported for it. They call `patch` for each attribute they replace. Every replacement
is written down, with the aliases that are found, so that `uninstall` gives back the original objects and `status` tells
what became of each.

Like the modules it stands on, this one is imported when the interpreter starts: it keeps to imports that cost next to
nothing, and starts no thread.
"""

from __future__ import annotations

import _thread
import sys
from collections import namedtuple
from types import ModuleType

from ckpt_sentry.patching import guard, patches, pause, postimport
from ckpt_sentry.patching.patches import Patch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NamedTuple

    from ckpt_sentry.patching.patches import Wrap

    class PatchStatus(NamedTuple):
        """At run time a plain `namedtuple`, which spares the import of `typing`."""

        target: str
        attribute: str
        state: str
        detail: str

else:
    PatchStatus = namedtuple("PatchStatus", "target attribute state detail")

PatchStatus.__doc__ = """
What became of one patch.

`state` is one of `APPLIED`, `ABSENT` (this version of the host has no such attribute), `GATED` (left alone on
purpose, `detail` says why), `FAILED` (`detail` is the error) and `WAITING` (the host module is not imported yet).
"""

__all__ = [
    "ABSENT",
    "APPLIED",
    "FAILED",
    "GATED",
    "WAITING",
    "Patch",
    "PatchStatus",
    "applied",
    "gate",
    "install",
    "installed",
    "patch",
    "set_aside",
    "status",
    "uninstall",
    "wait_for",
    "when_imported",
]

APPLIED = "applied"
ABSENT = "absent"
GATED = "version-gated"
FAILED = "failed"
WAITING = "waiting"

_ledger: list[Patch] = []
_statuses: dict[tuple[str, str], PatchStatus] = {}
"""By target and attribute; what still waits or has failed as a whole by reference and host module."""
_installed = False
_lock = _thread.allocate_lock()


def install(seams: Iterable[tuple[str, str]]) -> None:
    """
    Register every seam, (host module, "module:function"). What waits for a module that is there is applied at once.

    Calling it again does nothing until `uninstall`. A seam that raises is "failed" in `status`; the others go on.
    """
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    for module, reference in tuple(seams):
        wait_for(module, reference)


def uninstall() -> None:
    """
    Give back every original, aliases included, and await nothing any more.

    What somebody else has patched since keeps that patch; our wrapper below it passes through.
    """
    global _installed
    postimport.forget()
    with _lock:
        _installed = False
        undone = _ledger[::-1]
        _ledger.clear()
        _statuses.clear()
    for item in undone:
        try:
            item.restore()
        except Exception as error:
            _report("ledger.uninstall", error)
    try:
        patches.give_back(undone)
    except Exception as error:
        _report("ledger.uninstall", error)


def installed() -> bool:
    """
    Whether `install` has been called and not been undone.
    """
    return _installed


def status() -> tuple[PatchStatus, ...]:
    """
    What became of each patch, and which targets still wait or have failed; sorted.
    """
    # Copied in one step: another thread may be importing.
    entries = tuple(_statuses.values())
    return tuple(sorted(entries))


def applied() -> tuple[Patch, ...]:
    """
    The patches that are applied.
    """
    return tuple(_ledger)


def when_imported(module: str, action: Callable[[ModuleType], object]) -> None:
    """
    Call `action` with the module once it has been imported, and again whenever it is reloaded.

    At once if it is there already. An exception in `action` is logged and does not reach the host.
    """

    def run(host: ModuleType, *, late: bool) -> None:
        try:
            _apply(action, host, late=late)
        except Exception as error:
            _report(f"ledger.{module}", error)

    postimport.when_imported(module, run)


def patch(owner: Any, attribute: str, wrap: Wrap, *, target: str) -> Patch | None:
    """
    Replace `owner.attribute` (a module's or a class's) by `wrap(original, patch)` and write it down.

    Returns None, and notes "absent", if there is no such attribute. An attribute that holds one of our wrappers
    already is left as it is. What `wrap` raises is noted as "failed" and raised.
    """
    name = patches.full_name(owner, attribute)
    original = patches.lookup(owner, attribute)
    if original is patches.MISSING:
        _note(target, name, ABSENT, f"{patches.name_of(owner)} has no {attribute}")
        return None
    for known in tuple(_ledger):
        if known.replacement is original:
            return known
    made = patches.Patch(owner, attribute, original)
    try:
        made.apply(wrap)
    except Exception as error:
        _note(target, name, FAILED, f"{type(error).__name__}: {error}")
        raise
    _ledger.append(made)
    _note(target, name, APPLIED, "")
    return made


def set_aside(owner: Any, attribute: str) -> Callable[[], None] | None:
    """
    Let a name hold its original for a while: where the host calls it so often that passing through it is felt.

    Returns what puts the wrapper back, unless the name has got something else since; None where it holds none of ours.
    May be called again before that, in other threads too: the last one puts it back.
    """
    with _lock:
        held = patches.namespace(owner).get(attribute, patches.MISSING)
        found = next((one for one in _ledger if held is (one.original if one.aside else one.replacement)), None)
        if found is None:
            return None
        found.aside += 1
        setattr(owner, attribute, found.original)

    def put_back() -> None:
        with _lock:
            found.aside -= 1
            is_ours = patches.namespace(owner).get(attribute) is found.original
            if not found.aside and found.active and is_ours:
                setattr(owner, attribute, found.replacement)

    return put_back


def gate(owner: Any, attribute: str, reason: str, *, target: str) -> None:
    """
    Note that `owner.attribute` is left alone in this version of the host, and why.
    """
    _note(target, patches.full_name(owner, attribute), GATED, reason)


def wait_for(module: str, reference: str) -> None:
    """
    Call what `reference` names, "module:function" or "module:object.method", once the host's `module` is imported. It
    has a status of its own until its single patches have theirs.
    """
    target = reference.partition(":")[0].rpartition(".")[2]
    entry = (reference, module)

    def call(host: ModuleType) -> None:
        path, _, names = reference.partition(":")
        __import__(path)
        function: Any = sys.modules[path]
        for name in names.split("."):
            function = getattr(function, name)
        function(host)

    def run(host: ModuleType, *, late: bool) -> None:
        try:
            _apply(call, host, late=late)
        except Exception as error:
            _statuses[entry] = PatchStatus(target, module, FAILED, f"{type(error).__name__}: {error}")
            _report(f"ledger.{reference}", error)
        else:
            _statuses.pop(entry, None)

    _statuses[entry] = PatchStatus(target, module, WAITING, "not imported yet")
    postimport.when_imported(module, run)


def _apply(action: Callable[[ModuleType], object], host: ModuleType, *, late: bool) -> None:
    """
    Call the action, and look for aliases of what it has patched, also where it stops half-way.
    """
    first_new = len(_ledger)
    try:
        pause.uncollected(action, host)
    finally:
        patches.sweep(_ledger[first_new:], into_classes=late, since=None if late else host.__name__)


def _note(target: str, name: str, state: str, detail: str) -> None:
    _statuses[target, name] = PatchStatus(target, name, state, detail)


def _report(point: str, error: Exception) -> None:
    try:
        guard.log(point, error)
    except Exception:  # noqa: S110 - there is nobody left to tell
        pass
