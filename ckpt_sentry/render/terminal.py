"""
Reports on a terminal or any other text stream: colour where it is wanted, one write for each, and never an error.

A stream without colour is written to directly; `rich` is imported for colour alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

from ckpt_sentry.collector.aggregate import Aggregate
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.render import text
from ckpt_sentry.render.page import ASCII, UNICODE, Glyphs, Line

_STYLES: Final = {
    "name": "dim",
    "good": "green",
    "bad": "bold red",
    "warning": "yellow",
    "label": "bold",
    "key": "cyan",
    "quiet": "dim",
    "command": "bold cyan",
}
_DEFAULT_CELLS: Final = 100
_MAX_CELLS: Final = 200


def show(one: Aggregate, stream: TextIO | None = None, hints: Sequence[str] | None = None) -> bool:
    """
    Print the report of a load on `stream` (None: the process's standard error of this moment), with `hints` as in
    `text.block`.

    Returns whether it could be written. A closed, full or absent stream, or one that cannot hold the text, is no error.
    """
    stream = sys.stderr if stream is None else stream
    if not is_worth_a_word(one):
        return True
    cells, glyphs = width(stream), glyphs_for(stream)
    lines = [text.line(one, cells, glyphs)] if _is_well(one) else text.block(one, cells, glyphs, hints=hints)
    return write(lines, stream)


def is_worth_a_word(one: Aggregate) -> bool:
    """
    Whether `show` shows it: all but a good `load_state_dict`, which everybody calls all the time. Where the agent has
    renamed keys, it is never without a word.
    """
    is_aligned = any(found.code == "renamed_keys" for found in one.findings)
    return one.framework != "torch" or one.verdict != "ok" or is_aligned


def _is_well(one: Aggregate) -> bool:
    """
    Whether one line does: a good load, or a part that was asked for.
    """
    if one.verdict == "partial":
        return one.error is None and all(found.level == "info" for found in one.findings)
    return one.verdict == "ok"


def write(lines: Sequence[Line], stream: TextIO | None) -> bool:
    """
    Write lines by one call of `stream.write`, so that those of several processes do not mix; whether it worked.
    """
    if stream is None:
        return False
    try:
        whole = _coloured(lines) if wants_colour(stream) else text.plain(lines)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(whole.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError, LookupError, AttributeError) as error:
        let_through(error)
        return False
    return True


def wants_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """
    Colour on a terminal that can; `NO_COLOR` (https://no-color.org) forbids it, `FORCE_COLOR` demands it.
    """
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return environ.get("TERM") != "dumb" and _is_terminal(stream)


def width(stream: TextIO | None, environ: Mapping[str, str] = os.environ) -> int:
    """
    Cells in a line: `COLUMNS`, else the terminal's, else 100; 200 at most where the terminal is wider.
    """
    with contextlib.suppress(ValueError):
        if (columns := int(environ.get("COLUMNS", "0"))) > 0:
            return columns
    if stream is not None and _is_terminal(stream):
        try:
            return min(os.get_terminal_size(stream.fileno()).columns or _DEFAULT_CELLS, _MAX_CELLS)
        except (OSError, ValueError, AttributeError) as error:
            let_through(error)
    return _DEFAULT_CELLS


def glyphs_for(stream: TextIO | None) -> Glyphs:
    """
    The glyphs that the stream's encoding can hold.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        UNICODE.text.encode(encoding)
    except (UnicodeError, LookupError):
        return ASCII
    return UNICODE


def _is_terminal(stream: TextIO) -> bool:
    try:
        return bool(stream.isatty())
    except (OSError, ValueError, AttributeError) as error:
        let_through(error)
        return False


def _coloured(lines: Sequence[Line]) -> str:
    from rich.console import Console
    from rich.text import Text

    whole = Text(no_wrap=True, end="")
    for line in lines:
        for segment in line:
            whole.append(segment.text, _STYLES.get(segment.style))
        whole.append("\n")
    into = io.StringIO()
    # The lines have their width already: rich must neither wrap nor cut them.
    console = Console(file=into, force_terminal=True, color_system="standard", width=1 << 16, highlight=False)
    console.print(whole, end="", soft_wrap=True)
    return into.getvalue()
