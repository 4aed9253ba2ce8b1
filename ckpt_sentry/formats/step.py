"""
The training step that a checkpoint belongs to, and where that is written. None rather than a guess.

By name first, from the path upwards; then a file beside the data; then (`dcp.peek`) one key of a distributed
checkpoint. A save counter (`checkpoint_3` of accelerate) or an epoch (`epoch_1` of torchtune) is no step, and neither
are the other digits in a name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry.formats.regular import regular
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.formats.torch_save import unpickle
else:
    unpickle = later("ckpt_sentry.formats.torch_save.unpickle")

MAX_STEP: Final = 10**12
_MAX_LEVELS: Final = 4
_MAX_NAME: Final = 255
_MAX_STATE_BYTES: Final = 8 * 2**20


class Step(NamedTuple):
    """
    A training step, and where it was learnt, in words: "folder name", "file name", "trainer_state.json", `key "step"`.
    """

    value: int
    source: str


_END = r"(?:-last|-v[0-9]+)*(?:\.(?:ckpt|pt|pth|bin|safetensors))?\Z"
_STEP_NAMES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\A(?:global[-_]?)?step[-_=]?([0-9]+){_END}",  # torchtitan, DeepSpeed, accelerate's examples
        rf"\Aiter(?:ation)?[-_=]?([0-9]+){_END}",  # Megatron
        r"\Acheckpoint-([0-9]+)\Z",  # transformers
        r"(?:\A|[-_])step=([0-9]+)(?=[-_]|\.(?![0-9])|\Z)",  # Lightning, NeMo
        rf"(?:\A|-)ep[0-9]+-ba([0-9]+)(?:-rank[0-9]+)?{_END}",  # composer
    )
)
_NAMES: Final = ("file name", "folder name", "parent folder name")
_NO_STEP: Final = re.compile(r"(?:checkpoint|epoch)_?[0-9]+\Z|epoch[-=][0-9]+\Z|release\Z")
"""A name that says which checkpoint this is, in another unit: what stands above it belongs to something else."""
_TRAINER_PART: Final = re.compile(r"(?:pytorch_model|optimizer)(?:_fsdp)?_[0-9]+\Z")
"""The folders in which the Trainer keeps FSDP's shards, in the folder that has `trainer_state.json`."""

STEP_KEYS: Final = (
    "train_state.step",
    "trainer.global_step",
    "trainer_state.global_step",
    "global_step",
    "iteration",
    "step",
)
"""Keys that count steps of training in known projects. An optimizer's `state.N.step` counts its own updates."""


def step_in_name(name: str) -> int | None:
    """
    The step that the name of a file or folder says, such as 100 for `step-100`.
    """
    found = {int(match[1]) for pattern in _STEP_NAMES for match in pattern.finditer(name[:_MAX_NAME])}
    value = found.pop() if len(found) == 1 else None
    return value if value is not None and value <= MAX_STEP else None


def find_step(path: str | os.PathLike[str]) -> Step | None:
    """
    The step of the checkpoint at `path`, by its name, its parents' names, or a file in it.

    Costs at most four attempts to open a small file, and a look at the path alone where a name tells. Never raises.
    """
    text = os.fspath(path)
    remote = "://" in text
    names = [name for name in re.split(r"[/\\]", text.partition("?")[0] if remote else text) if name not in ("", ".")]
    for level, name in enumerate(reversed(names[-_MAX_LEVELS:])):
        value = step_in_name(name)
        if value is not None:
            return Step(value, _NAMES[min(level + (not _is_file(text, names[-1])), 2)])
        if _NO_STEP.match(name):
            break
    return None if remote else _from_sidecar(text, names[-1] if names else "")


def _is_file(path: str, name: str) -> bool:
    """
    Whether a checkpoint is one file: as it is there, else by its name. Lightning calls folders "….ckpt" as well.
    """
    if os.path.isfile(path):
        return True
    return name.endswith((".pt", ".pth", ".bin", ".safetensors")) and not os.path.isdir(path)


def _from_sidecar(path: str, name: str) -> Step | None:
    for file, read in _SIDECARS:
        value = _value_of(os.path.join(path, file), read)
        if value is not None:
            return Step(value, file)
    if _TRAINER_PART.match(name):
        value = _value_of(os.path.join(os.path.dirname(path.rstrip("/")), _TRAINER_STATE), _trainer_state)
        return None if value is None else Step(value, _TRAINER_STATE)
    return None


def _value_of(file: str, read: Callable[[str], object]) -> int | None:
    try:
        with open(file, "rb", opener=regular) as stream:
            data = stream.read(_MAX_STATE_BYTES + 1)
        value = read(data.decode()) if len(data) <= _MAX_STATE_BYTES else None
    except (OSError, ValueError, RecursionError) as failure:
        let_through(failure)
        return None
    return as_step(value)


def as_step(value: object) -> int | None:
    """
    A value that may be a step: a whole number that is not beyond reason.
    """
    return value if type(value) is int and 0 <= value <= MAX_STEP else None


def _trainer_state(text: str) -> object:
    state = json.loads(text)
    return state.get("global_step") if isinstance(state, dict) else None


def _whole_number(text: str) -> object:
    return int(text) if re.fullmatch(r"\s*[0-9]{1,12}\s*", text) else None


def _tag(text: str) -> object:
    return step_in_name(text.strip())


_TRAINER_STATE: Final = "trainer_state.json"
_SIDECARS: Final[tuple[tuple[str, Callable[[str], object]], ...]] = (
    (_TRAINER_STATE, _trainer_state),
    ("latest_checkpointed_iteration.txt", _whole_number),  # Megatron
    ("latest", _tag),  # DeepSpeed
)
