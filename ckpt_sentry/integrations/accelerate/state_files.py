"""
The files that `Accelerator.load_state` reads from a folder, and which of them are missing or too many.

The names are those of accelerate/utils/constants.py: the first of a kind has no number, in files of RNG states it is
the rank's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.findings import counted, verb
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.formats import sniff
from ckpt_sentry.patching.guard import let_through

SAFETENSORS: Final = ("model", ".safetensors")
BIN: Final = ("pytorch_model", ".bin")
OPTIMIZER: Final = ("optimizer", ".bin")
SCHEDULER: Final = ("scheduler", ".bin")
LOADER: Final = ("dl_state_dict", ".bin")
SCALER: Final = "scaler.pt"
RNG: Final = "random_states_"
RNG_KEYS: Final = ("random_state", "numpy_random_seed", "torch_manual_seed")
"""What every file of RNG states holds; the first that is not there ends the restoring, in silence."""

_CUSTOM: Final = re.compile(r"custom_checkpoint_[0-9]+\.pkl")
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    What a call of `load_state` is to fill.

    `models` are those that `load_accelerator_state` is given, of `prepared`: hooks before it may take some over, and
    FSDP, DeepSpeed and Megatron-LM load models and optimizers in a way of their own (then `is_plain` is False).
    `loaders` says of each dataloader whether it keeps a state.
    """

    folder: str
    models: Sequence[Any]
    prepared: int
    optimizers: int
    schedulers: int
    loaders: tuple[bool, ...]
    custom: int
    rank: int
    has_scaler: bool
    is_plain: bool

    @property
    def is_nothing(self) -> bool:
        """
        Whether nothing was prepared or registered that could be filled.
        """
        count = self.prepared + self.optimizers + self.schedulers + len(self.loaders) + self.custom
        return not count and not self.has_scaler


def numbered(kind: tuple[str, str], number: int) -> str:
    """
    The name of the file of a kind: "optimizer.bin", "optimizer_1.bin", …
    """
    stem, extension = kind
    return f"{stem}{extension}" if number == 0 else f"{stem}_{number}{extension}"


def model_file(folder: str, number: int) -> str:
    """
    The file that a model is read from: safetensors where there is one (checkpointing.py:230).
    """
    path = os.path.join(folder, numbered(SAFETENSORS, number))
    return path if os.path.exists(path) else os.path.join(folder, numbered(BIN, number))


def is_training_state(path: str) -> bool:
    """
    Whether a file is none of a model's.
    """
    name = os.path.basename(path)
    return not name.startswith((SAFETENSORS[0], BIN[0]))


def findings(wanted: Wanted, came: Collection[str] = ()) -> Iterator[Finding]:
    """
    Say what is missing from the folder, and what lies there that nobody asks for.

    Args:
        came: the keys of the RNG states, where their file has been read.
    """
    try:
        names = frozenset(os.listdir(wanted.folder))
    except OSError as failure:
        let_through(failure)
        yield Finding("path_missing", "error", f"{shown(wanted.folder)} is no folder that can be read")
        return
    if wanted.is_nothing:
        yield from _nothing(wanted, names)
        return
    if wanted.is_plain:
        yield from _models(wanted, names)
        yield from _kind("optimizer", OPTIMIZER, wanted.optimizers, names)
    yield from _kind("scheduler", SCHEDULER, wanted.schedulers, names)
    yield from _loaders(wanted, names)
    yield from _scaler(wanted, names)
    yield from _custom(wanted, names)
    yield from _rng(wanted, names, came)


def _nothing(wanted: Wanted, names: frozenset[str]) -> Iterator[Finding]:
    """
    Say that whatever lies in the folder goes nowhere: only generators of random numbers are always there.
    """
    kinds = (SAFETENSORS, BIN, OPTIMIZER, SCHEDULER, LOADER)
    there = [name for name in sorted(names) if any(_number(kind, name) is not None for kind in kinds)]
    there += sorted(name for name in names if _CUSTOM.fullmatch(name))
    if there:
        more = f" and {len(there) - _SHOWN:,} more" if len(there) > _SHOWN else ""
        text = f"Nothing was prepared: {', '.join(map(shown, there[:_SHOWN]))}{more} of {shown(wanted.folder)} "
        text += f"{verb(len(there), 'stays', 'stay')} unread."
        step = "Call accelerator.prepare(model, optimizer, …) before load_state, on the same accelerator."
        yield Finding("nothing_prepared", "error", text, step)


