"""
What a DCP load would do, before it is done: `precheck` and `audit`, and the error that they speak in.

For programs that ask. Neither the hooks nor a process group is needed, no collective is made and no shard is read:
headers and the sizes of files tell. A load that is watched keeps torch's own exceptions, with the report attached.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config, identity
from ckpt_sentry.api.dcp_source import Source, source_of
from ckpt_sentry.core import codes
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.fold import fold, folds
from ckpt_sentry.core.generators import MOST_ITEMS, readable
from ckpt_sentry.core.inventory import Entry, Inventory, outer_name, under
from ckpt_sentry.core.policy import MAY_BE_MISSING
from ckpt_sentry.core.report import CheckpointSummary, Facts, LoadReport, ModelSummary, Shape
from ckpt_sentry.core.verdict import verdict
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.formats import folder
from ckpt_sentry.formats.dcp import diagnosis as dcp
from ckpt_sentry.formats.dcp.metadata import DcpMetadata
from ckpt_sentry.integrations.dcp import keys as dcp_keys
from ckpt_sentry.integrations.dcp import planning
from ckpt_sentry.masking import clean, mask, mask_text
from ckpt_sentry.model.unify import inventory_of, needed

if TYPE_CHECKING:
    from ckpt_sentry.core.diff import Pair
    from ckpt_sentry.core.examine import Examination

_CANNOT = "dcp.load cannot succeed"
_PARTLY = "dcp.load copies what fits, and says nothing in this version of torch"


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
        super().__init__(mask_text(self._text()))

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
    Say whether `dcp.load(state_dict, …)` can succeed, by headers and the sizes of files only; None if so.

    `state_dict` is what would be given to `dcp.load` (nested or flat; of a `Stateful` its `state_dict()`), key by key:
    what `DefaultLoadPlanner` refuses is an error. Of a module that is one part of the saved state, that part is
    compared. Torch 2.4 does not raise for another shape, but leaves a part of the tensor as it was: that is an error
    too, and its text says so. `path_or_metadata` is the folder of the checkpoint, its `Metadata`, or a `StorageReader`;
    the files are looked at in a folder only. Unexpected keys alone are no error, nor are missing ones with
    `allow_partial_load`, or where they match a glob of `allow_missing`.
    """
    who = identity.identity().rank if rank is None else rank
    source = source_of(path_or_metadata)
    if source.metadata is None:
        texts = [finding.text for finding in source.findings] or ["it cannot be read"]
        return DCPLoadError(
            _CANNOT,
            rank=who,
            checkpoint_step=source.step_value,
            path=source.path,
            reasons=texts,
        )
    sides = _sides(state_dict, source.metadata)
    found = examine(sides.model, sides.checkpoint, allow_missing=tuple(allow_missing))
    difference = found.difference
    excused = allow_partial_load or not _is_lacking(found)
    reasons = (*_types(difference.retyped), *_files(source, sides.stored))
    if excused and not difference.mismatched and not reasons:
        return None
    is_raised = not excused or reasons or not _is_copied_in_part(difference.mismatched)
    return DCPLoadError(
        _CANNOT if is_raised else _PARTLY,
        rank=who,
        checkpoint_step=source.step_value,
        path=source.path,
        missing=() if excused else difference.missing,
        unexpected=difference.unexpected,
        shape_conflicts=(
            ShapeConflict(pair.key, pair.key.rpartition(".")[0], pair.model.shape or (), pair.checkpoint.shape or ())
            for pair in difference.mismatched
        ),
        reasons=(*reasons, *(one.text for one in found.findings if one.code in codes.OTHER_NAMES)),
    )


def _is_copied_in_part(mismatched: Iterable[Pair]) -> bool:
    """
    Whether this torch copies what fits of tensors of another shape: 2.4 does, where they have as many dimensions.
    """
    if planning.compares_sizes():
        return False
    return all(len(pair.model.shape or ()) == len(pair.checkpoint.shape or ()) for pair in mismatched)


def _types(retyped: Iterable[Pair]) -> list[str]:
    """
    The keys of which torch wants another type. The other way about it loads: an object takes the place of a tensor.
    """
    keys = [pair.key for pair in retyped if pair.model.shape is None]
    texts = keys_text("saved as a tensor, asked for as another object", keys)
    return [f"{text.strip()}; ask for a tensor, and convert it after the load" for text in texts]


def _files(source: Source, keys: Collection[str]) -> list[str]:
    """
    What is wrong with the files that these keys lie in: one `stat` for each.

    What others lie in is not read, and is said only where the load fails anyway.
    """
    whole = source.metadata
    if whole is None or source.folder is None:
        return []
    entries = {key: entry for key, entry in whole.entries.items() if key in keys}
    storage = {place: stored for place, stored in whole.storage.items() if place[0] in entries}
    lost = _errors(source.folder, replace(whole, entries=entries, storage=storage))
    return lost and (_errors(source.folder, whole) or lost)


