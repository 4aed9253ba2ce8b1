"""
What a load by accelerate is about, before it begins: its arguments, the files that it will read, the model, the map.

Headers, names and shapes only; nothing of the host's is changed.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from ckpt_sentry import config
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.examine import Examination, examine
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.policy import allowing
from ckpt_sentry.core.report import CheckpointSummary, Finding, ModelSummary
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.formats.folder import Choice, choose
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.integrations.accelerate import device_map
from ckpt_sentry.model import hints, inventories, model_state, proof
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core.findings import anew, renaming
    from ckpt_sentry.integrations.accelerate import offload
    from ckpt_sentry.session.loads import Load
else:
    anew = later("ckpt_sentry.core.findings:anew")
    renaming = later("ckpt_sentry.core.findings:renaming")
    offload = later("ckpt_sentry.integrations.accelerate.offload")

DISPATCHES: Final = "load_checkpoint_and_dispatch"


_HOOKS: Final = "load_hooks_skipped"
_SHOWN: Final = 3


@dataclass(slots=True)
class Call:
    """
    One call of a loader: its arguments by name, and what has been learnt of them. Lives as long as the load.
    """

    entry_point: str
    model: Any
    path: str
    arguments: Mapping[str, Any]
    choice: Choice | None = None
    wanted: Inventory = field(default_factory=Inventory)
    offered: Inventory = field(default_factory=Inventory)
    """The checkpoint under the names by which the loader finds it in the model."""
    origins: dict[str, str] = field(default_factory=dict)
    """Such a name to the checkpoint's own, where they differ."""
    examination: Examination | None = None
    map_facts: device_map.MapFacts | None = None
    aligned: Examination | None = None
    """What the keys were like before the rename that is applied to them, if any."""
    before: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Samples of the model before the load, where its own code may rename or change what comes in."""
    is_deferred: bool = False
    """Whether coverage is judged after the load, since load hooks may rename keys."""
    opened: list[str] = field(default_factory=list)
    """The files that the loader has come to, in order."""
    offloaded_before: frozenset[str] = frozenset()
    """Keys in the index of the offload folder before the load."""

    @property
    def device_map(self) -> Any:
        return self.arguments.get("device_map")

    @property
    def dispatches(self) -> bool:
        return self.entry_point == DISPATCHES


@lru_cache(maxsize=16)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def read_call(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """
    The call by the names of its parameters, or None where it does not fit the function: that will raise by itself.
    """
    arguments = arguments_of(original, args, kwargs)
    if arguments is None or not isinstance(arguments["checkpoint"], (str, bytes, os.PathLike)):
        return None
    return Call(original.__name__, arguments["model"], os.fsdecode(arguments["checkpoint"]), arguments)


def arguments_of(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """
    Arguments by the names of their parameters, or None where they do not fit.
    """
    try:
        return _signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        return None


def look(load: Load, call: Call) -> None:
    """
    Learn what will be loaded, and put it into the load's facts.
    """
    choice = call.choice = choose(call.path)
    step = find_step(call.path)
    load.facts = replace(
        load.facts,
        path=call.path,
        format=choice.format,
        bytes_read=choice.bytes,
        findings=choice.findings,
    ).at_step(step)
    if choice.files:
        found = choice.inventory
        load.facts = replace(
            load.facts,
            checkpoint=CheckpointSummary(found.keys, found.elements, choice.bytes, files=len(choice.files)),
        )
    if model_state.is_sharded(call.model):
        return
    full = model_state.inventory(call.model)
    call.map_facts = device_map.examine(call.device_map, call.model, full)
    if (known := offload.contents(call.arguments.get("offload_folder"))) is not None:
        call.offloaded_before = frozenset(known.index)
    load.facts = load.facts.with_findings((*device_map.findings(call.map_facts), *_settings_findings(call)))
    call.offered, call.origins = _offered(call, full, choice.inventory)
    call.wanted = _wanted(call, full)
    load.facts = replace(load.facts, model=ModelSummary(call.wanted.keys, call.wanted.elements, call.wanted.nbytes))
    if choice.loadable:
        compare(load, call)


def compare(load: Load, call: Call) -> None:
    """
    Hold the checkpoint, under the names that the loader sees, against the model. Replaces what was known before.
    """
    settings = config.settings()
    before = call.examination.findings if call.examination is not None else ()
    call.examination = found = examine(
        call.wanted,
        call.offered,
        allow_missing=settings.allow_missing,
        minimum=settings.required,
        packed=model_state.quantized(call.model),
    )
    kept = tuple(finding for finding in load.facts.findings if finding not in before)
    supplied = call.offered.entries.keys() & call.wanted.entries.keys()
    found = hints.hinted(call.model, found, supplied, call.path, _tying(call))
    causes = tuple(_causes(call, found))
    is_skipped = any(cause.code == _HOOKS for cause in causes)
    is_hinted = any(finding.code in hints.CODES for finding in found.findings)
    globs = () if is_skipped or is_hinted else allowing(found.difference.missing, call.wanted.entries)
    others = without_steps(mending(found)) if is_skipped else _exact(mending(found), globs)
    call.examination = found = replace(found, findings=(*causes, *others))
    load.facts = replace(load.facts, findings=kept).examined(found)


def mending(found: Examination) -> tuple[Finding, ...]:
    """
    The findings, with the way to rename where a loader reads the files by itself: no state dict is at hand.
    """
    if found.inference is None:
        return found.findings
    settings, rename = config.settings(), found.inference.rename
    step = "Save ckpt_sentry.unify_keys(state_dict, model).state_dict, and load that."
    if rename.coverage >= settings.min_coverage:
        step = "Set CKPT_SENTRY_ALIGN=auto."
        if settings.mode == "observe":
            step = "Set CKPT_SENTRY=1 and CKPT_SENTRY_ALIGN=auto."
    return renaming(found.findings, step)


def without_steps(findings: Iterable[Finding]) -> Iterator[Finding]:
    """
    The same findings of keys, where another one says what is to be done about them.
    """
    return (replace(finding, next=None) for finding in findings)


def _exact(findings: tuple[Finding, ...], globs: tuple[str, ...]) -> Iterator[Finding]:
    """
    The same findings with the setting that allows this very gap, said once. Where nothing is refused, `low_coverage`
    asks for nothing.
    """
    is_refused = config.settings().mode != "observe"
    is_low = is_refused and any(finding.code == "low_coverage" for finding in findings)
    setting = f"CKPT_SENTRY_ALLOW_MISSING='{','.join(globs)}'"
    if is_low or globs:
        findings = anew(findings, None if is_low else setting)
    for finding in findings:
        if finding.code == "low_coverage" and not is_refused:
            yield replace(finding, next=None)
        elif finding.code == "low_coverage" and finding.next is not None and globs:
            yield replace(finding, next=f"Mend the cause; if the gap is wanted: {setting}.")
        else:
            yield finding


def _offered(call: Call, full: Inventory, held: Inventory) -> tuple[Inventory, dict[str, str]]:
    """
    The checkpoint's keys as the loader matches them: without a map, wrappers of the model are left out of its names,
    where this accelerate does so.
    """
    ignored = model_state.ignores_unexpected(call.model)
    entries = {key: entry for key, entry in held.entries.items() if key in full.entries or not ignored(key)}
    if call.device_map is not None or not _leaves_out_wrappers():
        return Inventory(entries, held.ties), {}
    bare = model_state.bare_names(call.model, full.entries)
    origins = {bare[key]: key for key in entries if key in bare and bare[key] not in entries}
    own = {key: name for name, key in origins.items()}
    return Inventory({own.get(key, key): entry for key, entry in entries.items()}, {}), origins


def _leaves_out_wrappers() -> bool:
    """
    Whether accelerate loads by `set_model_state_dict`; 1.2 calls `model.load_state_dict`, which knows full names alone.
    """
    modeling = sys.modules.get("accelerate.utils.modeling")
    code = getattr(inspect.unwrap(getattr(modeling, "load_checkpoint_in_model", None)), "__code__", None)  # type: ignore[arg-type]
    return "set_model_state_dict" in getattr(code, "co_names", ())


def _wanted(call: Call, full: Inventory) -> Inventory:
    """
    What has to be filled: not what may be missing, and packed parameters as the checkpoint has them.
    """
    wanted = model_state.without_needless(call.model, full, call.offered.entries)
    packed = model_state.quantized(call.model)
    if not packed:
        return wanted
    entries = dict(wanted.entries)
    for name in packed & entries.keys() & call.offered.entries.keys():
        entries[name] = call.offered.entries[name]
    return Inventory(entries, wanted.ties)


def _settings_findings(call: Call) -> list[Finding]:
    found = []
    if call.device_map is None and call.arguments.get("dtype") is not None:
        dtype = str(call.arguments["dtype"]).removeprefix("torch.")
        text = f"dtype={dtype} has no effect with device_map=None: the values take the model's types."
        step = f"Pass device_map={{'': 'cpu'}}, or call model.to(torch.{dtype}) first."
        found.append(Finding("dtype_ignored", "warning", text, step))
    folder = call.arguments.get("offload_folder")
    is_on_disk = isinstance(call.device_map, Mapping) and device_map.DISK in call.device_map.values()
    if is_on_disk and folder is not None and (unwritable := device_map.folder_finding(folder)) is not None:
        found.append(unwritable)
    return found


def may_rename(call: Call) -> bool:
    """
    Whether load hooks of the model see what is loaded: without a map it goes through `nn.Module.load_state_dict`.
    """
    return call.device_map is None and model_state.has_load_hooks(call.model)


def remember(call: Call) -> None:
    """
    Take samples of the model as it is now.
    """
    call.is_deferred = True
    call.before = proof.samples(proof.Holder(call.model), call.wanted.entries)


def known_changes(call: Call) -> Collection[str]:
    """
    What the hooks of this very model brought in, renamed or changed, when they were given the same keys before.

    They do so again; that the values are what they were already is no sign of the contrary.
    """
    try:
        return _changes.get(call.model, {}).get(frozenset(call.offered.entries), ())
    except TypeError:  # a class that compares its modules by content cannot be looked up
        return ()


def remember_changes(call: Call, keys: Collection[str], names: Iterable[str]) -> None:
    """
    Note what the hooks of the model have made of these keys.
    """
    try:
        _changes.setdefault(call.model, {})[frozenset(keys)] = frozenset(names)
    except TypeError:
        return


_changes: WeakKeyDictionary[Any, dict[frozenset[str], frozenset[str]]] = WeakKeyDictionary()


def add_supplied(call: Call, names: Mapping[str, str | None]) -> None:
    """
    Count further names of the model as supplied, each by a key of the checkpoint where that is known.
    """
    gone = {key for key in names.values() if key is not None}
    entries: dict[str, Entry] = {key: entry for key, entry in call.offered.entries.items() if key not in gone}
    for name, key in names.items():
        entries[name] = call.wanted.entries[name]
        if key is not None:
            call.origins[name] = key
    call.offered = Inventory(entries, {})


def _causes(call: Call, found: Examination) -> Iterator[Finding]:
    """
    Say which parts of the model would rename keys, but are not asked.
    """
    if found.inference is None and not hints.CODES & {one.code for one in found.findings}:
        yield from _skipped_hooks(call, found)


def _tying(call: Call) -> str:
    """
    How a model whose configuration ties weights is loaded. With a map, a tie of tensors that have values is lost on the
    way (modeling.py:622); without one, nothing leaves the meta device.
    """
    is_meta, step = inventories.is_partly_meta(call.model), "Call model.tie_weights() before the load"
    if call.device_map is None and is_meta:
        return f"{step}, and pass device_map={{'': 'cpu'}}."
    if call.device_map is not None and not is_meta:
        return f"{step}, and pass device_map=None."
    return f"{step}."


def _skipped_hooks(call: Call, found: Examination) -> Iterator[Finding]:
    """
    Load pre-hooks, and `_load_from_state_dict` of a class, rename keys in `nn.Module.load_state_dict` alone: with a map
    the loader sets each tensor by itself (accelerate/utils/modeling.py:1991).
    """
    if call.device_map is None or not found.difference.missing or not found.difference.unexpected:
        return
    missing, unexpected = found.difference.missing, found.difference.unexpected
    names = [
        path
        for path, module in inventories.parts_of(call.model)
        if model_state.has_own_names(module)
        and all(any(key.startswith(f"{path}.") or not path for key in keys) for keys in (missing, unexpected))
    ]
    if not names:
        return
    listed = ", ".join(shown(name) or "the model itself" for name in names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    )
    text = f"Load pre-hooks that may rename these keys ({listed}) are not called by accelerate with a device_map."
    step = "Pass device_map=None: then they are called."
    yield Finding(_HOOKS, "warning", text, None if inventories.is_partly_meta(call.model) else step)
