"""
`ckpt-sentry explain CODE`: what a finding or a verdict means, and what to do.
"""

from __future__ import annotations

import difflib
import shutil
import sys
from typing import Final

import click

from ckpt_sentry.core import codes
from ckpt_sentry.render.cells import visible

_NEAR: Final = 3
"""Names that are like the one that was not found."""


@click.command("explain", short_help="Say what a finding or a verdict means.")
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Say what CODE means: a finding or a verdict of a report. Without CODE, list them all.

    \b
    ckpt-sentry explain renamed_keys
    """
    if code is None:
        _list()
        return
    name = code.strip().lower().replace("-", "_")
    found = codes.BY_NAME.get(name)
    if found is None and name not in codes.VERDICTS:
        near = difflib.get_close_matches(name, [*codes.BY_NAME, *codes.VERDICTS], _NEAR)
        hint = f"; did you mean {', '.join(near)}?" if near else ": `ckpt-sentry explain` lists them"
        click.echo(f"ckpt-sentry explain: there is no finding {visible(code)[:80]}{hint}", err=True)
        sys.exit(2)
    about = "verdict" if found is None else f"about {found.group}"
    meaning = codes.VERDICTS[name] if found is None else found.meaning
    click.echo(f"{name} ({about})\n")
    click.echo(click.wrap_text(meaning, width=_width(), initial_indent="  ", subsequent_indent="  "))
    if found is not None and found.step is not None:
        click.echo("\n" + click.wrap_text(f"Next: {found.step}", _width(), "  ", "  "))
    if found is not None and found.explains:
        others = ", ".join(sorted(found.explains))
        click.echo("\n" + click.wrap_text(f"It explains: {others}.", _width(), "  ", "  "))


def _list() -> None:
    formatter = click.HelpFormatter(width=_width())
    with formatter.section("Verdicts"):
        formatter.write_dl(list(codes.VERDICTS.items()))
    for group in dict.fromkeys(code.group for code in codes.CATALOGUE):
        with formatter.section(f"About {group}"):
            formatter.write_dl([(code.name, _first(code.meaning)) for code in codes.CATALOGUE if code.group == group])
    click.echo(formatter.getvalue().rstrip("\n"))


def _first(meaning: str) -> str:
    sentence, point, _ = meaning.partition(". ")
    return sentence + point.strip()


def _width() -> int:
    return min(click.get_current_context().terminal_width or shutil.get_terminal_size().columns, 100)
