"""
The index of a sharded checkpoint (`*.index.json`), held against what its shards really contain.

Loaders take from it the names of the files and never compare its keys (accelerate/utils/modeling.py,
`load_checkpoint_in_model`): an index that lies or leaves a shard out goes by in silence.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.formats import state_file
from ckpt_sentry.formats.errors import HeaderError, plural
from ckpt_sentry.formats.regular import regular
from ckpt_sentry.formats.sniff import MAX_JSON
from ckpt_sentry.formats.state_file import StateFile
from ckpt_sentry.patching.guard import let_through

_MAX_SHARDS: Final = 100_000
_MAX_OTHERS: Final = 256
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Index:
    """
    An index: `weight_map` maps keys to file names; `files` are these names in the order in which they are loaded.
    """

    path: str
    weight_map: Mapping[str, str]
    files: tuple[str, ...]

    @property
    def folder(self) -> str:
        """
        The folder that the file names are relative to.
        """
        return os.path.dirname(self.path)


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """
    An index held against its shards. Files are names in its folder, keys are sorted.

    `absent` are files that the index names but that are not there; `not_held` keys that it lists but that no shard has;
    `misplaced` keys that are in another shard than it says; `unlisted` keys that its shards hold beyond its list;
    `omitted` maps files of the same set that it does not name to the keys that only they hold; `twice` maps keys to the
    shards that hold them, the last of which is loaded.
    """

    absent: tuple[str, ...] = ()
    not_held: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    omitted: Mapping[str, tuple[str, ...]] | None = None
    twice: Mapping[str, tuple[str, ...]] | None = None


def read(path: str | os.PathLike[str]) -> Index:
    """
    Read an index as accelerate does: the object under "weight_map" or, without one, the whole.

    :raises OSError: the file cannot be read.
    :raises HeaderError: `index_invalid`: no loader can use it.
    """
    path = os.fspath(path)
    name = shown(os.path.basename(path))
    if os.path.getsize(path) > MAX_JSON:
        raise HeaderError("index_invalid", f"the index {name} is larger than {MAX_JSON:,} bytes")
    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            document = json.load(file)
    except (ValueError, RecursionError) as error:
        raise HeaderError(
            "index_invalid", f"the index {name} is not valid JSON", "copy or download it again"
        ) from error
    found = document.get("weight_map", document) if isinstance(document, dict) else document
    if not isinstance(found, dict) or not all(isinstance(item, str) and "\0" not in item for item in found.values()):
        raise HeaderError("index_invalid", f"{name} is no index: it does not map keys to files")
    files = tuple(sorted(set(found.values())))
    if len(files) > _MAX_SHARDS:
        raise HeaderError("index_invalid", f"the index {name} names {len(files):,} files")
    return Index(path, found, files)


def shards(index: Index) -> tuple[StateFile, ...]:
    """
    Read the headers of the files that an index names, in the order of loading; those that are not there are left out.
    """
    paths = (os.path.join(index.folder, file) for file in index.files)
    return tuple(state_file.read(path) for path in paths if os.path.isfile(path))


def examine(index: Index, files: Iterable[StateFile]) -> IndexFacts:
    """
    Hold an index against its shards (from `shards`) and against the other files in its folder.
    """
    names = {os.path.join(index.folder, file): file for file in index.files}
    readable = [file for file in files if file.readable]
    holders: dict[str, list[str]] = {}
    for file in readable:
        for key in file.inventory.entries:
            holders.setdefault(key, []).append(names[file.path])
    read_names = {names[file.path] for file in readable}
    wanted = {key: file for key, file in index.weight_map.items() if file in read_names}
    held = holders.keys()
    return IndexFacts(
        absent=tuple(file for file in index.files if not os.path.isfile(os.path.join(index.folder, file))),
        not_held=tuple(sorted(wanted.keys() - held)),
        misplaced=tuple(sorted(k for k, f in wanted.items() if k in held and f not in holders[k])),
        unlisted=tuple(sorted(held - index.weight_map.keys())),
        omitted=_omitted(index, holders),
        twice={key: tuple(held_by) for key, held_by in sorted(holders.items()) if len(held_by) > 1},
    )


def _omitted(index: Index, holders: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    """
    Find shards that lie beside the named ones and that the index leaves out.

    A folder may well hold another checkpoint in the same format (the original weights beside the converted ones, an
    adapter), so a file counts only where it is named like a shard, or its keys begin like the shards' keys.
    """
    named = {os.path.normpath(file) for file in index.files}
    extensions = {os.path.splitext(file)[1] for file in named}
    patterns = set(map(_pattern, named))
    beginnings = {key.split(".", 1)[0] for key in holders}
    found = {}
    for file in _beside(index.folder, extensions - {""}):
        if file in named or file in _SINGLE:
            continue
        other = state_file.read(os.path.join(index.folder, file))
        only = sorted(key for key in other.slots if key not in holders)
        alike = _pattern(file) in patterns or any(key.split(".", 1)[0] in beginnings for key in only)
        if only and alike:
            found[file] = tuple(only)
    return found


_SINGLE: Final = frozenset(
    {
        "model.safetensors",
        "pytorch_model.bin",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "training_args.bin",
        "optimizer.bin",
        "scheduler.bin",
    }
)
"""Files that never are a shard."""


def _pattern(file: str) -> str:
    return re.sub(r"\d+", "#", file)


def _beside(folder: str, extensions: set[str]) -> list[str]:
    try:
        names = os.listdir(folder or ".")
    except OSError as failure:
        let_through(failure)
        return []
    return sorted(name for name in names if os.path.splitext(name)[1] in extensions)[:_MAX_OTHERS]


def findings(index: Index, facts: IndexFacts) -> tuple[Finding, ...]:
    """
    Say what `examine` has found: `shard_missing`, `index_incomplete`, `duplicate_keys`.
    """
    name = shown(os.path.basename(index.path))
    found = []
    if facts.absent:
        absent = frozenset(facts.absent)
        keys = sum(file in absent for file in index.weight_map.values())
        text = f"{len(facts.absent):,} of {len(index.files):,} shards that {name} names are not there: "
        text += f"{_some(facts.absent)} ({plural(keys, 'key')})"
        found.append(Finding("shard_missing", "error", text, "copy or download them again"))
    if facts.not_held:
        text = f"{name} lists {plural(len(facts.not_held), 'key')} that no shard holds: {_keys(facts.not_held)}"
        found.append(Finding("index_incomplete", "warning", text, _REBUILD))
    if facts.omitted:
        keys = len({key for held in facts.omitted.values() for key in held})
        text = f"{name} leaves out {_some(facts.omitted)}, with {plural(keys, 'key')} that no other shard holds"
        found.append(Finding("index_incomplete", "warning", text, _REBUILD))
    if facts.twice:
        last = sorted({names[-1] for names in facts.twice.values()})
        text = f"{plural(len(facts.twice), 'key')} in several shards ({_keys(facts.twice)}): "
        text += f"that of {_some(last)} is loaded"
        found.append(Finding("duplicate_keys", "warning", text, _REBUILD))
    return tuple(found)


_REBUILD: Final = "save the checkpoint again, or rebuild the index from the shards"


def _some(names: Iterable[str]) -> str:
    all_names = list(names)
    more = f" and {len(all_names) - _SHOWN:,} more" if len(all_names) > _SHOWN else ""
    return ", ".join(map(shown, all_names[:_SHOWN])) + more


def _keys(keys: Iterable[str]) -> str:
    folded = key_list(keys).keys
    return ", ".join(folded[:_SHOWN]) + (", …" if len(folded) > _SHOWN else "")
