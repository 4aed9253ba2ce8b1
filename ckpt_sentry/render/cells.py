"""
Text in terminal cells: how wide it is, where to break it, what of it may be shown.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

_NUMBER: Final = re.compile(r"\(?<?[0-9][0-9.,]*")
_UNIT: Final = re.compile(r"(?:B|[kMGTP]B|s|min|h|%)[).,:;]*")
_BREAKS: Final = (",", ".", "}", "/")


def visible(text: str) -> str:
    r"""
    Text from outside, made harmless: what is not printable (control and format characters, those that turn the
    direction of text, unpaired surrogates) becomes `\x1b`, `\u202e` or `\U000e0001`. Line breaks become spaces.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _code(char) for char in text)


def _code(char: str) -> str:
    code = ord(char)
    if char in "\n\r\t":
        return " "
    if code <= 0xFF:  # noqa: PLR2004 - the widest of two digits
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004 - the widest of four


def width(text: str) -> int:
    """
    How many cells a text takes: two for wide characters (UAX #11: W and F), none for combining marks.
    """
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def pad(text: str, cells: int) -> str:
    """
    A text with spaces after it, to at least so many cells.
    """
    return text + " " * (cells - width(text))


def cut(text: str, cells: int, mark: str = "…") -> str:
    """
    A text of at most so many cells; what goes is its middle, since keys and paths differ at both ends.
    """
    if width(text) <= cells:
        return text
    room = max(0, cells - width(mark))
    head, _ = split(text, room - room // 2)
    tail, _ = split(text[::-1], room // 2)
    return head + mark + tail[::-1]


def wrap(text: str, cells: int) -> Iterator[str]:
    """
    The lines of a text, broken between words, or within one that is wider than `cells` (at least 2).

    A number stays with its unit. Within a word the break comes after a comma, dot, slash or closing brace if it can.
    """
    line = ""
    for word in _words(text, cells):
        joined = f"{line} {word}" if line else word
        if width(joined) <= cells:
            line = joined
            continue
        if line:
            yield line
        line = word
        while width(line) > cells:
            head, _ = split(line, cells)
            if (place := max(map(head.rfind, _BREAKS)) + 1) * 2 > len(head):
                head = head[:place]
            yield head
            line = line[len(head) :]
    if line:
        yield line


def _words(text: str, cells: int) -> Iterator[str]:
    number = ""
    for word in text.split(" "):
        if number:
            if _UNIT.fullmatch(word) and width(number) + 1 + width(word) <= cells:
                yield f"{number} {word}"
                number = ""
                continue
            yield number
            number = ""
        if _NUMBER.fullmatch(word):
            number = word
        else:
            yield word
    if number:
        yield number


def split(text: str, cells: int) -> tuple[str, str]:
    """
    The longest beginning of a text that fits so many cells, and the rest.
    """
    used = 0
    for position, char in enumerate(text):
        used += _cells(char)
        if used > cells:
            return text[:position], text[position:]
    return text, ""
