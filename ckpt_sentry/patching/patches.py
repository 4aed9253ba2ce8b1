"""
One replaced attribute, and the search for other names of what it held.

Namespaces are read and written by identity: an attribute goes back to its original only where our replacement still
stands, and no code of the host runs while we look (a lazy module stays unloaded).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    Wrap = Callable[[Any, "Patch"], Any]

MISSING = object()


class Patch:
    """
    One replaced attribute of a module or class: where, by what, and where else the original was found.

    `active` is True until `restore`; a wrapper that somebody still holds afterwards reads it and passes through.
    `aside` counts those for whom a name of it holds the original for a while.
    """

    __slots__ = ("active", "aliases", "aside", "attribute", "inherited", "original", "owner", "replacement")

    def __init__(self, owner: Any, attribute: str, original: Any) -> None:
        self.owner = owner
        self.attribute = attribute
        self.original = original
        self.replacement: Any = MISSING
        self.inherited = attribute not in namespace(owner)
        self.aliases: list[tuple[Any, str]] = []
        self.active = True
        self.aside = 0

    @property
    def name(self) -> str:
        return full_name(self.owner, self.attribute)

    def apply(self, wrap: Wrap) -> None:
        """
        Put `wrap(original, self)` in place. A `staticmethod` or `classmethod` is wrapped on the inside and stays one.
        """
        kind = type(self.original)
        if kind is staticmethod or kind is classmethod:
            self.replacement = kind(wrap(self.original.__func__, self))
        else:
            self.replacement = wrap(self.original, self)
        setattr(self.owner, self.attribute, self.replacement)

    def restore(self) -> None:
        """
        Give every name back to the original, unless somebody else has replaced it since.
        """
        self.active = False
        for owner, attribute in (*self.aliases, (self.owner, self.attribute)):
            if namespace(owner).get(attribute, MISSING) is not self.replacement:
                continue
            if self.inherited and owner is self.owner:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, self.original)
        self.aliases.clear()

    def sweepable(self) -> bool:
        """
        Whether the original is something that can be known by its identity, unlike None or a small number.

        The original of an inherited attribute stands in the base class, which is not to be touched.
        """
        if self.inherited:
            return False
        return callable(self.original) or isinstance(self.original, (staticmethod, classmethod))


def sweep(patches: Sequence[Patch], *, into_classes: bool, since: str | None = None) -> None:
    """
    Redirect what holds an original under another name, such as `from torch.distributed.checkpoint import load`.

    One pass over `sys.modules` for all patches; with `into_classes` over the classes that each module defines as well.

    Args:
        since: a module that is being imported: what is defined there, or in its package, has no name as yet in modules
            that were there before. They are passed over, thousands of them.
    """
    wanted = {id(patch.original): patch for patch in patches if patch.sweepable()}
    if not wanted:
        return
    modules = list(sys.modules.items())
    if since is not None and all(_is_beside(patch.owner, since) for patch in wanted.values()):
        modules = _begun_since(since, modules)
    for owner, attribute, value in _names(modules, into_classes=into_classes):
        patch = wanted.get(id(value))
        if patch is None or patch.original is not value:
            continue
        try:
            setattr(owner, attribute, patch.replacement)
        except Exception:  # noqa: S112 - a module that forbids it keeps the original
            continue
        patch.aliases.append((owner, attribute))


def give_back(undone: Sequence[Patch]) -> None:
    """
    Put the original under every name that holds one of our replacements: names that were bound after the patch, such
    as the `load` that a package takes over from its submodule.
    """
    ours = {id(patch.replacement): patch for patch in undone if patch.sweepable()}
    for owner, attribute, value in _names(list(sys.modules.items()), into_classes=True) if ours else ():
        patch = ours.get(id(value))
        if patch is None or patch.replacement is not value:
            continue
        try:
            setattr(owner, attribute, patch.original)
        except Exception:  # noqa: S112 - a module that forbids it keeps a wrapper that passes through
            continue


def _begun_since(module: str, modules: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """
    The modules whose import has begun after that of `module`, and those of its package.

    `sys.modules` is in the order in which imports begin, until a module is through and comes to its end
    (importlib/_bootstrap.py, `_load_unlocked`).
    """
    names = [name for name, _ in modules]
    first = names.index(module) if module in names else 0
    package = f"{module.rpartition('.')[0] or module}."
    return [one for place, one in enumerate(modules) if place >= first or one[0].startswith(package)]


def _is_beside(owner: Any, module: str) -> bool:
    """
    Whether a module or class is in the package of `module`.
    """
    home = owner.__module__ if isinstance(owner, type) else str(namespace(owner).get("__name__"))
    return home.startswith(module.rpartition(".")[0] or module)


def _names(modules: Sequence[tuple[str, Any]], *, into_classes: bool) -> Iterator[tuple[Any, str, Any]]:
    for name, module in modules:
        if name.partition(".")[0] == "ckpt_sentry":
            continue
        for attribute, value in list(namespace(module).items()):
            yield module, attribute, value
            if into_classes and issubclass(type(value), type) and namespace(value).get("__module__") == name:
                for member, inner in list(namespace(value).items()):
                    yield value, member, inner


def namespace(owner: Any) -> Mapping[str, Any]:
    """
    The own attributes of a module or class, without `__getattr__`, `__getattribute__` or any other code of the owner.
    """
    try:
        # `isinstance` would ask the owner for its `__class__`.
        if issubclass(type(owner), type):
            found = type.__dict__["__dict__"].__get__(owner)
        else:
            found = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if hasattr(found, "items") else {}


def lookup(owner: Any, attribute: str) -> Any:
    """
    The attribute as it is stored (a `staticmethod` object, not its function), own or inherited; else `MISSING`.
    """
    for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
        found = namespace(holder)
        if attribute in found:
            return found[attribute]
    return MISSING


def full_name(owner: Any, attribute: str) -> str:
    """
    How an attribute of a module or class is called in `status`.
    """
    return f"{name_of(owner)}.{attribute}"


def name_of(owner: Any) -> str:
    """
    How a module or class is called: "package.module" or "package.module.Class".
    """
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(namespace(owner).get("__name__", owner))
