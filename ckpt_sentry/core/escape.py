"""
Names from a checkpoint are data: made harmless for terminals, logs and markup, and kept short.
"""

from __future__ import annotations

import re
from typing import Final

from ckpt_sentry.masking import mask_text

LONGEST: Final = 300
"""Characters of a name that are shown."""

_LOOKED_AT: Final = 8_192
"""Characters of a name that are looked at: it may have millions."""

_SYNTAX = re.compile(r"[\\{},]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LONG: Final = {escaped: char for char, escaped in _SHORT.items()}
_ESCAPED = re.compile(r"\\(?:[\\{},nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_LAST_OF_ONE_BYTE: Final = 0xFF
_LAST_OF_TWO_BYTES: Final = 0xFFFF


def escape(name: str) -> str:
    r"""
    Write a name so that it is one line of visible characters, and `unescape` gives it back.

    A backslash goes before the characters of the fold syntax: `{ } , \`. What is not printable becomes `\n`, `\x1b`,
    `\u202e` or `\U000e0001`: control and format characters (with them the ones that turn the direction of text), line
    separators, spaces other than " ", unpaired surrogates.
    """
    if name.isprintable() and not _SYNTAX.search(name):
        return name
    return "".join(map(_escape_one, name))


def _escape_one(char: str) -> str:
    if char in "\\{},":
        return "\\" + char
    if char.isprintable():
        return char
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    if code <= _LAST_OF_ONE_BYTE:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= _LAST_OF_TWO_BYTES else f"\\U{code:08x}"


def unescape(text: str) -> str:
    """
    Take back what `escape` did. Text that no escape begins with stays as it is.
    """
    return _ESCAPED.sub(_unescape_one, text) if "\\" in text else text


def _unescape_one(match: re.Match[str]) -> str:
    escaped = match[0]
    if escaped in _LONG:
        return _LONG[escaped]
    return escaped[1] if escaped[1] in "\\{}," else chr(int(escaped.removeprefix(escaped[:2]), 16))


def cut(text: str, longest: int = LONGEST, more: int = 0) -> str:
    """
    Shorten escaped text to `longest` characters and say how many more there are; never amid an escape.

    `more` are characters that had been left out before.
    """
    if len(text) <= longest and not more:
        return text
    end = longest
    for match in _ESCAPED.finditer(text, max(0, longest - 20)):
        if match.start() < longest < match.end() and not _starts_amid(text, match.start()):
            end = match.start()
    return f"{text[:end]}... (+{len(text) - end + more} characters)"


def _starts_amid(text: str, position: int) -> bool:
    # An odd run of backslashes before a position means that the one there is itself escaped.
    before = len(text[:position]) - len(text[:position].rstrip("\\"))
    return before % 2 == 1


def shown(name: str) -> str:
    """
    Give a name as it may be printed: without credentials, escaped, then cut.
    """
    head = name[:_LOOKED_AT]
    return cut(escape(mask_text(head)), more=len(name) - len(head))
