"""
A stack as rows: the program's own frames first, then the innermost ones of libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ckpt_sentry.core.frames import is_library
from ckpt_sentry.render import cells

_FRAME: Final = re.compile(r'\s*File "(.*)", line (\d+), in (.*)')
_INSTALLED: Final = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_LEAST_PATH: Final = 16


class Frame(NamedTuple):
    """
    One frame: where it is, the function, and its line of code ("" where that is not known).
    """

    file: str
    line: str
    function: str
    code: str = ""


def parted(text: str) -> tuple[str, list[str]]:
    """
    The first line of a text and the lines below it: a stack, or more of the same.

    A first line that ends in a colon has said nothing yet: what comes next is drawn up to it, unless it is a stack.
    """
    first, *rest = text.strip().splitlines() or [""]
    while rest and first.endswith(":") and not _FRAME.fullmatch(rest[0]):
        first = f"{first} {rest.pop(0).strip()}".rstrip()
    return first if rest else first.rstrip(": "), rest


def first_line(text: str) -> str:
    """
    The first line of a text that says something, "" of an empty one.
    """
    return parted(text)[0]


def rows(stack: Sequence[str], most: int, width: int, mark: str) -> list[str]:
    """
    The lines of a stack (as Python prints them, outermost first) in at most `most` rows of `width` cells.

    The frames of the program come first, the last of them when there are too many; a path is cut at its left.
    """
    frames = list(_frames(stack))
    if not frames:
        return list(stack[-most:])
    own = [frame for frame in frames if not is_library(frame.file)]
    others = [frame for frame in frames if is_library(frame.file)]
    shown = own[-(most - bool(others)) :] if most > 1 else own[-most:]
    left = most - len(shown)
    shown = [*shown, *(others[-left:] if left > 0 else ())]
    return [_row(frame, width, mark) for frame in shown]


def _frames(stack: Iterable[str]) -> Iterable[Frame]:
    found: Frame | None = None
    for line in stack:
        match = _FRAME.fullmatch(line)
        if match is not None:
            if found is not None:
                yield found
            found = Frame(match[1], match[2], match[3])
        elif found is not None and line.startswith(" "):
            found = found._replace(code=line.strip())
    if found is not None:
        yield found


def _row(frame: Frame, width: int, mark: str) -> str:
    rest = cells.visible(f":{frame.line} in {frame.function}" + (f": {frame.code}" if frame.code else ""))
    file = cells.visible(_INSTALLED.sub("", frame.file))
    room = max(_LEAST_PATH, width - cells.width(rest))
    if cells.width(file) > room:
        file = mark + cells.split(file[::-1], room - cells.width(mark))[0][::-1]
    whole = file + rest
    if cells.width(whole) <= width:
        return whole
    return cells.split(whole, max(0, width - cells.width(mark)))[0] + mark
