"""
Which files accelerate's loaders choose at a path, and what they will read from them.

The order is that of `load_checkpoint_in_model` (accelerate/utils/modeling.py): a file as it is (an index if it ends in
".json"); in a folder `pytorch_model.bin`, else `model.safetensors`, else the only `*.index.json`. The shards of an
index are read in the order of their names, and of a key in two of them the last one counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass, field, replace
from ckpt_sentry.formats import state_file
from ckpt_sentry.formats.elements import Sampler, Slot, can_sample
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.formats.state_file import StateFile
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.formats import index as index_
    from ckpt_sentry.formats import sniff
else:
    index_ = later("ckpt_sentry.formats.index")
    sniff = later("ckpt_sentry.formats.sniff")

BIN: Final = "pytorch_model.bin"
SAFETENSORS: Final = "model.safetensors"

_COMPARED: Final = 16
_MAX_LISTED: Final = 1_000
_ROUNDING: Final = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The relative step between numbers of a type, by which a value may differ once it was rounded to it."""
_TINY: Final = 2.0**-24
"""What float16 can still tell from 0."""


@dataclass(frozen=True, slots=True)
class Choice:
    """
    What a loader will read from a path.

    `files` are full paths in the order of reading; `inventory`, `slots` and `sources` (the file that a key is taken
    from) are their union, without the files that cannot be read. `loadable` is False where the loader will raise; the
    findings then say why. For a state dict one level down, `nested_under`, `nested` and `nested_slots` describe it;
    `inventory` is the level that the loader sees.
    """

    path: str
    kind: Literal["file", "index", "nothing"]
    loadable: bool
    files: tuple[str, ...] = ()
    index: str | None = None
    inventory: Inventory = field(default_factory=Inventory)
    slots: Mapping[str, Slot] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    nested_under: str | None = None
    nested: Inventory | None = None
    nested_slots: Mapping[str, Slot] = field(default_factory=dict)
    format: str | None = None
    bytes: int = 0
    findings: tuple[Finding, ...] = ()


def choose(path: str | os.PathLike[str]) -> Choice:
    """
    Say what accelerate's loaders will read from a path; headers only. What is wrong is a finding, never an exception.
    """
    path = os.fspath(path)
    try:
        if os.path.isfile(path):
            return _index(path, path) if path.endswith(".json") else _single(path, path)
        if os.path.isdir(path):
            return _folder(path)
    except (OSError, ValueError) as error:
        let_through(error)
        reason = shown(str(error))
        return _nothing(path, (Finding("file_unreadable", "error", f"{shown(path)} cannot be read: {reason}"),))
    return _nothing(path, sniff.findings(path) or (Finding("path_missing", "error", f"{shown(path)} is no file"),))


def _nothing(path: str, findings: Iterable[Finding]) -> Choice:
    return Choice(path, "nothing", loadable=False, findings=tuple(findings))


def _folder(path: str) -> Choice:
    names = sorted(os.listdir(path))
    indexes = [name for name in names if name.endswith(".index.json")]
    candidates = [name for name in (BIN, SAFETENSORS) if name in names]
    if candidates:
        return _single(path, os.path.join(path, candidates[0]), beside=candidates[1:] + indexes)
    if len(indexes) == 1:
        return _index(path, os.path.join(path, indexes[0]))
    if indexes:
        text = f"{_name(path)} holds {len(indexes):,} indexes ({_some(indexes)}): accelerate cannot choose"
        return _nothing(path, (Finding("several_indexes", "error", text, "pass the path of the one you want"),))
    return _nothing(path, sniff.findings(path) or (_no_files(path, names),))


def _no_files(path: str, names: Sequence[str]) -> Finding:
    text = f"{_name(path)} holds no {BIN}, {SAFETENSORS} or *.index.json"
    if not names:
        return Finding("no_checkpoint_files", "error", f"{_name(path)} is an empty folder", "check the path")
    known = [name for name in names if os.path.splitext(name)[1] in {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}]
    if known:
        step = f"pass the file itself: {shown(os.path.join(path, known[0]))}"
        step = step if len(known) == 1 else "pass the file that is meant, not the folder"
        return Finding("no_checkpoint_files", "error", f"{text}, but {_some(known)}", step)
    inner = next((name for name in names[:_MAX_LISTED] if _is_dcp(os.path.join(path, name))), None)
    if inner:
        step = f"load {shown(os.path.join(path, inner))} with torch.distributed.checkpoint.load"
        return Finding(
            "no_checkpoint_files", "error", f"{text}; {shown(inner)} is a distributed checkpoint (DCP)", step
        )
    return Finding("no_checkpoint_files", "error", text, "check the path")


def _is_dcp(path: str) -> bool:
    return os.path.isfile(os.path.join(path, ".metadata"))


def _single(path: str, file: str, beside: Sequence[str] = ()) -> Choice:
    chosen = state_file.read(file)
    return _union(path, "file", (chosen,), _beside(path, chosen, beside))


def _index(path: str, file: str) -> Choice:
    try:
        index = index_.read(file)
    except (OSError, HeaderError) as error:
        let_through(error)
        found = tuple(item for item in sniff.findings(file) if item.code != "unknown_format")
        if not found and isinstance(error, HeaderError):
            found = (error.finding(),)
        return Choice(path, "index", loadable=False, index=file, findings=found)
    shards = index_.shards(index)
    facts = index_.examine(index, shards)
    choice = _union(path, "index", shards, index_.findings(index, facts), index=file)
    return replace(choice, loadable=False) if facts.absent else choice


