"""
What lies beside a checkpoint that is missing or broken: other steps, a name that was meant, an earlier save.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpt_sentry.formats.dcp.files import absolute, examine, listing, needed_sizes
from ckpt_sentry.formats.step import step_in_name
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.formats.dcp import metadata as dcp_metadata
    from ckpt_sentry.formats.torch_save import unpickle
else:
    unpickle = later("ckpt_sentry.formats.torch_save.unpickle")
    dcp_metadata = later("ckpt_sentry.formats.dcp.metadata")

_MAX_COMPARED = 500
_MAX_TRIED = 20
_LENGTHS_DIFFER = 2
_LIKENESS = 0.75
_MAX_METADATA = 4 * 2**20


def steps_among(names: Iterable[str]) -> tuple[str, ...]:
    """
    The names that say a step, the highest first.
    """
    known = [(step, name) for name in names if (step := step_in_name(name)) is not None]
    return tuple(name for _, name in sorted(known, reverse=True))


def meant(name: str, names: Iterable[str]) -> str | None:
    """
    The one name that `name` is likely a slip of. Two names that differ in their step are no slip of each other.
    """
    step = step_in_name(name)
    candidates = sorted(
        other
        for other in names
        if abs(len(other) - len(name)) <= _LENGTHS_DIFFER and (step is None or step_in_name(other) == step)
    )
    found = difflib.get_close_matches(name, candidates[:_MAX_COMPARED], 1, _LIKENESS)
    return found[0] if found else None


def earlier(path: str) -> str | None:
    """
    The path of another finished checkpoint beside `path`: the next lower step if there is one, else the highest.
    """
    parent, name = os.path.split(absolute(path))
    beside = listing(parent)
    if beside is None:
        return None
    step = step_in_name(name)
    others = [other for other in steps_among(beside.folders) if other != name]
    if step is not None:
        others.sort(key=lambda other: (step_in_name(other) or 0) > step)
    best = first_whole(parent, others)
    return None if best is None else os.path.join(parent, best)


def first_whole(parent: str, names: Iterable[str]) -> str | None:
    """
    The first of some folders in `parent` that is a checkpoint without gaps; few are tried.
    """
    tried = [name for name in names if os.path.isfile(os.path.join(parent, name, dcp_metadata.FILE_NAME))][:_MAX_TRIED]
    return next((name for name in tried if is_whole(os.path.join(parent, name))), None)


def is_whole(path: str) -> bool:
    """
    Whether the folder `path` is a checkpoint all of whose files are there, by their sizes. One with so much metadata
    that it would take long to read is taken at its word.
    """
    try:
        if os.path.getsize(os.path.join(path, dcp_metadata.FILE_NAME)) > _MAX_METADATA:
            return True
        needed = needed_sizes(dcp_metadata.read(path))
    except (OSError, unpickle.UnreadablePickle) as failure:
        let_through(failure)
        return False
    shards = examine(path, needed, listing(path))
    return not (shards.missing or shards.short)


def newer_unfinished(path: str) -> str | None:
    """
    The folder beside `path` with the highest step, if that is higher than its own and it has shards but no metadata.
    """
    parent, name = os.path.split(absolute(path))
    step = step_in_name(name)
    beside = None if step is None else listing(parent, _MAX_COMPARED)
    if step is None or beside is None:
        return None
    newest = next(iter(steps_among(beside.folders)), name)
    if (step_in_name(newest) or 0) <= step:
        return None
    inside = listing(os.path.join(parent, newest), _MAX_COMPARED)
    if (
        inside is None
        or dcp_metadata.FILE_NAME in inside.files
        or not any(map(dcp_metadata.SHARD_NAME.match, inside.files))
    ):
        return None
    return newest


def finished_below(path: str, folders: Iterable[str]) -> tuple[str, ...]:
    """
    The folders in `path` that are finished checkpoints, those with the highest steps first; few are tried.
    """
    names = list(folders)
    steps = steps_among(names)
    order = [*steps, *sorted(set(names) - set(steps))][:_MAX_TRIED]
    return tuple(name for name in order if os.path.isfile(os.path.join(path, name, dcp_metadata.FILE_NAME)))
