"""
What a DCP load would do, before it is done: `precheck` and `audit`, and the error that they speak in.

For programs that ask. Neither the hooks nor a process group is needed, no collective is made and no shard is read:
headers tell. A load that is watched keeps torch's own exceptions, with the report attached.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config, identity
from ckpt_sentry.audit.examine import examine
from ckpt_sentry.audit.fold import fold, folds
from ckpt_sentry.audit.generators import MOST_ITEMS, readable
from ckpt_sentry.audit.inventory import Entry, Inventory
from ckpt_sentry.audit.report import Facts, Finding, LoadReport, ModelSummary, Shape
from ckpt_sentry.audit.verdict import verdict
from ckpt_sentry.checkpoints import dcp, dcp_metadata
from ckpt_sentry.checkpoints.dcp_metadata import DcpMetadata
from ckpt_sentry.checkpoints.paths import mask
from ckpt_sentry.checkpoints.step import Step, find_step, peek_step
from ckpt_sentry.checkpoints.unpickle import UnreadablePickle

if TYPE_CHECKING:
    from ckpt_sentry.audit.examine import Examination

_CANNOT = "dcp.load cannot succeed"


@dataclass(frozen=True, slots=True)
class ShapeConflict:
    """
    A key that both sides have in different shapes: `expected` by the model, `actual` in the checkpoint, in elements.

    `module` is the path of the module that holds it, "" at the root.
    """

    key: str
    module: str
    expected: Shape
    actual: Shape

    def __str__(self) -> str:
        return (
            f"{self.key} (module {self.module or 'root'}): model {list(self.expected)}, checkpoint {list(self.actual)}"
        )


class DCPLoadError(RuntimeError):
    """
    A DCP load that cannot succeed, on one rank, with everything that is wrong with it at once.

    `missing` and `unexpected` are keys, `shape_conflicts` are `ShapeConflict`s; iterators are taken in, up to 10,000
    items. `reasons` are further sentences, such as what is wrong with the path. The text names every key, folded.
    """

    def __init__(  # noqa: PLR0913 - what there is to say of a load
        self,
        message: str = "the checkpoint does not fit",
        *,
        rank: int = 0,
        checkpoint_step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        shape_conflicts: Iterable[ShapeConflict] = (),
        reasons: Iterable[str] = (),
    ) -> None:
        self.message = readable(message, None)
        self.rank = rank
        self.checkpoint_step = checkpoint_step
        self.path = None if path is None else mask(os.fspath(path))
        self.missing = tuple(sorted(map(str, _taken(missing))))
        self.unexpected = tuple(sorted(map(str, _taken(unexpected))))
        self.shape_conflicts = tuple(sorted(_taken(shape_conflicts), key=lambda one: one.key))
        self.reasons = tuple(_taken(reasons))
        super().__init__(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.message, self._fields())

    def _fields(self) -> dict[str, Any]:
        names = ("rank", "checkpoint_step", "path", "missing", "unexpected", "shape_conflicts", "reasons")
        return {name: getattr(self, name) for name in names}

    def _text(self) -> str:
        step = "unknown" if self.checkpoint_step is None else str(self.checkpoint_step)
        lines = [f"{self.message} · rank {self.rank} · step {step} · {self.path or 'no path'}"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += keys_text("missing from the checkpoint", self.missing)
        lines += conflicts_text(self.shape_conflicts)
        lines += keys_text("unexpected: in the checkpoint, not in the model", self.unexpected)
        return "\n".join(lines)


def keys_text(what: str, keys: Collection[str]) -> list[str]:
    """
    A line for all keys of a kind, folded; none where there are none.
    """
    if not keys:
        return []
    count = "1 key" if len(keys) == 1 else f"{len(keys):,} keys"
    return [f"  {count} {what}: {', '.join(fold(keys))}"]


def conflicts_text(conflicts: Iterable[ShapeConflict]) -> list[str]:
    """
    A line for each pair of shapes in one module, with its keys folded.
    """
    rows: dict[tuple[Shape, Shape], list[str]] = {}
    for one in conflicts:
        rows.setdefault((one.expected, one.actual), []).append(one.key)
    return [
        f"  shape mismatch: {found.text} (module {found.text.rpartition('.')[0] or 'root'}): "
        f"model {list(expected)}, checkpoint {list(actual)}"
        for (expected, actual), keys in sorted(rows.items(), key=lambda row: min(row[1]))
        for found in folds(keys)
    ]


def precheck(
    state_dict: Any,
    path_or_metadata: Any,
    *,
    rank: int | None = None,
    allow_partial_load: bool = False,
    allow_missing: Iterable[str] = (),
) -> DCPLoadError | None:
    """
    Say whether `dcp.load(state_dict, …)` can succeed, by headers only; None if so.

    `state_dict` is what would be given to `dcp.load` (nested or flat; of a `Stateful` its `state_dict()`), or a module.
    `path_or_metadata` is the folder of the checkpoint, its `Metadata`, or a `StorageReader`. Unexpected keys alone are
    no error, nor are missing ones with `allow_partial_load`, or where they match a glob of `allow_missing`.
    """
    who = identity.identity().rank if rank is None else rank
    source = _source(path_or_metadata)
    if source.metadata is None:
        texts = [finding.text for finding in source.findings] or ["it cannot be read"]
        return DCPLoadError(
            _CANNOT,
            rank=who,
            checkpoint_step=source.step_value,
            path=source.path,
            reasons=texts,
        )
    found = _examined(state_dict, source.metadata, allow_missing)
    difference = found.difference
    excused = allow_partial_load or not _is_lacking(found)
    if excused and not difference.mismatched:
        return None
    return DCPLoadError(
        _CANNOT,
        rank=who,
        checkpoint_step=source.step_value,
        path=source.path,
        missing=() if excused else difference.missing,
        unexpected=difference.unexpected,
        shape_conflicts=(
            ShapeConflict(pair.key, pair.key.rpartition(".")[0], pair.model.shape or (), pair.checkpoint.shape or ())
            for pair in difference.mismatched
        ),
        reasons=[one.text for one in found.findings if one.code in ("renamed_keys", "flat_optimizer")],
    )


def audit(model_or_state_dict: Any, path: Any) -> LoadReport:
    """
    Report on a load of the checkpoint at `path` without loading it: what would enter, what would not, and why.

    Of a module that is one part of the saved state, that part is compared. The verdict is what the load would come to.

    :raises DCPLoadError: nothing can be said, since the checkpoint cannot be read; the text says why.
    """
    who, started = identity.identity(), time.time()
    source = _source(path)
    if source.metadata is None:
        raise DCPLoadError(
            "the checkpoint cannot be read",
            rank=who.rank,
            checkpoint_step=source.step_value,
            path=source.path,
            reasons=[finding.text for finding in source.findings],
        )
    model = _inventory(model_or_state_dict)
    found = _examined(model, source.metadata, config.settings().allow_missing)
    facts = Facts(
        path=None if source.path is None else mask(source.path),
        format="DCP",
        step=source.step_value,
        step_source=None if source.step is None else source.step.source,
        checkpoint=source.metadata.summary(),
        model=ModelSummary(model.keys, model.elements, model.nbytes),
    ).examined(found)
    return LoadReport(
        load_id=identity.load_id(who.run_id, who.attempt, "audit", 0),
        ordinal=0,
        identity=who,
        framework="dcp",
        entry_point="ckpt_sentry.audit",
        verdict=verdict(coverage=facts.coverage, findings=facts.findings),
        started_at=started,
        ended_at=time.time(),
        **{name: getattr(facts, name) for name in Facts.__slots__},
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """
    The checkpoint that a call names: its headers, or why they cannot be read.
    """

    path: str | None
    metadata: DcpMetadata | None
    step: Step | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def step_value(self) -> int | None:
        return None if self.step is None else self.step.value


def _source(given: Any) -> _Source:
    if isinstance(given, DcpMetadata):
        return _Source(given.saved_path, given, None if given.saved_path is None else find_step(given.saved_path))
    if hasattr(given, "state_dict_metadata"):
        path = getattr(getattr(given, "storage_meta", None), "checkpoint_id", None)
        return _of_torch(given, None if path is None else os.fspath(path))
    if callable(getattr(given, "read_metadata", None)):
        path = getattr(given, "checkpoint_id", None) or getattr(given, "path", None)
        return _of_torch(given.read_metadata(), None if path is None else os.fspath(path))
    path = os.fspath(given)
    try:
        metadata = dcp_metadata.read(path)
    except (OSError, UnreadablePickle):
        return _Source(path, None, find_step(path), dcp.diagnose(path))
    return _Source(path, metadata, find_step(path) or peek_step(path, metadata))


def _of_torch(metadata: Any, path: str | None) -> _Source:
    from ckpt_sentry.targets.dcp_entries import checkpoint_entry

    seen: dict[tuple[Any, Any], Entry] = {}
    entries = {key: checkpoint_entry(value, seen) for key, value in metadata.state_dict_metadata.items()}
    return _Source(path, DcpMetadata(entries, saved_path=path), None if path is None else find_step(path))


def _examined(state_dict: Any, metadata: DcpMetadata, allow_missing: Iterable[str]) -> Examination:
    model = _inventory(state_dict)
    entries = metadata.entries
    if model.entries and not any(key in entries for key in model.entries):
        entries = _part(entries, model)
    return examine(model, Inventory(entries), allow_missing=tuple(allow_missing))


def _part(entries: Mapping[str, Entry], model: Inventory) -> Mapping[str, Entry]:
    """
    The part of a saved state that is the model: what lies under the outer name that most of its keys lie under.
    """
    counts: dict[str, int] = {}
    for key in entries:
        outer, _, inner = key.partition(".")
        counts[outer] = counts.get(outer, 0) + (inner in model.entries)
    name = min(counts, key=lambda one: (-counts[one], one), default="")
    if not counts.get(name):
        return entries
    return {key.partition(".")[2]: entry for key, entry in entries.items() if key.startswith(f"{name}.")}


def _inventory(state_dict: Any) -> Inventory:
    if isinstance(state_dict, Inventory):
        return state_dict
    from ckpt_sentry.targets.dcp_entries import flattened, model_entry

    if not isinstance(state_dict, Mapping):
        state_dict = state_dict.state_dict()
    plain = {key: _state_of(value) for key, value in state_dict.items()}
    seen: dict[tuple[Any, Any], Entry] = {}
    return Inventory({key: model_entry(value, seen) for key, value in flattened(plain).items()})


def _state_of(value: Any) -> Any:
    is_stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return value.state_dict() if is_stateful else value


def _is_lacking(found: Examination) -> bool:
    return any(one.code == "missing_keys" and one.level != "info" for one in found.findings)


def _taken(items: Iterable[Any]) -> Iterable[Any]:
    return itertools.islice(items, MOST_ITEMS) if hasattr(type(items), "__next__") else items


def _rebuilt(kind: type[DCPLoadError], message: str, fields: Mapping[str, Any]) -> DCPLoadError:
    return kind(message, **fields)