def _union(
    path: str,
    kind: Literal["file", "index"],
    files: Sequence[StateFile],
    findings: Iterable[Finding],
    index: str | None = None,
) -> Choice:
    entries: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    slots: dict[str, Slot] = {}
    sources: dict[str, str] = {}
    for file in files:
        # A key's tie and slot go with the file that supplies it.
        for known in file.inventory.entries.keys() & sources.keys():
            ties.pop(known, None)
            slots.pop(known, None)
        entries.update(file.inventory.entries)
        ties.update(file.inventory.ties)
        slots.update(file.slots)
        sources.update(dict.fromkeys(file.inventory.entries, file.path))
    ties = {key: owner for key, owner in ties.items() if sources[key] == sources[owner]}
    formats = sorted({file.format for file in files})
    wrong = [found for file in files if (found := _refused_metadata(file))]
    nested = next((file for file in files if file.nested_under is not None), None)
    return Choice(
        path,
        kind,
        loadable=all(file.readable for file in files) and not wrong,
        files=tuple(file.path for file in files),
        index=index,
        inventory=Inventory(entries, ties),
        slots=slots,
        sources=sources,
        nested_under=nested.nested_under if nested else None,
        nested=nested.nested if nested else None,
        nested_slots=nested.nested_slots if nested else {},
        format=formats[0] if len(formats) == 1 else None,
        bytes=sum(file.bytes for file in files),
        findings=_sorted([*findings, *wrong, *(found for file in files for found in file.findings)]),
    )


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = ("error", "warning", "info")
    return tuple(sorted(dict.fromkeys(findings), key=lambda item: (order.index(item.level), item.code, item.text)))


def _refused_metadata(file: StateFile) -> Finding | None:
    """
    Apply accelerate's rule for a header's metadata: none at all, or `format` is "pt" (UM, `load_state_dict`).
    """
    if file.format != "safetensors" or file.metadata is None or file.metadata.get("format") == "pt":
        return None
    said = file.metadata.get("format")
    what = "has metadata without a format" if said is None else f"was saved for {shown(said)!r}"
    text = f"{_name(file.path)} {what}: accelerate reads format 'pt' only"
    step = "save it again with safetensors.torch.save_file(…, metadata={'format': 'pt'})"
    return Finding("metadata_format", "error", text, step)


def _beside(path: str, chosen: StateFile, names: Iterable[str]) -> Iterator[Finding]:
    others = [os.path.join(path, name) for name in names]
    return ignored("accelerate", chosen.path, (chosen,), others, lambda other: f"pass {shown(other)}")


def ignored(
    reader: str, name: str, chosen: Sequence[StateFile], others: Iterable[str], way: Callable[[str], str | None]
) -> Iterator[Finding]:
    """
    Say which files (or indexes) beside the chosen ones a library ignores: a warning where their content differs, else
    only information.

    Args:
        reader: the library.
        name: the path of the chosen file or index; `chosen` is what it holds.
        way: how the library is made to read another of these paths, if it can be.
    """
    for other in others:
        files = _files(other)
        if files is None:
            continue
        newer = os.path.getmtime(other) > os.path.getmtime(name)
        text = f"{reader} reads {_name(name)} and ignores {'the newer ' if newer else ''}{_name(other)} beside it"
        if not all(file.readable for file in files):
            yield Finding("wrong_file_preferred", "info", f"{text}, which cannot be read anyway")
        elif not all(file.readable for file in chosen):
            yield Finding("wrong_file_preferred", "warning", f"{text}, which can be read", way(other))
        elif _same_content(chosen, files):
            yield Finding("wrong_file_preferred", "info", f"{text}; both hold the same")
        else:
            step = ", or ".join(filter(None, (way(other), "remove the file that is out of date")))
            yield Finding("wrong_file_preferred", "warning", f"{text}; their contents differ", step)


def _files(path: str) -> tuple[StateFile, ...] | None:
    if not path.endswith(".json"):
        return (state_file.read(path),)
    try:
        index = index_.read(path)
    except (OSError, HeaderError) as failure:
        let_through(failure)
        return None
    # An index whose shards are gone is no alternative.
    return index_.shards(index) or None


def _same_content(chosen: Sequence[StateFile], others: Sequence[StateFile]) -> bool:
    """
    Compare the names and shapes of all tensors and sampled values of some of them, spread evenly.
    """
    mine, theirs = _slots(chosen), _slots(others)
    # A tied name may be left out of the one that cannot express ties.
    names = mine.keys() - {key for file in chosen for key in file.inventory.ties}
    tied = {key for file in others for key in file.inventory.ties}
    if not names <= theirs.keys() or not theirs.keys() - tied <= mine.keys():
        return False
    shared = [key for key in sorted(names) if can_sample(mine[key]) and can_sample(theirs[key])]
    if any(mine[key].shape != theirs[key].shape for key in names):
        return False
    with Sampler() as sampler:
        picked = shared[:: max(1, len(shared) // _COMPARED)]
        return all(_alike(sampler, mine[key], theirs[key]) for key in picked)


def _slots(files: Iterable[StateFile]) -> dict[str, Slot]:
    return {key: slot for file in files for key, slot in file.slots.items()}


def _alike(sampler: Sampler, one: Slot, other: Slot) -> bool:
    """
    Whether sampled values are equal, as far as the coarser of two types of floating-point numbers tells them apart.
    """
    first, second = sampler.sample(one).values, sampler.sample(other).values
    if one.dtype == other.dtype or not {one.dtype, other.dtype} <= _ROUNDING.keys():
        return repr(first) == repr(second)
    unit = max(_ROUNDING[one.dtype], _ROUNDING[other.dtype])
    return all(
        math.isclose(*pair, rel_tol=unit, abs_tol=_TINY) or pair[0] != pair[0]
        for pair in zip(first, second, strict=True)
    )


def _name(path: str) -> str:
    return shown(os.path.basename(path.rstrip("/")) or path)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")  # noqa: PLR2004
