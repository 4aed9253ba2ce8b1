"""
What lies beside a checkpoint that is missing or broken: other steps, a name that was meant, an earlier save.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from ckpt_sentry.checkpoints.dcp_files import absolute, listing
from ckpt_sentry.checkpoints.dcp_metadata import FILE_NAME
from ckpt_sentry.checkpoints.step import step_in_name

_MAX_COMPARED = 500
_MAX_TRIED = 20
_LENGTHS_DIFFER = 2
_LIKENESS = 0.75


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
    for other in others[:_MAX_TRIED]:
        if os.path.isfile(os.path.join(parent, other, FILE_NAME)):
            return os.path.join(parent, other)
    return None


def finished_below(path: str, folders: Iterable[str]) -> tuple[str, ...]:
    """
    The folders in `path` that are finished checkpoints, those with the highest steps first; few are tried.
    """
    names = list(folders)
    steps = steps_among(names)
    order = [*steps, *sorted(set(names) - set(steps))][:_MAX_TRIED]
    return tuple(name for name in order if os.path.isfile(os.path.join(path, name, FILE_NAME)))
