"""
What is said of a call that fills a module, and how often: good loads of one kind are said once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config
from ckpt_sentry.core.inventory import Inventory
from ckpt_sentry.core.report import Facts, LoadReport
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.integrations.torch_module import judge as module_judge
from ckpt_sentry.integrations.torch_module import parts as module_parts
from ckpt_sentry.model import inventories, model_state, provenance
from ckpt_sentry.patching.later import later
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import Asked, end, raised, refusal
from ckpt_sentry.session.exceptions import INTERRUPTS, attach, describe

if TYPE_CHECKING:
    from ckpt_sentry.integrations.torch_module import own as module_own
    from ckpt_sentry.integrations.torch_module.call import Call
    from ckpt_sentry.integrations.torch_module.judge import Lists
    from ckpt_sentry.render.note import note
else:
    note = later("ckpt_sentry.render.note:note")
    module_own = later("ckpt_sentry.integrations.torch_module.own")

MOST_KINDS: Final = 64
"""Kinds of good loads that are recorded in one process, and as many of others."""


class _Kinds:
    """
    The kinds of loads that have been recorded in this process. A set only grows: threads need no lock.
    """

    def __init__(self) -> None:
        self.good: set[tuple[Any, ...]] = set()
        self.other: set[tuple[Any, ...]] = set()
        self.failed: dict[tuple[Any, ...], LoadReport] = {}
        self.shards = module_parts.Shards()

    @staticmethod
    def is_new(kinds: set[tuple[Any, ...]], kind: tuple[Any, ...]) -> bool:
        if kind in kinds or len(kinds) >= MOST_KINDS:
            return False
        kinds.add(kind)
        return True


_kinds = _Kinds()


def record(call: Call, lists: Lists, error: BaseException | None) -> None:
    """
    Record how a call ended, where that is news.

    :raises LowCoverageError: the settings refuse it.
    """
    if error is not None:
        _refused(call, lists, error)
    elif lists.missing or lists.unexpected:
        _partial(call, lists)
    else:
        _whole(call)


def record_raised(call: Call, error: BaseException) -> None:
    """
    Record a call that has raised for something that is not keys, as load hooks do.
    """
    if isinstance(error, INTERRUPTS):
        return
    facts = module_judge.located(call.state_dict, call.offer).with_findings([raised(describe(error, None))])
    _failed(call, facts, (), error)


def record_singles(series: module_parts.Singles) -> None:
    """
    Record how calls ended that each passed one parameter. Where they were made nothing can be refused any more.
    """
    wanted = Inventory({found.name: found.entry for found in series.wanted.values()})
    came = {series.wanted[place].name: series.wanted[place].entry for place in series.came}
    came.update(series.unexpected)
    _record_sum(series.subject, wanted, Inventory(came), series.path, "one by one")


def record_shards(waiting: module_parts.Waiting) -> None:
    """
    Record how shards ended of which no more will come.
    """
    _record_sum(waiting.subject, waiting.wanted, waiting.came, waiting.path, "in parts")


def _record_sum(subject: module_parts.Subject, wanted: Inventory, came: Inventory, path: str | None, how: str) -> None:
    facts, found = module_judge.counted(wanted, came, path)
    keys = found.difference.missing
    kinds, kind = (_kinds.other, keys) if keys else (_kinds.good, tuple(wanted.entries))
    if _kinds.is_new(kinds, (subject.module_class, how, hash(kind))):
        _record_load(subject, facts, keys, None)


def forget() -> None:
    """
    Forget which kinds of loads were recorded.
    """
    _kinds.good.clear()
    _kinds.other.clear()
    _kinds.failed.clear()
    _kinds.shards.forget()


def _whole(call: Call) -> None:
    _kinds.shards.take_back(call.module)
    empty, left = module_judge.on_meta(call.module)
    is_own = call.own == len(call.state_dict) > 0
    kind = (call.module_class, hash(tuple(call.state_dict)), hash((empty, left)), call.aligned is not None, is_own)
    is_new = _kinds.is_new(_kinds.good, kind)
    if not is_new and not (empty and config.settings().mode == "strict"):
        return
    facts = module_judge.whole(call.module, call.state_dict, call.offer)
    error = None
    if call.own:
        facts = module_own.judged(facts, call.module, call.own, len(call.state_dict))
    if empty:
        facts = module_judge.unfilled(facts, call.module, (), empty, call.meta_words)
        # torch itself says that it does nothing: a warning does, but for "strict".
        error = refusal(call.entry.name, facts, inventories.model_inventory(call.module), (), asked="part")
    if left and len(call.state_dict) > len(empty):
        facts = facts.with_findings([module_judge.unmade(left)])
    _conclude(call, facts, call.state_dict, error, is_new=is_new)


def _partial(call: Call, lists: Lists) -> None:
    is_part = not call.is_strict and not lists.unexpected
    settings = config.settings()
    kind: tuple[Any, ...] = _kind(call, lists)
    if is_part:
        came = call.state_dict.keys() if call.offer is None else call.offer.entries.keys()
        lacking = _kinds.shards.lacking_after(call.module, came, lists.missing)
        if lacking != set(lists.missing) and settings.mode != "strict":
            _one_more(call, lacking)
            return
        _interrupt(call)
        if settings.mode != "strict" and _is_first_of_many(call, came, lacking):
            return
        kind = (call.module_class, hash(lacking), bool(came))
    is_new = _kinds.is_new(_kinds.other, kind)
    if not is_new and settings.mode != "strict" and not call.is_strict:
        return
    found = module_judge.judged(call.module, call.state_dict, lists, call.remedy, call.offer)
    facts = found.facts
    if is_part and found.examination.coverage.keys > 0:
        facts = module_judge.softened(facts)
    asked: Asked = "part" if not call.is_strict or model_state.is_sharded(call.module) else "something"
    empty, left = module_judge.on_meta(call.module)
    if left and len(found.wanted.entries) > len(empty):
        facts = facts.with_findings([module_judge.unmade(left)])
    if empty:
        facts = module_judge.unfilled(facts, call.module, set(found.lists.missing), empty, call.meta_words)
        asked = "part"
    error = refusal(call.entry.name, facts, found.wanted, found.examination.difference.missing, asked=asked)
    _conclude(call, facts, () if is_part else _sorted(lists), error, is_new=is_new)


def _one_more(call: Call, lacking: frozenset[str]) -> None:
    """
    Go on with shards whose first was told, or will be if not all of them come.
    """
    waiting = _kinds.shards.waiting_for(call.module)
    if waiting is not None:
        waiting.lacking = lacking
        if (path := provenance.origin(call.state_dict)) is not None:
            waiting.files.add(path)
    if not lacking:
        _kinds.shards.take_back(call.module)
        _assembled(call)
    elif waiting is not None and len(waiting.files) >= waiting.of:
        _interrupt(call)


def _is_first_of_many(call: Call, came: Collection[str], lacking: frozenset[str]) -> bool:
    """
    Whether the file says itself that there are more: nothing is said before they have come.
    """
    path = None if call.offer is not None else provenance.origin(call.state_dict)
    count = module_parts.shards_of(path)
    if path is None or count <= 1 or not came or len(lacking) >= len(model_state.inventory(call.module).entries):
        return False
    subject, wanted = module_parts.Subject.of(call), model_state.inventory(call.module)
    waiting = module_parts.Waiting(subject, wanted, lacking, {path}, count)
    return _kinds.shards.wait(call.module, waiting, record_shards)


def _interrupt(call: Call) -> None:
    """
    Say what is to be said of shards that something else follows, or of which the last has come.
    """
    if (waiting := _kinds.shards.take_back(call.module)) is not None:
        record_shards(waiting)


def _assembled(call: Call) -> None:
    """
    Record that the last one of some parts has come.
    """
    if _kinds.is_new(_kinds.good, (call.module_class, "in parts")):
        wanted = model_state.inventory(call.module)
        facts, _ = module_judge.counted(wanted, wanted, provenance.origin(call.state_dict))
        _record_load(module_parts.Subject.of(call), facts, wanted.entries, None)


def _conclude(call: Call, facts: Facts, keys: Iterable[Any], error: LowCoverageError | None, *, is_new: bool) -> None:
    """
    Record what is new or refused, and raise the refusal.
    """
    if is_new or error is not None:
        _record_load(module_parts.Subject.of(call), facts, keys, error)
        if error is not None:
            raise error


def _refused(call: Call, lists: Lists, error: BaseException) -> None:
    found = module_judge.judged(call.module, call.state_dict, lists, call.remedy, call.offer)
    # Where FSDP holds flat parameters torch takes one of them for the value that is missing, and its shape never fits.
    loosely = None if model_state.is_sharded(call.module) else call.entry.loosely
    _failed(call, module_judge.decisive(found, loosely), _sorted(lists), error)


def _failed(call: Call, facts: Facts, keys: Iterable[Any], error: BaseException) -> None:
    """
    Attach the report of a failed call to its exception; one of its kind is recorded.
    """
    kind = (call.module_class, facts)
    report = _kinds.failed.get(kind)
    if report is None and len(_kinds.failed) < MOST_KINDS:
        report = _record_load(module_parts.Subject.of(call), facts, keys, error)
    if report is not None:
        _kinds.failed[kind] = report
        # Only the first of a kind has got it from the end of its load.
        attach(error, note(report), report)


def _kind(call: Call, lists: Lists) -> tuple[Any, ...]:
    return call.module_class, hash(_sorted(lists))


def _sorted(lists: Lists) -> tuple[str, ...]:
    return (*sorted(lists.missing), "", *sorted(lists.unexpected))


def _record_load(
    subject: module_parts.Subject, facts: Facts, keys: Iterable[Any], error: BaseException | None
) -> LoadReport | None:
    """
    Make a load of a call, now that it is over, and hand on its report.
    """
    digest = _digest(keys)
    seconds = time.perf_counter() - subject.began
    kind = f"{subject.entry_point}:{subject.module_class}:{digest}"
    load = loads.begin(
        "torch", subject.entry_point, facts.path, kind=kind, members=subject.members, seconds_ago=seconds
    )
    if load is None:
        return None
    if subject.aligned is not None:
        facts = replace(facts, findings=(subject.aligned, *facts.findings))
    if facts.model is not None:
        facts = replace(facts, model=replace(facts.model, name=subject.model))
    load.facts = replace(facts, key_digest=digest)
    return end(load, error)


def _digest(keys: Iterable[Any]) -> str:
    text = "\0".join(map(str, keys))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
