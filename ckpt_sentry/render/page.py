"""
What a report is written on: lines of styled segments, a column of labels, one width.

Nothing here writes to a terminal; see `terminal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.render import cells

Style = Literal["", "name", "good", "bad", "warning", "label", "key", "quiet", "command"]


class Segment(NamedTuple):
    """
    A stretch of text in one style.
    """

    text: str
    style: Style = ""


Line = tuple[Segment, ...]

LABEL_CELLS: Final = 12
MIN_CELLS: Final = 40


@dataclass(frozen=True, slots=True)
class Glyphs:
    """
    The characters beyond ASCII that a report uses.
    """

    good: str = "✓"
    bad: str = "✗"
    warning: str = "!"
    unknown: str = "–"
    dot: str = " · "
    arrow: str = "→"
    more: str = "…"

    @property
    def text(self) -> str:
        return self.good + self.bad + self.unknown + self.dot + self.arrow + self.more


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs(good="ok", bad="x", unknown="-", dot=" - ", arrow="->", more="...")
"""For streams whose encoding cannot hold the others."""


def plain(lines: Iterable[Line]) -> str:
    """
    Lines as text without styles, each with a newline at its end.
    """
    return "".join("".join(segment.text for segment in line).rstrip() + "\n" for line in lines)


class Page:
    """
    Collects lines. Every string is made visible, wrapped or cut to the width (in cells, 40 at least).
    """

    def __init__(self, cells_wide: int, glyphs: Glyphs) -> None:
        self.width = max(MIN_CELLS, cells_wide)
        self.glyphs = glyphs
        self.lines: list[Line] = []

    @property
    def room(self) -> int:
        return self.width - 2 - LABEL_CELLS

    def header(self, glyph: Segment, title: str, facts: Sequence[str]) -> None:
        """
        The first line: the name of the agent, how it went, and facts, on as many lines as they need.
        """
        start = f"ckpt_sentry {glyph.text} "
        room = self.width - cells.width(start)
        lines: list[str] = []
        for fact in map(cells.visible, (title, *facts)):
            joined = f"{lines[-1]}{self.glyphs.dot}{fact}" if lines else fact
            if not lines or cells.width(joined) <= room:
                lines[-1:] = [joined]
            else:
                lines.append(fact)
        first, *rest = [row for line in lines for row in cells.wrap(line, room)] or [""]
        name = Segment("ckpt_sentry ", "name"), glyph, Segment(" ")
        self.lines.append((*name, Segment(first, glyph.style)))
        self.lines += [(Segment("  " + line, glyph.style),) for line in rest[:2]]

    def section(self, label: str, text: str, style: Style = "", *, at_most: int = 4) -> None:
        """
        A label and a text beside it, wrapped to `at_most` lines.
        """
        rows = list(cells.wrap(cells.visible(text[: at_most * self.width * 2]), self.room))
        if len(rows) > at_most:
            room = self.room - cells.width(self.glyphs.more)
            rows[at_most - 1 :] = [cells.split(rows[at_most - 1], room)[0] + self.glyphs.more]
        for place, row in enumerate(rows or [""]):
            self.lines.append((_label(label if place == 0 else ""), Segment(row, style)))

    def row(self, text: str, style: Style = "") -> None:
        """
        One line in the text column, cut in its middle where it is too wide.
        """
        self.lines.append((_label(""), Segment(cells.cut(cells.visible(text), self.room, self.glyphs.more), style)))

    def rows(self, text: str, style: Style = "") -> None:
        """
        As `row`, but a text that is too wide goes on in the next line: nothing is lost.
        """
        for line in cells.wrap(cells.visible(text), self.room):
            self.lines.append((_label(""), Segment(line, style)))

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """
        Rows of columns, aligned. Nothing is cut: a first column that is too wide has its line, the others the next.
        """
        shown = [[cells.visible(column) for column in row] for row in rows]
        gap = " " * 4
        widths = [max(map(cells.width, column)) for column in zip(*shown, strict=True)] if shown else []
        room = self.room - sum(widths[1:]) - len(gap) * (len(widths) - 1)
        first = max((wide for row in shown if (wide := cells.width(row[0])) <= room), default=0)
        for row in shown:
            others = gap.join(cells.pad(text, wide) for text, wide in zip(row[1:], widths[1:], strict=True)).rstrip()
            if cells.width(row[0]) > room:
                self.rows(row[0], "key")
                self.lines += [(_label(""), Segment("  " + line)) for line in cells.wrap(others, self.room - 2)]
            else:
                self.lines.append((_label(""), Segment(cells.pad(row[0], first), "key"), Segment(gap + others)))


def _label(label: str) -> Segment:
    return Segment("  " + cells.pad(label, LABEL_CELLS), "label")
