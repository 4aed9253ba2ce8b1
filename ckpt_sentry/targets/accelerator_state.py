"""
accelerate: `Accelerator.load_state`, by `accelerate.checkpointing.load_accelerator_state` (accelerate 1.15.0).

The models are judged by the headers of their files before anything is written, except where hooks of theirs may rename
keys: those by what `nn.Module.load_state_dict` says. `checkpointing.load` tells which files have been read, and so what
has been overwritten when a later one fails.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config, hooks, loads
from ckpt_sentry.audit.examine import Examination, examine
from ckpt_sentry.audit.findings import percent
from ckpt_sentry.audit.inventory import Inventory
from ckpt_sentry.audit.policy import Policy
from ckpt_sentry.audit.report import CheckpointSummary, Finding, ModelSummary, PhaseName
from ckpt_sentry.audit.verdict import verdict
from ckpt_sentry.checkpoints import sniff, state_file
from ckpt_sentry.checkpoints.paths import mask
from ckpt_sentry.checkpoints.step import find_step
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.guard import contained
from ckpt_sentry.render.note import note
from ckpt_sentry.targets import accelerate_facts, accelerate_text, accelerator_files
from ckpt_sentry.targets.accelerator_files import Wanted
from ckpt_sentry.targets.exceptions import INTERRUPTS, attach, describe
from ckpt_sentry.targets.watch import watching

if TYPE_CHECKING:
    from types import ModuleType

    from ckpt_sentry.hooks import Patch
    from ckpt_sentry.loads import Load
    from ckpt_sentry.targets.module_calls import Call

TARGET = "accelerator_state"
ENTRY_POINT: Final = "Accelerator.load_state"
NOTE: Final = "accelerator_state"

_PARTS: Final[tuple[PhaseName, ...]] = ("optimizer", "scheduler", "sampler", "scaler", "random_states")
"""The phases that are files, by the beginnings of their names (accelerate/checkpointing.py)."""


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

    wanted: Wanted
    is_strict: bool
    parts: list[_Part] = field(default_factory=list)
    aligned: list[Finding] = field(default_factory=list)
    filled: int = 0
    """How many models have been filled."""
    read: list[str] = field(default_factory=list)
    """The files that `checkpointing.load` was called for, in order."""


def instrument(module: ModuleType) -> None:
    """
    Patch `accelerate.checkpointing`.
    """
    hooks.patch(module, "load", _reader, target=TARGET)
    hooks.patch(module, "load_accelerator_state", watching(_begin, _before, _after, _end), target=TARGET)


@contained("accelerator_state.begin")
def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    if loads.current() is not None:
        return None
    from ckpt_sentry.targets.module_calls import OBSERVER

    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    folder = os.fspath(values["input_dir"])
    wanted = Wanted(
        folder=folder,
        models=values["models"],
        optimizers=len(values["optimizers"]),
        schedulers=len(values["schedulers"]),
        rank=values["process_index"],
        has_scaler=values["scaler"] is not None,
    )
    state = _State(wanted, bool(values.get("load_model_func_kwargs", {}).get("strict", True)))
    step = find_step(folder)
    # Nothing that could fail comes after: a load that is begun has to be ended.
    load = loads.begin("accelerate", ENTRY_POINT, mask(folder))
    if load is None:
        return None
    load.notes[NOTE] = state
    load.notes[OBSERVER] = functools.partial(_filled, load)
    load.facts = replace(
        load.facts, format="accelerate", step=step.value if step else None, step_source=step.source if step else None
    )
    return load


@contained("accelerator_state.before")
def _before(load: Load) -> Callable[[], Any] | None:
    state: _State = load.notes[NOTE]
    absent = accelerator_files.first_absent(state.wanted)
    if absent is None:
        state.parts = [_part(state, number) for number in range(len(state.wanted.models))]
    _note(load, state)
    if absent is not None:
        # What the loader would raise by itself, but when it has overwritten the models already.
        return functools.partial(sys.modules["accelerate.checkpointing"].load, absent)
    _judge(load, [part for part in state.parts if not part.may_rename], accelerate_text.refused)
    return None


@contained("accelerator_state.after")
def _after(load: Load) -> None:
    state: _State = load.notes[NOTE]
    load.enter("verify")
    _note(load, state)
    _judge(load, state.parts, accelerate_text.loaded)


@contained("accelerator_state.filled")
def _filled(load: Load, call: Call) -> None:
    """
    A model has been filled, or torch has refused to: its lists are the truth.
    """
    from ckpt_sentry.targets import module_judge

    state: _State = load.notes[NOTE]
    if call.lists is None:
        return
    for number, model in enumerate(state.wanted.models):
        if model is call.module:
            found = module_judge.judged(call.module, call.state_dict, call.lists)
            examination = replace(found.examination, findings=accelerate_facts.mending(found.examination))
            state.parts[number] = replace(state.parts[number], examination=examination, wanted=found.wanted)
            state.filled = number + 1
            if call.aligned is not None:
                state.aligned.append(call.aligned)


@contained("accelerator_state.end")
def _end(load: Load, error: BaseException | None) -> None:
    try:
        _conclude(load, error)
    finally:
        load.leave()


def _conclude(load: Load, error: BaseException | None) -> None:
    state: _State = load.notes[NOTE]
    described = None if error is None else describe(error, load.phase)
    if error is not None and described is not None:
        if not isinstance(error, (LowCoverageError, *INTERRUPTS)):
            _explain(load, state, error)
        load.failing(described)
    # A load that the agent refuses is judged by what would have come in.
    fatal = None if isinstance(error, LowCoverageError) else described
    judged = verdict(error=fatal, coverage=load.facts.coverage, findings=load.facts.findings)
    report = load.finish(judged, described)
    if isinstance(error, LowCoverageError):
        error.ckpt_sentry = report
    elif error is not None and not isinstance(error, INTERRUPTS):
        attach(error, note(report), report)


def _part(state: _State, number: int) -> _Part:
    from ckpt_sentry.targets import model_state

    path = accelerator_files.model_file(state.wanted.folder, number)
    model = state.wanted.models[number]
    wanted = model_state.inventory(model)
    saved = state_file.read(path).inventory if os.path.exists(path) else Inventory()
    wanted = model_state.without_needless(model, wanted, saved.entries)
    examination = examine(wanted, saved, allow_missing=config.settings().allow_missing)
    examination = replace(examination, findings=accelerate_facts.mending(examination))
    label = os.path.splitext(accelerator_files.numbered(accelerator_files.SAFETENSORS, number))[0]
    return _Part(label, wanted, saved, examination, model_state.has_load_hooks(model))


def _note(load: Load, state: _State) -> None:
    """
    The facts of the model that gets least; of several models the coverage of each, under its name.
    """
    load.facts = replace(load.facts, findings=_beside(state))
    if not state.parts:
        return
    worst = min(state.parts, key=lambda part: part.coverage)
    found = worst.examination
    if len(state.parts) > 1 and worst.coverage < 1:
        labelled = tuple(replace(finding, text=f"{worst.label}: {finding.text}") for finding in found.findings)
        found = replace(found, findings=labelled)
    # What is said of keys is said of one model; where all have all of theirs, of all.
    counted = state.parts if worst.coverage == 1 else [worst]
    load.facts = replace(
        load.facts.examined(found),
        model=ModelSummary(*_totals(part.wanted for part in counted)),
        checkpoint=CheckpointSummary(*_totals(part.saved for part in counted)),
    )


def _beside(state: _State) -> tuple[Finding, ...]:
    """
    What is to be said besides the keys of a model: what was aligned, the files, of several models the coverage of each.
    """
    findings = (*state.aligned, *accelerator_files.findings(state.wanted))
    if len(state.parts) > 1:
        text = "; ".join(map(_said, state.parts))
        findings += (Finding("model_coverage", "info", f"Coverage of each model: {text}."),)
    return findings


def _totals(inventories: Iterable[Inventory]) -> tuple[int, int, int]:
    each = [(one.keys, one.elements, one.nbytes) for one in inventories]
    keys, elements, size = (sum(column) for column in zip(*each, strict=True))
    return keys, elements, size


def _said(part: _Part) -> str:
    coverage = part.examination.coverage
    return f"{part.label} {percent(coverage.keys)} of keys and {percent(coverage.elements)} of elements"


def _judge(load: Load, parts: list[_Part], say: Callable[..., str]) -> None:
    """
    :raises LowCoverageError: a model gets too little; or nothing at all, where the caller has said strict=False.
    """
    from ckpt_sentry.targets.module_report import SOMETHING

    settings, state = config.settings(), load.notes[NOTE]
    for part in parts:
        if say is accelerate_text.refused and _will_align(part):
            continue
        # The strict mode wants all; an explicit strict=False something; else the settings say.
        minimum = settings.min_coverage if state.is_strict else SOMETHING
        rules = Policy(mode=settings.mode, minimum=minimum)
        if rules.refusal(part.examination.coverage) is not None:
            minimum = 1.0 if settings.mode == "strict" else settings.min_coverage
            name = ENTRY_POINT if len(state.parts) == 1 else f"{ENTRY_POINT} ({part.label})"
            facts = replace(load.facts, findings=_beside(state)).examined(part.examination)
            raise LowCoverageError(say(name, facts, part.wanted, part.examination.difference.missing, minimum))


def _will_align(part: _Part) -> bool:
    """
    Whether `CKPT_SENTRY_ALIGN=auto` mends the keys when the model is filled (see `module_calls.mended`).
    """
    settings, inference = config.settings(), part.examination.inference
    if settings.align != "auto" or inference is None or inference.ambiguous:
        return False
    return inference.rename.coverage >= settings.min_coverage


def _explain(load: Load, state: _State, error: BaseException) -> None:
    """
    Add why it failed, if a file tells, and what has been overwritten by then.
    """
    found: list[Finding] = []
    last = state.read[-1] if state.read else None
    if last is not None and not isinstance(error, FileNotFoundError):
        found += [finding for finding in sniff.findings(last) if finding.level == "error"]
    if not found and not any(finding.level == "error" for finding in load.facts.findings):
        described = describe(error, None)
        text = f"{described.type}: {described.message}" if described.message else described.type
        found.append(Finding("rank_raised", "error", text))
    done = [part.label for part in state.parts[: state.filled]]
    # The one that was read last may have been taken in part.
    names = [os.path.basename(path) for path in state.read[:-1]]
    done += [name for name in names if not name.startswith(accelerator_files.BIN[0])]
    if done:
        text = f"Overwritten before it failed: {', '.join(done)}. What comes after is as it was."
        found.append(
            Finding("partly_overwritten", "warning", text, "Load again from a whole checkpoint, or start anew.")
        )
    load.facts = load.facts.with_findings(found)


def _reader(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    read = _read

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        if patch.active:
            read(args, kwargs)
        return original(*args, **kwargs)

    return load


@contained("accelerator_state.read")
def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    load = loads.current()
    state = None if load is None else load.notes.get(NOTE)
    file = args[0] if args else kwargs.get("f")
    if load is None or state is None or not isinstance(file, str | os.PathLike):
        return
    path = os.fspath(file)
    state.read.append(path)
    name = os.path.basename(path)
    for phase in _PARTS:
        if name.startswith(phase):
            load.enter(phase)
