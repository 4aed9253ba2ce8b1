"""
accelerate: `Accelerator.load_state` as a whole (accelerate 1.15.0).

What is patched, and why there:

* `accelerator.Accelerator.load_state` (accelerator.py:3791): the load, from the choice of the folder to the last
  registered object. While hooks of the program, FSDP, DeepSpeed and registered objects load, it stands aside: those
  are loads of their own.
* `checkpointing.load_accelerator_state` (checkpointing.py:180): what is to be filled. The models are judged by the
  headers of their files before anything is written, except where hooks of theirs may rename keys: those by what
  `nn.Module.load_state_dict` says.
* `checkpointing.load`: which files have been read, and so what has been overwritten when a later one fails.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config
from ckpt_sentry.core.report import CheckpointSummary, Coverage, Finding, LoadError, ModelSummary, PhaseName
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import Asked, end, look, raised, refusal

if TYPE_CHECKING:
    from types import ModuleType

    from ckpt_sentry.core.examine import Examination, examine
    from ckpt_sentry.core.findings import anew, percent
    from ckpt_sentry.core.inventory import Inventory
    from ckpt_sentry.formats import sniff, state_file
    from ckpt_sentry.formats.step import find_step
    from ckpt_sentry.integrations.accelerate import (
        facts as accelerate_facts,
    )
    from ckpt_sentry.integrations.accelerate import (
        state_files,
    )
    from ckpt_sentry.integrations.accelerate.state_files import Wanted
    from ckpt_sentry.integrations.torch_module.call import Call
    from ckpt_sentry.masking import mask
    from ckpt_sentry.patching.ledger import Patch
    from ckpt_sentry.session.loads import Load
else:
    Examination = later("ckpt_sentry.core.examine:Examination")
    examine = later("ckpt_sentry.core.examine:examine")
    anew = later("ckpt_sentry.core.findings:anew")
    percent = later("ckpt_sentry.core.findings:percent")
    sniff = later("ckpt_sentry.formats.sniff")
    state_file = later("ckpt_sentry.formats.state_file")
    accelerate_facts = later("ckpt_sentry.integrations.accelerate.facts")
    Wanted = later("ckpt_sentry.integrations.accelerate.state_files:Wanted")
    state_files = later("ckpt_sentry.integrations.accelerate.state_files")
    find_step = later("ckpt_sentry.formats.step:find_step")
    Inventory = later("ckpt_sentry.core.inventory:Inventory")
    mask = later("ckpt_sentry.masking:mask")

TARGET = "accelerator_state"
ENTRY_POINT: Final = "Accelerator.load_state"

_PHASES: Final[Mapping[str, PhaseName]] = {
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "sampler": "sampler",
    "dl_state_dict": "loader",
    "scaler": "scaler",
    "random_states": "random_states",
    "custom_checkpoint": "custom",
}
"""The phases that are files, by the beginnings of their names (accelerate/checkpointing.py)."""
_OWN_WAYS: Final = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM"})
"""Kinds of distribution for which `load_state` loads models and optimizers by other functions."""
_NOTHING: Final = Coverage(0.0, 0.0)
_TYING: Final = "Call model.tie_weights() before accelerator.prepare."
_LOOSELY: Final = "load_state(…, strict=False)"


@dataclass(slots=True)
class _Part:
    """
    One model: its name (that of its file), what it wants filled, and what was found in the file or by the load.
    """

    label: str
    wanted: Inventory
    saved: Inventory
    examination: Examination
    may_rename: bool

    @property
    def coverage(self) -> float:
        return self.examination.coverage.judged


@dataclass(slots=True)
class _State:
    """
    What is known of one call.
    """

    accelerator: Any
    folder: str | None
    """The folder that the caller names, or in which accelerate looks for the newest."""
    wanted: Wanted | None = None
    is_strict: bool = True
    parts: dict[int, _Part] = field(default_factory=dict)
    """The models whose files can be read, by number."""
    broken: dict[int, tuple[Finding, ...]] = field(default_factory=dict)
    """Why the files of the others cannot."""
    aligned: list[Finding] = field(default_factory=list)
    filled: set[int] = field(default_factory=set)
    """The numbers of the models that have been filled, or a part of them."""
    read: list[str] = field(default_factory=list)
    """The files that `checkpointing.load` was called for, in order."""
    generators: Collection[str] = ()
    """The keys of the file with the states of the random number generators, once it was read."""

    @property
    def is_whole(self) -> bool:
        """
        Whether all models have all of theirs.
        """
        count = 0 if self.wanted is None else len(self.wanted.models)
        return bool(count) and len(self.filled) == count and all(part.coverage >= 1 for part in self.parts.values())


def instrument(module: ModuleType) -> None:
    """
    Patch `accelerate.checkpointing`.
    """
    ledger.patch(module, "load", _reader, target=TARGET)
    ledger.patch(module, "load_accelerator_state", _filler, target=TARGET)


def instrument_accelerator(module: ModuleType) -> None:
    """
    Patch `accelerate.accelerator`.
    """
    ledger.patch(module.Accelerator, "load_state", judging(_begin, _before, _after, _end), target=TARGET)


@contained("accelerator_state.begin")
def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    if loads.current() is not None:
        return None
    given = accelerate_facts.arguments_of(original, args, kwargs)
    if given is None:
        return None
    accelerator, named = given["self"], given.get("input_dir")
    state = _State(accelerator, _place(accelerator, named))

    def observe(load: Load) -> None:
        load.keep(state)
        load.facts = replace(load.facts, format="accelerate")
        load.is_aside = True

    path = None if named is None else state.folder
    return loads.begin("accelerate", ENTRY_POINT, path, observe=observe)


def _place(accelerator: Any, named: object) -> str | None:
    """
    Where the call looks for a checkpoint (accelerator.py:3825); None where it will raise for want of a place.
    """
    if named is None:
        if not accelerator.project_configuration.automatic_checkpoint_naming or accelerator.project_dir is None:
            return None
        return os.path.join(accelerator.project_dir, "checkpoints")
    return os.path.expanduser(os.fsdecode(named)) if isinstance(named, str | bytes | os.PathLike) else None


@contained("accelerator_state.before")
def _before(_load: Load) -> None:
    """
    Nothing is known yet: the folder may have to be chosen, and hooks may change what is to be filled.
    """


def _filler(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    enter, passed, leave = _enter, _passed, _leave

    @functools.wraps(original)
    def load_accelerator_state(*args: Any, **kwargs: Any) -> Any:
        load = loads.aside() if patch.active else None
        if load is None:
            return original(*args, **kwargs)
        try:
            enter(load, original, args, kwargs)
            result = original(*args, **kwargs)
            passed(load)
        finally:
            leave(load)
        return result

    return load_accelerator_state


@contained("accelerator_state.enter")
def _enter(load: Load, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """
    See what is to be filled, and from what.

    :raises LowCoverageError: by the headers of the files a model would get too little.
    """
    state = load.state(_State)
    if state is None:
        return
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    state.wanted = _wanted(state.accelerator, given.arguments)
    state.is_strict = bool(given.arguments.get("load_model_func_kwargs", {}).get("strict", True))
    step = find_step(state.wanted.folder)
    load.facts = replace(
        load.facts,
        path=state.wanted.folder,
    ).at_step(step)
    load.on_filled = functools.partial(_filled, load)
    load.is_aside = False
    for number, model in enumerate(state.wanted.models):
        _look(state, number, model)
    _note(load, state)
    sure = [part for part in state.parts.values() if not part.may_rename and not _will_align(part)]
    _judge(load, state, sure, is_before=True)


def _wanted(accelerator: Any, values: Mapping[str, Any]) -> Wanted:
    return Wanted(
        folder=os.fsdecode(values["input_dir"]),
        models=values["models"],
        prepared=len(accelerator._models),
        optimizers=len(values["optimizers"]),
        schedulers=len(values["schedulers"]),
        loaders=tuple(bool(getattr(one, "use_stateful_dataloader", False)) for one in values["dataloaders"]),
        custom=len(accelerator._custom_objects),
        rank=values["process_index"],
        has_scaler=accelerator.scaler is not None,
        is_plain=accelerator.distributed_type.value not in _OWN_WAYS,
    )


@contained("accelerator_state.passed")
def _passed(load: Load) -> None:
    """
    Registered objects come next, if there are any.
    """
    state = load.state(_State)
    if state is not None and state.wanted is not None and state.wanted.custom:
        load.enter("custom")


@contained("accelerator_state.leave")
def _leave(load: Load) -> None:
    load.is_aside = True


@contained("accelerator_state.after")
def _after(load: Load, _result: Any) -> None:
    look(load, _judge_all)


def _judge_all(load: Load) -> None:
    state = load.state(_State)
    if state is None or state.wanted is None:
        return
    load.enter("verify")
    # What was read is no file that cannot be read, whatever was made of it here.
    state.broken = {number: found for number, found in state.broken.items() if number not in state.filled}
    _note(load, state)
    _judge(load, state, state.parts.values())
    if (
        state.wanted.is_nothing
        and (error := refusal(ENTRY_POINT, load.facts, Inventory(), (), asked="part")) is not None
    ):
        raise error


@contained("accelerator_state.filled")
def _filled(load: Load, call: Call) -> None:
    """
    A model has been filled, or torch has refused to: its lists are the truth.
    """
    from ckpt_sentry.integrations.torch_module import judge as module_judge
    from ckpt_sentry.model import inventories, model_state

    state = load.state(_State)
    if state is None or call.lists is None or state.wanted is None:
        return
    for number, model in enumerate(state.wanted.models):
        if model is not call.module:
            continue
        found = module_judge.judged(call.module, call.state_dict, call.lists)
        examination = _advised(state, model, found.examination, ())
        known = state.parts.get(number)
        state.parts[number] = _Part(
            label=_label(number),
            wanted=found.wanted,
            saved=known.saved if known else inventories.state_inventory(call.state_dict),
            examination=examination,
            may_rename=known.may_rename if known else model_state.has_load_hooks(model),
        )
        state.filled.add(number)
        if call.aligned is not None:
            state.aligned.append(call.aligned)


@contained("accelerator_state.end")
def _end(load: Load, error: BaseException | None) -> None:
    end(load, error, functools.partial(_explain, load))


def _label(number: int) -> str:
    return os.path.splitext(state_files.numbered(state_files.SAFETENSORS, number))[0]


def _look(state: _State, number: int, model: Any) -> None:
    """
    Hold a model against the header of its file. Of what cannot be read, the loader itself will say so.
    """
    from ckpt_sentry.model import model_state

    path = state_files.model_file(state.wanted.folder, number) if state.wanted else ""
    if not os.path.exists(path):
        return
    file = state_file.read(path)
    if not file.readable:
        state.broken[number] = file.findings
        return
    wanted = model_state.inventory(model)
    wanted = model_state.without_needless(model, wanted, file.inventory.entries)
    examination = examine(wanted, file.inventory, allow_missing=config.settings().allow_missing)
    supplied = file.inventory.entries.keys() & wanted.entries.keys()
    examination = _advised(state, model, examination, supplied)
    state.parts[number] = _Part(_label(number), wanted, file.inventory, examination, model_state.has_load_hooks(model))


def _advised(state: _State, model: Any, found: Examination, supplied: Collection[str]) -> Examination:
    """
    An examination with the steps that help `load_state`: what is allowed to be missing, torch still refuses in a strict
    load. None where as much is unexpected as is missing: there something is named otherwise.
    """
    from ckpt_sentry.model import hints

    if not hints.CODES & {finding.code for finding in found.findings}:
        found = hints.hinted(model, found, supplied, None, _TYING)
    findings, settings = accelerate_facts.mending(found), config.settings()
    if state.is_strict:
        way = None if settings.mode == "strict" or found.unexpected.count >= found.missing.count else _LOOSELY
        findings = anew(findings, way)
    return replace(found, findings=findings)


def _note(load: Load, state: _State) -> None:
    """
    The facts of the model that gets least; of several models the coverage of each, under its name.
    """
    load.facts = replace(load.facts, findings=_beside(state))
    if state.wanted is not None and any(one.code == "nothing_prepared" for one in load.facts.findings):
        load.facts = replace(load.facts, coverage=_NOTHING)
    if not state.parts:
        return
    parts = list(state.parts.values())
    worst = min(parts, key=lambda part: part.coverage)
    found = worst.examination
    if len(parts) > 1 and worst.coverage < 1:
        labelled = tuple(replace(finding, text=f"{worst.label}: {finding.text}") for finding in found.findings)
        found = replace(found, findings=labelled)
    # What is said of keys is said of one model; where all have all of theirs, of all.
    counted = parts if worst.coverage == 1 else [worst]
    load.facts = replace(
        load.facts.examined(found),
        model=ModelSummary(*_totals(part.wanted for part in counted)),
        checkpoint=CheckpointSummary(*_totals(part.saved for part in counted)),
    )


def _beside(state: _State) -> tuple[Finding, ...]:
    """
    What is to be said besides the keys of a model: what was aligned, the files, of several models the coverage of each.
    """
    files = () if state.wanted is None else tuple(state_files.findings(state.wanted, state.generators))
    broken = (finding for found in state.broken.values() for finding in found)
    findings = (*broken, *state.aligned, *files)
    if len(state.parts) > 1:
        text = "; ".join(map(_said, state.parts.values()))
        findings += (Finding("model_coverage", "info", f"Coverage of each model: {text}."),)
    return findings


def _totals(inventories: Iterable[Inventory]) -> tuple[int, int, int]:
    each = [(one.keys, one.elements, one.nbytes) for one in inventories]
    keys, elements, size = (sum(column) for column in zip(*each, strict=True))
    return keys, elements, size


def _said(part: _Part) -> str:
    coverage = part.examination.coverage
    return f"{part.label} {percent(coverage.keys)} of keys and {percent(coverage.elements)} of elements"


def _judge(load: Load, state: _State, parts: Iterable[_Part], *, is_before: bool = False) -> None:
    """
    :raises LowCoverageError: a model gets too little; or nothing at all, where the caller has said strict=False.
    """
    for part in parts:
        name = ENTRY_POINT if len(state.parts) == 1 else f"{ENTRY_POINT} ({part.label})"
        facts = replace(load.facts, findings=_beside(state)).examined(part.examination)
        asked: Asked = "whole" if state.is_strict else "something"
        error = refusal(name, facts, part.wanted, (), asked=asked, is_before=is_before)
        if error is not None:
            raise error


def _will_align(part: _Part) -> bool:
    """
    Whether `CKPT_SENTRY_ALIGN=auto` mends the keys when the model is filled (see `module_calls.mended`).
    """
    settings, inference = config.settings(), part.examination.inference
    if settings.align != "auto" or inference is None or inference.ambiguous:
        return False
    return inference.rename.coverage >= settings.min_coverage


def _explain(load: Load, error: BaseException, described: LoadError) -> list[Finding]:
    """
    Say why it failed, if a file tells, and what has been overwritten by then.
    """
    state = load.state(_State)
    if state is None:
        return []
    found: list[Finding] = []
    last = state.read[-1] if state.read else None
    if state.wanted is None:
        load.facts = replace(load.facts, path=load.facts.path or state.folder)
        found += _about_place(state, error)
    elif last is not None and not isinstance(error, FileNotFoundError):
        found += [finding for finding in sniff.findings(last) if finding.level == "error"]
    if not found and not any(finding.level == "error" for finding in load.facts.findings):
        found.append(raised(described))
    is_told = any(finding.next for finding in (*load.facts.findings, *found) if finding.level == "error")
    done = (replace(finding, next=None) if is_told else finding for finding in _overwritten(state))
    return [*found, *done]


def _about_place(state: _State, error: BaseException) -> Iterable[Finding]:
    """
    Why no checkpoint was found at all.
    """
    if state.folder is None or isinstance(error, LowCoverageError):
        return []
    if not os.path.isdir(state.folder):
        return sniff.findings(state.folder) or [Finding("path_is_file", "error", f"{state.folder} is a file")]
    if isinstance(error, IndexError) and not os.listdir(state.folder):
        text = f"{state.folder} is an empty folder: nothing was saved there yet"
        return [Finding("no_checkpoint_files", "error", text, "Call save_state first, or start anew.")]
    return []


def _overwritten(state: _State) -> Iterator[Finding]:
    """
    What was overwritten when the load failed, and whether the models are whole.
    """
    done = [part.label for number, part in state.parts.items() if number in state.filled]
    # The one that was read last may have been taken in part.
    done += [os.path.basename(path) for path in state.read[:-1] if state_files.is_training_state(path)]
    if done:
        text = f"Overwritten before it failed: {', '.join(done)}. What comes after is as it was."
        step = "Load again from a whole checkpoint, or start anew."
        yield Finding("partly_overwritten", "warning", text, step)
    if state.is_whole:
        yield Finding("model_whole", "info", "The model is whole: only training state is lacking.")


def _reader(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    read, came = _read, _came

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        state = read(args, kwargs) if patch.active else None
        result = original(*args, **kwargs)
        if state is not None:
            came(state, result)
        return result

    return load


@contained("accelerator_state.read")
def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _State | None:
    load = loads.current() or loads.aside()
    state = None if load is None else load.state(_State)
    file = args[0] if args else kwargs.get("f")
    if load is None or state is None or not isinstance(file, str | os.PathLike):
        return None
    path = os.fspath(file)
    state.read.append(path)
    name = os.path.basename(path)
    phase = next((phase for start, phase in _PHASES.items() if name.startswith(start)), None)
    if phase is not None:
        load.enter(phase)
    return state


@contained("accelerator_state.came")
def _came(state: _State, result: Any) -> None:
    if isinstance(result, dict) and os.path.basename(state.read[-1]).startswith(state_files.RNG):
        state.generators = tuple(map(str, result)) or ("",)
