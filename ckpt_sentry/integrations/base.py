"""
What an integration is made of, and all that one has to write which is a single file.

An integration observes, and decides nothing: it names the functions of a framework that load, and says of each call
what the model asked for and what the checkpoint held. Coverage, verdict, refusal, note, report and the line on the
terminal are made of that by `session`, the same for every framework. docs/integrations.md has a complete example.

A file `ckpt_sentry/integrations/NAME.py` is found by its name: it is imported once the package NAME is, and what it
calls `INTEGRATION` is put in force. Another distribution has the entry point NAME in the group
"ckpt_sentry.integrations", with "its_module:INTEGRATION" as its value.

What the host calls of an integration is contained: an error in it is logged and the load is `not_compared`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Finding, PhaseName
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import NOT_COMPARED, Asked, end, look, refusal

if TYPE_CHECKING:
    from types import ModuleType

    from ckpt_sentry.core.examine import examine
    from ckpt_sentry.core.findings import anew, renaming
    from ckpt_sentry.core.report import LoadError
    from ckpt_sentry.formats import sniff
    from ckpt_sentry.model.inventories import checkpoint_summary, model_inventory, model_summary, tree_inventory
    from ckpt_sentry.patching.ledger import Patch
    from ckpt_sentry.patching.patches import Wrap
    from ckpt_sentry.session.loads import Load
else:
    anew = later("ckpt_sentry.core.findings:anew")
    checkpoint_summary = later("ckpt_sentry.model.inventories:checkpoint_summary")
    examine = later("ckpt_sentry.core.examine:examine")
    model_inventory = later("ckpt_sentry.model.inventories:model_inventory")
    model_summary = later("ckpt_sentry.model.inventories:model_summary")
    sniff = later("ckpt_sentry.formats.sniff")
    renaming = later("ckpt_sentry.core.findings:renaming")
    tree_inventory = later("ckpt_sentry.model.inventories:tree_inventory")

__all__ = [
    "Asked",
    "Call",
    "Comparison",
    "Entry",
    "Finding",
    "Integration",
    "Inventory",
    "Loader",
    "Part",
    "model_inventory",
    "tree_inventory",
]


@dataclass(slots=True)
class Call:
    """
    One call of a watched function. Lives as long as the load: nothing of it may be kept.
    """

    arguments: Mapping[str, Any]
    """All arguments by their names, `self` among them, with the defaults of those that the caller left out."""
    given: frozenset[str]
    """The names that the caller gave a value."""
    result: Any = None
    """What the function returned, once it has."""
    parts: dict[str, Call] = field(default_factory=dict)
    """By the name of each `Part`, the last call of it within this one. Its result is None until it has returned."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    What the model asked for, and what of the checkpoint was there for it: names, shapes and dtypes of each side.

    Of a key that is on both sides the values have entered.
    """

    wanted: Inventory
    saved: Inventory | None
    """None where it could not be read: then nothing is said of keys."""
    findings: tuple[Finding, ...] = ()
    """What else is worth saying, with codes of `core.codes`: what is wrong with a file."""
    files: int | None = None
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Loader:
    """
    A function of the framework that loads a checkpoint, and what is to be learnt of a call of it.

    A call that is made within another watched load is a part of that one.
    """

    where: str
    """ "package.module:function" or "package.module:Class.method", where it is defined."""
    path: Callable[[Call], str | None]
    """The checkpoint's path or address."""
    compare: Callable[[Call], Comparison | None]
    """Called once the load is over, also where it has raised; None where this call cannot be compared."""
    asked: Callable[[Call], Asked] = lambda _: "something"
    """What the caller asked for (docs/policy.md): "whole", "something", or "part" where he said so in so many words."""
    explain: Callable[[Call, BaseException], Iterable[Finding]] = lambda _, __: ()
    """Why it raised, where keys and the exception do not tell; the codes are those of `core.codes`."""


@dataclass(frozen=True, slots=True)
class Part:
    """
    A function of the framework that a load goes through: its calls are in `Call.parts` of the load, under its name.
    """

    where: str
    phase: PhaseName | None = None
    """The phase that begins with it."""


