"""
The files that `Accelerator.load_state` reads from a folder, and which of them are missing or too many.

The names are those of accelerate/utils/constants.py: the first of a kind has no number, in files of RNG states it is
the rank's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckpt_sentry.audit.escape import shown
from ckpt_sentry.audit.report import Finding
from ckpt_sentry.checkpoints import sniff

SAFETENSORS: Final = ("model", ".safetensors")
BIN: Final = ("pytorch_model", ".bin")
OPTIMIZER: Final = ("optimizer", ".bin")
SCHEDULER: Final = ("scheduler", ".bin")
SCALER: Final = "scaler.pt"


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    What a call of `load_accelerator_state` fills. `is_plain` is False where FSDP or DeepSpeed loads models and
    optimizers in a way of its own.
    """

    folder: str
    models: Sequence[Any]
    optimizers: int
    schedulers: int
    rank: int
    has_scaler: bool

    @property
    def is_plain(self) -> bool:
        return bool(self.models)


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


def first_absent(wanted: Wanted) -> str | None:
    """
    The first file, in the order of loading, whose absence the loader will end on.
    """
    paths = [model_file(wanted.folder, number) for number in range(len(wanted.models))]
    paths += [os.path.join(wanted.folder, numbered(OPTIMIZER, number)) for number in range(wanted.optimizers)]
    paths += [os.path.join(wanted.folder, numbered(SCHEDULER, number)) for number in range(wanted.schedulers)]
    if wanted.has_scaler:
        paths.append(os.path.join(wanted.folder, SCALER))
    return next((path for path in paths if not os.path.exists(path)), None)


def findings(wanted: Wanted) -> Iterator[Finding]:
    """
    Say what is missing from the folder, and what lies there that nobody asks for.
    """
    try:
        names = frozenset(os.listdir(wanted.folder))
    except OSError:
        yield Finding("path_missing", "error", f"{shown(wanted.folder)} is no folder that can be read")
        return
    if wanted.is_plain:
        yield from _models(wanted, names)
        yield from _kind("optimizer", OPTIMIZER, wanted.optimizers, names)
    yield from _kind("scheduler", SCHEDULER, wanted.schedulers, names)
    if wanted.has_scaler and SCALER not in names:
        yield Finding("scaler_missing", "error", f"The folder has no {SCALER}, the state of the gradient scaler.")
    yield from _rng(wanted, names)


def _models(wanted: Wanted, names: frozenset[str]) -> Iterator[Finding]:
    count = len(wanted.models)
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
        yield Finding(f"{what}_missing", "error", text, step)
    if extra := sorted(saved - set(range(count))):
        files = ", ".join(numbered(kind, number) for number in extra[:3])
        text = f"The folder holds {files}, of {what}s that are not prepared: they stay unread."
        yield Finding(f"{what}_extra", "warning", text, step)


def _rng(wanted: Wanted, names: frozenset[str]) -> Iterator[Finding]:
    name = f"random_states_{wanted.rank}.pkl"
    if name not in names:
        text = f"The folder has no {name}: the random number generators go on as they are."
        yield Finding("rng_missing", "warning", text, "Resume with the number of processes that saved.")
        return
    for finding in sniff.findings(os.path.join(wanted.folder, name)):
        if finding.level == "error":
            text = f"The states of the random number generators cannot be read: {finding.text}."
            yield Finding("rng_missing", "warning", text, finding.next)


def _numbers(kind: tuple[str, str], names: frozenset[str]) -> set[int]:
    stem, extension = kind
    pattern = re.compile(rf"{re.escape(stem)}(?:_([0-9]+))?{re.escape(extension)}")
    return {int(match[1] or 0) for name in names if (match := pattern.fullmatch(name))}
