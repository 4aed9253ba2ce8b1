"""
Whether a model is but built too deep for a checkpoint: whole layers at the end of a stack are all that it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

_NUMBER: Final = re.compile(r"(?<=\.)[0-9]+(?=\.)")


def shallower(model: Collection[str], checkpoint: Collection[str], missing: Iterable[str]) -> str | None:
    """
    Say how many layers the checkpoint has, if that explains every missing key; else None.

    The layers that are there must be the first ones of the stack, alike in their keys to those that are not. Several
    stacks (a model and its optimizer's state) must agree.
    """
    lost = _lost(missing, checkpoint)
    if not lost:
        return None
    depths = {(path.rpartition(".")[2], _depth(path, numbers, model, checkpoint)) for path, numbers in lost.items()}
    if len(depths) > 1:
        return None
    name, depth = depths.pop()
    if depth is None:
        return None
    noun = name if name.isalpha() and name.endswith("s") else "layers"
    if depth == 1:
        return f"The checkpoint has one of {noun}, 0: build the model with 1."
    return f"The checkpoint has {noun} 0-{depth - 1}: build the model with {depth:,} {noun}."


def _lost(missing: Iterable[str], checkpoint: Iterable[str]) -> dict[str, set[int]]:
    """
    The stacks by their path, with the numbers of the layers of which the checkpoint has nothing; empty where a key
    outside such a layer is missing too.
    """
    held = {key[: match.end()] for key in checkpoint for match in _NUMBER.finditer(key)}
    found: dict[str, set[int]] = {}
    for key in missing:
        first = next((match for match in _NUMBER.finditer(key) if key[: match.end()] not in held), None)
        if first is None:
            return {}
        found.setdefault(key[: first.start() - 1], set()).add(int(first[0]))
    return found


def _depth(path: str, lost: set[int], model: Iterable[str], checkpoint: Iterable[str]) -> int | None:
    """
    The number of layers that the checkpoint has of a stack, or None where they are not the first ones of it.
    """
    wanted, held = _layers(path, model), _layers(path, checkpoint)
    depth = len(wanted) - len(lost)
    if depth < 1 or held.keys() != set(range(depth)) or wanted.keys() != set(range(len(wanted))):
        return None
    return depth if all(wanted[number] == wanted[0] for number in wanted) else None


def _layers(path: str, keys: Iterable[str]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for key in keys:
        if key.startswith(f"{path}."):
            number, _, rest = key[len(path) + 1 :].partition(".")
            if number.isdecimal() and rest:
                found.setdefault(int(number), set()).add(rest)
    return found