@dataclass(frozen=True, slots=True)
class Integration:
    """
    A framework: its name in reports, the functions that load, and those within a load that are of interest.
    """

    name: str
    loaders: tuple[Loader, ...]
    parts: tuple[Part, ...] = ()
    rename_step: str | None = None
    """The next step where a rename explains the missing keys; None where the framework has no call for that."""
    part_step: str | None = None
    """The call by which a load that raised for missing keys loads the rest: "load(…, strict=False)"."""

    def instrument(self, _host: ModuleType | None = None) -> None:
        """
        Patch what is imported, and the rest as it comes. Called once the framework's package has been imported.
        """
        for loader in self.loaders:
            _patch(loader.where, self._watching(loader), self.name)
        for part in self.parts:
            _patch(part.where, _passing(part), self.name)

    def _watching(self, loader: Loader) -> Wrap:
        name = _function(loader.where)
        name = name if "." in name else f"{self.name}.{name}"

        def observing(call: Call) -> Callable[[Load], None]:
            def observe(load: Load) -> None:
                load.keep(call)
                load.has_phases = any(part.phase is not None for part in self.parts)
                if load.facts.path is not None:
                    load.facts = load.facts.at_step(find_step(load.facts.path))

            return observe

        @contained(f"{name}.begin")
        def begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
            if loads.current() is not None:
                return None
            call = _call(original, args, kwargs)
            return None if call is None else loads.begin(self.name, name, loader.path(call), observe=observing(call))

        @contained(f"{name}.before")
        def before(_load: Load) -> None:
            """
            Nothing is known yet.
            """

        @contained(f"{name}.after")
        def after(load: Load, result: Any) -> None:
            call = load.state(Call)
            if call is not None:
                call.result = result
                look(load, functools.partial(self._judge, loader, call))

        @contained(f"{name}.end")
        def end_(load: Load, error: BaseException | None) -> None:
            end(load, error, functools.partial(self._explain, loader, load))

        return judging(begin, before, after, end_)

    def _judge(self, loader: Loader, call: Call, load: Load) -> None:
        """
        :raises LowCoverageError: the settings refuse what came in.
        """
        found = loader.compare(call)
        if found is None or found.saved is None:
            load.facts = load.facts.with_findings((*(found.findings if found else ()), NOT_COMPARED))
            return
        self._compare(load, found)
        error = refusal(load.entry_point, load.facts, found.wanted, (), asked=loader.asked(call))
        if error is not None:
            raise error

    def _compare(self, load: Load, found: Comparison) -> None:
        if found.saved is None:
            load.facts = load.facts.with_findings(found.findings)
            return
        allowed = config.settings().allow_missing
        examination = examine(found.wanted, found.saved, allow_missing=allowed)
        examination = replace(examination, findings=renaming(examination.findings, self.rename_step))
        load.facts = replace(
            load.facts,
            model=model_summary(found.wanted),
            checkpoint=replace(checkpoint_summary(found.saved), files=found.files),
            format=found.format or load.facts.format,
        ).examined(examination)
        load.facts = load.facts.with_findings(found.findings)

    def _explain(self, loader: Loader, load: Load, error: BaseException, _: LoadError) -> Iterator[Finding]:
        call = load.state(Call)
        if call is None:
            return
        found = loader.compare(call)
        if found is not None:
            self._compare(load, found)
            if self.part_step is not None:
                load.facts = replace(load.facts, findings=anew(load.facts.findings, self.part_step))
        path, is_explained = load.facts.path, any(one.level == "error" for one in load.facts.findings)
        if path is not None and not is_explained and "://" not in path and not os.path.exists(path):
            yield from sniff.findings(path)
        yield from loader.explain(call, error)


def _patch(where: str, wrap: Wrap, target: str) -> None:
    module, _, path = where.partition(":")

    def patch(host: ModuleType) -> None:
        owner, _, name = path.rpartition(".")
        ledger.patch(getattr(host, owner, None) if owner else host, name, wrap, target=target)

    ledger.when_imported(module, patch)


def _passing(part: Part) -> Wrap:
    name = _function(part.where)

    @contained(f"{name}.enter")
    def enter(load: Load, original: Callable[..., Any], args: Any, kwargs: Any) -> None:
        call, outer = _call(original, args, kwargs), load.state(Call)
        if call is not None and outer is not None:
            outer.parts[name] = call
        if part.phase is not None:
            load.enter(part.phase)

    @contained(f"{name}.leave")
    def leave(load: Load, result: Any) -> None:
        outer = load.state(Call)
        if outer is not None and name in outer.parts:
            outer.parts[name].result = result

    def wrap(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        current = loads.current

        @functools.wraps(original)
        def part_of_a_load(*args: Any, **kwargs: Any) -> Any:
            load = current() if patch.active else None
            if load is None:
                return original(*args, **kwargs)
            enter(load, original, args, kwargs)
            result = original(*args, **kwargs)
            leave(load, result)
            return result

        return part_of_a_load

    return wrap


def _call(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """
    The call by the names of its parameters; None where it does not fit them: the function itself will say so.
    """
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return None
    given = frozenset(bound.arguments)
    bound.apply_defaults()
    return Call(bound.arguments, given)


def _function(where: str) -> str:
    return where.partition(":")[2]