def _errors(path: str, metadata: DcpMetadata) -> list[str]:
    return [one.text for one in dcp.diagnose(path, metadata=metadata) if one.level == "error"]


def audit(model_or_state_dict: Any, path: Any) -> LoadReport:
    """
    Report on a load of the checkpoint at `path` without loading it: what would enter, what would not, and why.

    `path` is the folder of a DCP checkpoint, or a file, an index or a folder as `LoadAuditor.check` takes them. Of a
    module that is one part of the state in a DCP folder, that part is compared; a state dict is taken as `dcp.load`
    takes it. The verdict is what the load would come to.

    :raises DCPLoadError: nothing can be said, since the checkpoint cannot be read; the text says why.
    """
    who, started = identity.identity(), time.time()
    source = source_of(path)
    choice = None if source.metadata is not None or source.path is None else folder.choose(source.path)
    if source.metadata is not None:
        facts = _facts_of_dcp(model_or_state_dict, source.metadata)
    elif choice is not None and choice.loadable:
        facts = _facts_of_files(model_or_state_dict, choice)
    else:
        raise DCPLoadError(
            "the checkpoint cannot be read",
            rank=who.rank,
            checkpoint_step=source.step_value,
            path=source.path,
            reasons=[finding.text for finding in source.findings],
        )
    facts = replace(
        facts,
        path=source.path,
        step=source.step_value,
        step_source=None if source.step is None else source.step.source,
    )
    report = LoadReport(
        load_id=identity.load_id(who.run_id, who.attempt, "audit", 0),
        ordinal=0,
        identity=who,
        framework="torch" if source.metadata is None else "dcp",
        entry_point="ckpt_sentry.audit",
        verdict=verdict(coverage=facts.coverage, findings=facts.findings),
        started_at=started,
        ended_at=time.time(),
        **{name: getattr(facts, name) for name in Facts.__slots__},
    )
    return clean(report)


def _facts_of_dcp(model_or_state_dict: Any, metadata: DcpMetadata) -> Facts:
    sides = _sides(model_or_state_dict, metadata)
    found = examine(sides.model, sides.checkpoint, allow_missing=config.settings().allow_missing)
    facts = Facts(format="DCP", checkpoint=metadata.summary(), model=_summary(sides.model))
    return facts.examined(replace(found, findings=dcp_keys.advised(found.findings)))


def _facts_of_files(model: Any, choice: folder.Choice) -> Facts:
    held = choice.inventory
    wanted = needed(model, inventory_of(model), held)
    found = examine(wanted, held, allow_missing=(*config.settings().allow_missing, *MAY_BE_MISSING))
    summary = CheckpointSummary(held.keys, held.elements, choice.bytes, files=len(choice.files))
    facts = Facts(format=choice.format, checkpoint=summary, model=_summary(wanted), findings=choice.findings)
    return facts.examined(found)


def _summary(model: Inventory) -> ModelSummary:
    return ModelSummary(model.keys, model.elements, model.nbytes)


@dataclass(frozen=True, slots=True)
class _Sides:
    """
    What is asked for, and what the checkpoint has of it; `stored` are the asked keys as the checkpoint names them.
    """

    model: Inventory
    checkpoint: Inventory
    stored: Collection[str]


def _sides(state_dict: Any, metadata: DcpMetadata) -> _Sides:
    """
    Take both sides. The outer name that a saved state has over a module is taken off; a state dict says its own.
    """
    entries = metadata.entries
    if isinstance(state_dict, Mapping):
        model = _inventory(state_dict, entries)
        return _Sides(model, Inventory(entries), model.entries)
    model = _inventory(state_dict.state_dict(), entries)
    outer = outer_name(entries, model.entries)
    return _Sides(model, Inventory(under(outer, entries)), {outer + key for key in model.entries})


def _inventory(state_dict: Mapping[str, Any], saved: Mapping[str, Entry]) -> Inventory:
    from ckpt_sentry.integrations.dcp.entries import model_entry

    plain = {key: _state_of(value) for key, value in state_dict.items()}
    seen: dict[tuple[Any, Any], Entry] = {}
    asked = dcp_keys.asked(plain, saved.keys())
    return Inventory({key: model_entry(value, seen) for key, value in asked.items()})


def _state_of(value: Any) -> Any:
    is_stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return value.state_dict() if is_stateful else value


def _is_lacking(found: Examination) -> bool:
    return any(one.code == "missing_keys" and one.level != "info" for one in found.findings)


def _taken(items: Iterable[Any]) -> Iterable[Any]:
    return itertools.islice(items, MOST_ITEMS) if hasattr(type(items), "__next__") else items


def _rebuilt(kind: type[DCPLoadError], message: str, fields: Mapping[str, Any]) -> DCPLoadError:
    return kind(message, **fields)