def _models(wanted: Wanted, names: frozenset[str]) -> Iterator[Finding]:
    count = len(wanted.models)
    if count < wanted.prepared:
        text = f"Hooks of load_state load {wanted.prepared - count:,} of {counted(wanted.prepared, 'model')} by "
        text += "themselves: what came into them could not be compared."
        yield Finding("not_compared", "info", text)
        return
    numbers = _numbers(SAFETENSORS, names) | _numbers(BIN, names)
    saved = len(numbers)
    for number in range(count):
        if number not in numbers:
            text = f"The folder has no {numbered(SAFETENSORS, number)}: models prepared {count}, saved {saved}."
            yield Finding("model_missing", "error", text, "Prepare the models that were saved, in the same order.")
    if numbers - set(range(count)):
        text = f"The folder holds more models than are prepared, and the rest stays unread: {count} of {saved}."
        yield Finding("model_extra", "warning", text, "Prepare the models that were saved, in the same order.")


def _kind(what: str, kind: tuple[str, str], count: int, names: frozenset[str]) -> Iterator[Finding]:
    saved = _numbers(kind, names)
    step = f"Prepare the {what}s that were saved, in the same order."
    if absent := [numbered(kind, number) for number in range(count) if number not in saved]:
        text = f"The folder has no {absent[0]}: {what}s prepared {count}, saved {len(saved)}."
        if not saved:
            step = f"To start {verb(count, 'it', 'them')} anew, call load_state before the {what} is prepared."
        yield Finding(f"{what}_missing", "error", text, step)
    if extra := sorted(saved - set(range(count))):
        files = ", ".join(numbered(kind, number) for number in extra[:_SHOWN])
        text = f"The folder holds {files}, of {what}s that are not prepared: they stay unread."
        yield Finding(f"{what}_extra", "warning", text, step)


def _loaders(wanted: Wanted, names: frozenset[str]) -> Iterator[Finding]:
    """
    Say which states of dataloaders are lost; a loader without a state of its own starts anew in any case.
    """
    saved = _numbers(LOADER, names)
    stateful = {number for number, is_stateful in enumerate(wanted.loaders) if is_stateful}
    if absent := sorted(stateful - saved):
        text = f"The folder has no {numbered(LOADER, absent[0])}: the dataloader starts from its first batch."
        step = "Save with the dataloaders prepared, and use_stateful_dataloader=True."
        yield Finding("loader_missing", "warning", text, step)
    if extra := sorted(saved - stateful):
        files = ", ".join(numbered(LOADER, number) for number in extra[:_SHOWN])
        text = f"The folder holds {files}, which no prepared dataloader takes: the data starts from its first batch."
        step = "Prepare the dataloaders that were saved, with use_stateful_dataloader=True."
        yield Finding("loader_extra", "warning", text, step)


def _scaler(wanted: Wanted, names: frozenset[str]) -> Iterator[Finding]:
    if wanted.has_scaler and SCALER not in names:
        yield Finding("scaler_missing", "error", f"The folder has no {SCALER}, the state of the gradient scaler.")
    if not wanted.has_scaler and SCALER in names and wanted.is_plain:
        text = f"The folder holds {SCALER}, the state of a gradient scaler, and this job has none: it stays unread."
        yield Finding("scaler_extra", "warning", text, "Resume with the mixed_precision that was saved with.")


def _custom(wanted: Wanted, names: frozenset[str]) -> Iterator[Finding]:
    """
    Say that the registered objects are not those that were saved: accelerate counts them, when all else is loaded.
    """
    saved = sum(_CUSTOM.fullmatch(name) is not None for name in names)
    if saved == wanted.custom:
        return
    text = f"The folder holds the states of {saved:,} registered objects, and {wanted.custom:,} "
    text += f"{verb(wanted.custom, 'is', 'are')} registered."
    step = "Register the objects that were saved, in the same order (register_for_checkpointing)."
    if not saved:
        step = "To start them anew, call register_for_checkpointing after load_state."
    yield Finding("custom_missing" if saved < wanted.custom else "custom_extra", "error", text, step)


def _rng(wanted: Wanted, names: frozenset[str], came: Collection[str]) -> Iterator[Finding]:
    name = f"{RNG}{wanted.rank}.pkl"
    if name not in names:
        text = f"The folder has no {name}: the random number generators go on as they are."
        yield Finding("rng_missing", "warning", text, "Resume with the number of processes that saved.")
        return
    for finding in sniff.findings(os.path.join(wanted.folder, name)):
        if finding.level == "error":
            text = f"The states of the random number generators cannot be read: {finding.text}."
            yield Finding("rng_missing", "warning", text, finding.next)
            return
    if came and (absent := [key for key in RNG_KEYS if key not in came]):
        text = f"{name} lacks {', '.join(absent)}: accelerate goes on in silence with these generators as they are."
        yield Finding("rng_missing", "warning", text)


def _numbers(kind: tuple[str, str], names: frozenset[str]) -> set[int]:
    return {number for name in names if (number := _number(kind, name)) is not None}


def _number(kind: tuple[str, str], name: str) -> int | None:
    stem, extension = kind
    match = re.fullmatch(rf"{re.escape(stem)}(?:_([0-9]+))?{re.escape(extension)}", name)
    return None if match is None else int(match[1] or 0)
