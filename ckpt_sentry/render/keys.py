"""
The rows of keys below a finding: folded names, shapes side by side, types before and after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckpt_sentry.collector.aggregate import RankFinding
from ckpt_sentry.core import codes
from ckpt_sentry.core.escape import LONGEST, cut
from ckpt_sentry.core.report import KeyList, LoadReport
from ckpt_sentry.patching.later import later
from ckpt_sentry.render import words
from ckpt_sentry.render.page import Page

if TYPE_CHECKING:
    from ckpt_sentry.render.folded import size as folded_size
    from ckpt_sentry.render.stack import first_line
else:
    first_line = later("ckpt_sentry.render.stack:first_line")
    folded_size = later("ckpt_sentry.render.folded:size")

_LONGEST_FOLD: Final = 1_000
"""Characters of folded names; records may hold any."""
SOME_ROWS: Final = 6
"""Rows of a list in a block."""


def brief_key(key: str) -> str:
    """
    A name, or several folded ones, as short as those that we write ourselves: records may hold any.
    """
    return cut(key, _LONGEST_FOLD if "{" in key else LONGEST)


def headline(found: RankFinding) -> str:
    """
    The first line of a finding; without the keys that it lists where they stand in rows below it.
    """
    return first_line(codes.sentence(found.code, found.text, found.facts).headline)


def brief(found: RankFinding) -> str:
    """
    A finding in one line, with the first of its keys and nothing beside them.
    """
    return first_line(codes.sentence(found.code, found.text, found.facts).brief)


def details(page: Page, report: LoadReport, found: RankFinding, rows: int) -> None:
    """
    What a report has to show below a finding, in at most so many rows.
    """
    code = found.code
    if code == "missing_keys":
        keys_of(page, report.missing, rows)
    elif code == "unexpected_keys":
        keys_of(page, report.unexpected, rows)
    elif code == "shape_mismatch":
        mismatches(page, report, rows)
    elif code == "dtype_cast":
        casts = report.casts[:rows]
        page.table(
            [
                (brief_key(cast.keys), f"{cast.checkpoint_dtype} {page.glyphs.arrow} {cast.model_dtype}")
                for cast in casts
            ]
        )
        _more(page, sum(cast.count for cast in report.casts[rows:]))
    elif code == "renamed_keys" and report.rename is not None:
        rename = report.rename
        if codes.fact(found.facts, "before") is not None:
            return
        would = f"{words.count(rename.count, 'key')}: {words.percent(rename.coverage)} would load"
        if rename.example is not None:
            old, new = rename.example
            page.table([(f"{old} {page.glyphs.arrow} {new}", would)])


def keys_of(page: Page, keys: KeyList, rows: int) -> None:
    """
    A list of folded keys; one that is too wide goes on in the next line.
    """
    for key in keys.keys[:rows]:
        page.rows(brief_key(key), "key")
    hidden = keys.count - sum(map(folded_size, keys.keys[:rows])) if len(keys.keys) > rows else keys.omitted
    _more(page, hidden)


def mismatches(page: Page, report: LoadReport, rows: int) -> None:
    """
    Keys with both of their shapes, in columns.
    """
    shown = report.mismatched[:rows]
    page.table(
        [
            (
                brief_key(item.keys),
                f"model {words.shape(item.model_shape)}",
                f"checkpoint {words.shape(item.checkpoint_shape)}",
            )
            for item in shown
        ]
    )
    _more(page, sum(item.count for item in report.mismatched[rows:]))


def _more(page: Page, keys: int) -> None:
    if keys > 0:
        page.row(f"{page.glyphs.more} {words.count(keys, 'more key')}", "quiet")
