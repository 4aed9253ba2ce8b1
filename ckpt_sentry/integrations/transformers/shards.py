"""
What a load of shards one after the other came to, as a whole: what all of them left out, the index and the files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.core.report import Facts, Finding, LoadError
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.formats import index as index_
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.integrations.torch_module import judge as module_judge
from ckpt_sentry.model import inventories, model_state
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later
from ckpt_sentry.session.conclude import refusal

if TYPE_CHECKING:
    from ckpt_sentry.core.findings import anew
    from ckpt_sentry.formats.state_file import StateFile
    from ckpt_sentry.integrations.torch_module.call import Call
    from ckpt_sentry.session.loads import Load
else:
    anew = later("ckpt_sentry.core.findings:anew")

_INDEXES: Final = {"safetensors": "model.safetensors.index.json", "torch_save": "pytorch_model.bin.index.json"}
_LOOSELY: Final = "load_sharded_checkpoint(…, strict=False)"
_SHOWN: Final = 3


@dataclass(slots=True)
class Series:
    """
    One call of the loader, and what its calls of `load_state_dict` have left out. Lives as long as the load.
    """

    model: Any
    path: str
    is_strict: bool
    format: str | None
    parts: int = 0
    missing: frozenset[str] = frozenset()
    """What each shard so far has left out."""
    unexpected: set[str] = field(default_factory=set)
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Series:
        """
        Take the arguments of the call by their names; the index is chosen as the loader does.
        """
        path = os.fsdecode(given["folder"])
        there = [kind for kind, name in _INDEXES.items() if os.path.isfile(os.path.join(path, name))]
        chosen = there[0 if given.get("prefer_safe", True) else -1] if there else None
        return cls(given["model"], path, bool(given.get("strict", True)), chosen)

    def take(self, call: Call) -> None:
        """
        Take in what one shard has brought and left out.
        """
        if call.lists is None or not isinstance(call.state_dict, dict):
            return
        missing = frozenset(call.lists.missing)
        self.missing = self.missing & missing if self.parts else missing
        self.unexpected.update(call.lists.unexpected)
        self.entries.update(inventories.state_inventory(call.state_dict).entries)
        self.parts += 1

    def index(self) -> tuple[Sequence[StateFile], Sequence[Finding]]:
        """
        The headers of the shards, and what is wrong with the index or with them.
        """
        if self.format is None:
            return (), ()
        try:
            index = index_.read(os.path.join(self.path, _INDEXES[self.format]))
        except HeaderError as error:
            return (), (error.finding(),)
        except OSError as failure:
            let_through(failure)
            return (), ()
        files = index_.shards(index)
        broken = [one for file in files for one in file.findings if one.level == "error"]
        return files, (*broken[:_SHOWN], *index_.findings(index, index_.examine(index, files)))


def located(facts: Facts, series: Series) -> Facts:
    """
    The facts with where the shards lie.
    """
    step = find_step(series.path)
    return replace(
        facts,
        path=series.path,
        format=series.format,
    ).at_step(step)


def judge(load: Load) -> None:
    """
    Judge a load that has returned, by torch's own lists.

    Raises:
        LowCoverageError: the settings refuse it.
    """
    series = load.state(Series)
    if series is None:
        return
    lists = module_judge.Lists(series.missing, series.unexpected)
    if series.parts and not lists.missing and not lists.unexpected:
        facts = module_judge.whole(series.model, {}, module_judge.Offer(series.entries, None))
        load.facts = _with(load.facts, facts, series)
        load.facts = _on_meta(load.facts, series, ())
        return
    if not series.parts:  # an index that names no shard
        lists = module_judge.Lists(model_state.inventory(series.model).entries.keys(), ())
    found = module_judge.judged(series.model, {}, lists, None, module_judge.Offer(series.entries, None))
    _, said = series.index()
    facts = replace(found.facts, findings=anew(found.facts.findings, None) if said else found.facts.findings)
    load.facts = _with(load.facts, facts.with_findings(said), series)
    load.facts = _on_meta(load.facts, series, found.lists.missing)
    missing = found.examination.difference.missing
    error = refusal(load.entry_point, load.facts, found.wanted, missing, asked="part")
    if error is not None:
        raise error


def _with(known: Facts, facts: Facts, series: Series) -> Facts:
    held = facts.checkpoint
    return replace(
        facts,
        path=known.path,
        format=known.format,
        step=known.step,
        step_source=known.step_source,
        checkpoint=None if held is None else replace(held, files=series.parts or None),
    )


def _on_meta(facts: Facts, series: Series, missing: Collection[str]) -> Facts:
    empty, left = module_judge.on_meta(series.model)
    if empty:
        facts = module_judge.unfilled(facts, series.model, set(missing), empty, module_judge.COPIED)
    return facts.with_findings([module_judge.unmade(left)]) if left and not empty else facts


def explain(load: Load, error: BaseException, _described: LoadError) -> tuple[Finding, ...]:
    """
    Say what the headers of the shards tell of a load that has raised.
    """
    series = load.state(Series)
    if series is not None:
        load.facts = _with(load.facts, _failed(series, error), series)
    return ()


def _failed(series: Series, error: BaseException) -> Facts:
    """
    What the headers of the shards tell of a load that has raised.
    """
    files, said = series.index()
    held = {key: entry for file in files for key, entry in file.inventory.entries.items()}
    if not held:
        return Facts(findings=tuple(said))
    lists, offer = module_judge.compared(series.model, module_judge.Offer(held, None))
    found = module_judge.judged(series.model, {}, lists, None, offer)
    is_about_keys = isinstance(error, RuntimeError) and "loading state_dict" in str(error)
    loosely = _LOOSELY if series.is_strict else None
    facts = module_judge.decisive(found, loosely) if is_about_keys else found.facts
    return replace(facts, findings=tuple(_ordered((*said, *facts.findings))))


def _ordered(findings: Sequence[Finding]) -> Iterator[Finding]:
    """
    The errors of files first: what lies in them explains the rest.
    """
    yield from sorted(findings, key=lambda one: one.level != "error")
