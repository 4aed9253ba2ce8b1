"""
The training step that a checkpoint belongs to, and where that is written. None rather than a guess.

By name first, from the path upwards; then a file beside the data; then (`peek_step`) one key of a distributed
checkpoint. A save counter (`checkpoint_3` of accelerate) or an epoch (`epoch_1` of torchtune) is no step, and neither
are the other digits in a name.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry.formats.regular import regular
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.formats.dcp.metadata import DcpMetadata, Stored
    from ckpt_sentry.formats.torch_save import unpickle
else:
    DcpMetadata = later("ckpt_sentry.formats.dcp.metadata:DcpMetadata")
    Stored = later("ckpt_sentry.formats.dcp.metadata:Stored")
    unpickle = later("ckpt_sentry.formats.torch_save.unpickle")

MAX_STEP: Final = 10**12
_MAX_LEVELS: Final = 4
_MAX_NAME: Final = 255
_MAX_STATE_BYTES: Final = 8 * 2**20
_MAX_ENTRY_BYTES: Final = 64 * 2**10


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
    return _as_step(value)


def _as_step(value: object) -> int | None:
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


def peek_step(path: str | os.PathLike[str], metadata: DcpMetadata) -> Step | None:
    """
    The step that one key of the distributed checkpoint in the folder `path` holds: one small read, never a pickle run.

    None as well where two such keys disagree. Never raises.
    """
    found: dict[str, int] = {}
    for key in STEP_KEYS:
        stored = _only_place(metadata, key)
        value = None if stored is None else _as_step(_peek(os.fspath(path), stored))
        if value is not None:
            found[key] = value
    if len(set(found.values())) != 1:
        return None
    key, value = next(iter(found.items()))
    return Step(value, f'key "{key}"')


def _only_place(metadata: DcpMetadata, key: str) -> Stored | None:
    entry = metadata.entries.get(key)
    if entry is None or (entry.shape is not None and entry.elements != 1):
        return None
    stored = metadata.storage.get((key, None if entry.shape is None else (0,) * len(entry.shape)))
    if stored is None or stored.transforms or not 0 < stored.length <= _MAX_ENTRY_BYTES or stored.offset < 0:
        return None
    # The name comes from the file: it must not lead out of the checkpoint.
    return None if os.path.isabs(stored.file) or ".." in re.split(r"[/\\]", stored.file) else stored


def _peek(folder: str, stored: Stored) -> object:
    try:
        with open(os.path.join(folder, stored.file), "rb", opener=regular) as file:
            file.seek(stored.offset)
            data = file.read(stored.length)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _number(archive)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile) as failure:
        let_through(failure)
        return None


class _Storage(NamedTuple):
    signed: bool
    size: int
    data: bytes
    byteorder: str


def _number(archive: zipfile.ZipFile) -> object:
    # The layout of torch.save (torch/serialization.py): NAME/data.pkl, NAME/data/KEY, NAME/byteorder.
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if any(info.file_size > _MAX_ENTRY_BYTES for info in members.values()):
        return None
    byteorder = archive.read(members["byteorder"]).decode("ascii") if "byteorder" in members else "little"

    def storage(identity: object) -> object:
        match identity:
            case ("storage", (bool() as signed, int() as size), str() as key, *_):
                return _Storage(signed, size, archive.read(members[f"data/{key}"]), byteorder)
        return None

    value = unpickle.load(archive.read(members["data.pkl"]), _numbers(), persistent=storage).value
    return value if type(value) is int else None


def _first_integer(storage: object, offset: object = 0, *_rest: object) -> object:
    # torch._utils._rebuild_tensor_v2(storage, storage_offset, size, stride, …) of a tensor with one element.
    if not isinstance(storage, _Storage) or not isinstance(offset, int) or storage.byteorder not in ("little", "big"):
        return None
    piece = storage.data[offset * storage.size : (offset + 1) * storage.size]
    if offset < 0 or len(piece) != storage.size:
        return None
    return int.from_bytes(piece, "little" if storage.byteorder == "little" else "big", signed=storage.signed)


@cache
def _numbers() -> unpickle.Allowed:
    """
    What a file of a few whole numbers is made of.
    """
    return {
        ("torch", "LongStorage"): (True, 8),
        ("torch", "IntStorage"): (True, 4),
        ("torch", "ShortStorage"): (True, 2),
        ("torch", "CharStorage"): (True, 1),
        ("torch", "ByteStorage"): (False, 1),
        ("torch._utils", "_rebuild_tensor_v2"): _first_integer,
        ("collections", "OrderedDict"): unpickle.mapping,
    }
