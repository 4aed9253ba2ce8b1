"""
An aggregate for a person: one line for a good load, one block for any other, the cause first.

Pure: aggregates in, lines of styled segments out (see `page`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ckpt_sentry.audit import ranks
from ckpt_sentry.audit.report import LoadReport
from ckpt_sentry.collector.aggregate import Aggregate, RankFinding
from ckpt_sentry.collector.summary import STILL_WAITING, doing
from ckpt_sentry.render import words
from ckpt_sentry.render.keys import SOME_ROWS, details, first_line, headline, keys_of, mismatches
from ckpt_sentry.render.page import UNICODE, Glyphs, Line, Page, Segment, Style, plain

__all__ = ["block", "full", "line", "plain"]

MAX_LINES: Final = 30
"""Lines of a block."""

_STACK_ROWS: Final = 6
_CAUSES: Final = 5
_NEXT_STEPS: Final = 3

_WRONG: Final = {
    "no_op": "loaded nothing into the model",
    "wrong_values": "loaded, but the values are wrong",
    "diverged": "loaded different checkpoints on different ranks",
    "stalled": "hangs",
    "failed": "failed",
    "partial": "loaded a part of the model only",
}


def line(one: Aggregate, width: int = 100, glyphs: Glyphs = UNICODE) -> Line:
    """
    The one line of a good load, with its first finding if it has any.
    """
    page = Page(10_000, glyphs)
    facts = [*_step(one), *_world(one), *_loaded(one), *_took(one), *_attempt(one)]
    first, *others = facts or [one.entry_point]
    title = f"{one.entry_point}  {first}" if facts else first
    notes = [found for found in one.findings if found.code != "peer_failed"]
    if notes:
        more = f" (+{len(notes) - 1} more)" if len(notes) > 1 else ""
        others.append(headline(notes[0])[: 2 * width].rstrip(". ") + more)
    page.header(_glyph(one, glyphs), title, others)
    return page.lines[0]


def block(one: Aggregate, width: int = 100, glyphs: Glyphs = UNICODE, limit: int = MAX_LINES) -> list[Line]:
    """
    What a load came to, in at most `limit` lines of at most `width` cells (40 at least): what, where, why, what now.
    """
    page = Page(width, glyphs)
    _header(page, one)
    _checkpoint(page, one)
    _reasons(page, one, rows=SOME_ROWS)
    _others(page, one)
    _coverage(page, one)
    tail = Page(width, glyphs)
    steps = _next_steps(one)
    for place, step in enumerate(steps[:_NEXT_STEPS]):
        tail.section("" if place else "next", step, at_most=2)
    tail.section("" if steps else "next", f"ckpt-sentry report {one.run_id[:200]}    every key", "command", at_most=2)
    room = limit - len(tail.lines)
    if len(page.lines) > room:
        left_out = len(page.lines) - room + 1
        del page.lines[room - 1 :]
        page.row(f"{glyphs.more} {words.count(left_out, 'more line')}", "quiet")
    return page.lines + tail.lines


def full(one: Aggregate, width: int = 100, glyphs: Glyphs = UNICODE, rows: int | None = 200) -> list[Line]:
    """
    The block of a load without its limit, then every key, finding and group; `rows` bounds each list (None: not).
    """
    most = 1 << 30 if rows is None else rows
    page = Page(width, glyphs)
    _header(page, one)
    _checkpoint(page, one)
    _reasons(page, one, rows=most)
    _others(page, one)
    _coverage(page, one)
    for place, step in enumerate(_next_steps(one)):
        page.section("" if place else "next", step)
    _all_keys(page, one, most)
    _all_findings(page, one, most)
    _all_groups(page, one, most)
    _durations(page, one)
    return page.lines


def _glyph(one: Aggregate, glyphs: Glyphs) -> Segment:
    if one.verdict == "ok":
        return Segment(glyphs.good, "good")
    if one.verdict in ("partial", "diverged"):
        return Segment(glyphs.warning, "warning")
    return Segment(glyphs.bad, "bad")


def _header(page: Page, one: Aggregate) -> None:
    if one.verdict == "ok":
        facts = [*_world(one), *_loaded(one), *_took(one), *_attempt(one)]
        page.header(_glyph(one, page.glyphs), one.entry_point, facts)
        return
    what = _WRONG[one.verdict]
    error = one.error
    if error is not None and one.verdict != "wrong_values" and error.type.rsplit(".", 1)[-1] == "LowCoverageError":
        what = "refused" + (f": {_supplied(one)} would load" if _supplied(one) else "")
    if one.verdict == "stalled" and all(row.why != STILL_WAITING for row in one.unfinished):
        what = "has not ended"
    title = f"{one.entry_point} {what}"
    if one.verdict in ("failed", "stalled") and one.world_size > 1:
        affected = one.failed_ranks if one.verdict == "failed" else _waiting(one)
        title += f" on {affected:,} of {words.count(one.world_size, 'rank')}" if affected else ""
    title += f" after {words.seconds(max(0.0, one.ended_at - one.started_at))}"
    more = []
    if error is not None:
        first = f"rank {error.first_rank} first" if one.world_size > 1 and not _was_kept_waiting(one) else ""
        first += " by the machines' clocks" if first and error.order_by == "clock" else ""
        away = any(row.phase is None and error.first_rank in ranks.parse(row.ranks) for row in one.unfinished)
        more.append(", ".join(filter(None, (first, doing(error.phase) if error.phase or away else ""))))
    page.header(_glyph(one, page.glyphs), title, [*filter(None, more), *_attempt(one)])


def _was_kept_waiting(one: Aggregate) -> bool:
    """
    Whether the first error only says that a rank did not come or has failed: then nobody here failed first.
    """
    if one.error is None:
        return False
    first, cause = one.error.first_rank, one.findings[0] if one.findings else None
    if cause is not None and cause.code == "rank_absent" and first not in ranks.parse(cause.ranks):
        return True
    return any(found.code == "peer_failed" and first in ranks.parse(found.ranks) for found in one.findings)


def _waiting(one: Aggregate) -> int:
    return sum(len(ranks.parse(row.ranks)) for row in one.unfinished)


def _attempt(one: Aggregate) -> list[str]:
    return [f"attempt {one.attempt + 1}"] if one.attempt else []


def _world(one: Aggregate) -> list[str]:
    return [words.count(one.world_size, "rank")] if one.world_size > 1 else []


def _step(one: Aggregate) -> list[str]:
    return [] if one.step is None else [f"step {one.step}"]


def _loaded(one: Aggregate) -> list[str]:
    report = _lead(one)
    if report is None:
        return []
    keys = report.model.keys if report.model else report.checkpoint.keys if report.checkpoint else None
    facts = [] if keys is None else [words.count(keys, "key")]
    if one.coverage is not None:
        facts.append(words.percent(one.coverage.judged))
    return [", ".join(facts)] if facts else []


def _took(one: Aggregate) -> list[str]:
    if one.seconds is None:
        return []
    longest = words.seconds(one.seconds.total.max)
    size = f"{words.size(one.bytes_read)} in {longest}" if one.bytes_read else f"in {longest}"
    slowest = f" (slowest: rank {one.seconds.total.slowest_rank})" if one.world_size > 1 else ""
    return [size + slowest]


def _supplied(one: Aggregate) -> str:
    report = _lead(one)
    if report is None or report.model is None or one.coverage is None:
        return ""
    return f"{round(report.model.keys * one.coverage.keys):,} of {words.count(report.model.keys, 'key')}"


def _lead(one: Aggregate) -> LoadReport | None:
    """
    The report whose counts are the aggregate's own.
    """
    wanted = one.missing, one.unexpected, one.mismatched.items, one.coverage
    reports = [group.report for group in one.groups]
    same = (r for r in reports if (r.missing, r.unexpected, r.mismatched, r.coverage) == wanted)
    return next(same, reports[0] if reports else None)


def _checkpoint(page: Page, one: Aggregate) -> None:
    reports = [group.report for group in one.groups]
    summary = next((report.checkpoint for report in reports if report.checkpoint), None)
    facts = [one.path or "path unknown"]
    if one.format:
        facts.append(one.format)
    source = f" ({one.step_source})" if one.step_source else ""
    facts.append(f"step {one.step}{source}" if one.step is not None else "step unknown")
    if summary is not None:
        facts += [f"saved by {words.count(summary.saved_by, 'rank')}"] if summary.saved_by else []
        facts += [words.count(summary.keys, "key"), words.size(summary.bytes)]
    page.section("checkpoint", page.glyphs.dot.join(facts), at_most=6)


def _reasons(page: Page, one: Aggregate, rows: int) -> None:
    """
    The cause, what else there is, and the exception itself where no finding has quoted it.
    """
    found = [finding for finding in one.findings if finding.code != "peer_failed"]
    found = [finding for finding in found if finding is found[0] or not _is_raised(one, finding)]
    for place, finding in enumerate(found[:_CAUSES]):
        label = "also" if place == (found[0].level != "info") else "" if place else "cause"
        _finding(page, one, finding, label, rows)
        if place == 0:
            _raised(page, one, finding)
    if not found:
        _raised(page, one, None)
    if len(found) > _CAUSES:
        page.row(f"{page.glyphs.more} {words.count(len(found) - _CAUSES, 'more finding')}", "quiet")


def _is_raised(one: Aggregate, found: RankFinding) -> bool:
    """
    Whether a finding only quotes the exception, which is said below the cause.
    """
    return found.code == "rank_raised" and one.error is not None and one.error.message in found.text


def _finding(page: Page, one: Aggregate, found: RankFinding, label: str, rows: int) -> None:
    stack = found.text.rstrip().split("\n")[1:]
    whose = _whose(one, found)
    text = headline(found)
    page.section(label, text.rstrip(". ") + whose if whose else text, _style(found), at_most=4)
    for row in stack[-min(rows, _STACK_ROWS if rows <= SOME_ROWS else rows) :]:
        page.row(row, "quiet")
    for report in _reports_of(one, found):
        details(page, report, found, rows)


def _style(found: RankFinding) -> Style:
    return "bad" if found.level == "error" else "warning" if found.level == "warning" else ""


def _whose(one: Aggregate, found: RankFinding) -> str:
    if one.world_size == 1 or not found.ranks or found.text.startswith(("rank ", "ranks ")):
        return ""
    if found.ranks == f"0-{one.world_size - 1}":
        return f" (all {one.world_size:,} ranks)"
    alone = " alone" if found.ranks.isdigit() else ""
    return f" ({words.some_ranks(found.ranks)}{alone})"


def _reports_of(one: Aggregate, found: RankFinding) -> Iterator[LoadReport]:
    """
    The first report that makes this finding.
    """
    for group in one.groups:
        if any(own.code == found.code for own in group.report.findings):
            yield group.report
            return


def _raised(page: Page, one: Aggregate, cause: RankFinding | None) -> None:
    """
    The exception in its own words, unless the cause has quoted it or it is a signal.
    """
    error = one.error
    if error is None or (cause is not None and (cause.code.startswith("rank_") or error.message in cause.text)):
        return
    first = first_line(error.message)
    page.section("raised", f"{error.type}: {first}" if first else error.type, "quiet", at_most=2)


def _others(page: Page, one: Aggregate) -> None:
    """
    Where the ranks stood that have no error of their own.
    """
    peers = ranks.compact(rank for f in one.findings if f.code == "peer_failed" for rank in ranks.parse(f.ranks))
    said = [f for f in one.findings if f.code == "peer_failed"]
    rows = []
    if said and one.world_size > 1:
        only = said[0].text if len(said) == 1 else "ended because another rank failed"
        own = only if "stopped by the launcher" in only else f"{words.some_ranks(peers)}: {only}"
        rows.append(first_line(own))
    told = frozenset(r for f in one.findings if f.code.startswith(("rank_", "peer_")) for r in ranks.parse(f.ranks))
    untold = (row for row in one.unfinished if not told.issuperset(ranks.parse(row.ranks)))
    rows += [f"{words.some_ranks(row.ranks)}: {row.why}, {doing(row.phase)}" for row in untold]
    for place, text in enumerate(rows[:4]):
        page.section("" if place else "others", text, at_most=2)
    if len(rows) > 4:  # noqa: PLR2004
        page.row(f"{page.glyphs.more} {words.count(len(rows) - 4, 'more group')} of ranks", "quiet")


def _coverage(page: Page, one: Aggregate) -> None:
    got = one.coverage
    if got is None or got.judged >= 1:
        return
    verb = "would have loaded" if one.verdict == "failed" else "loaded"
    text = f"{words.percent(got.keys)} of keys, {words.percent(got.elements)} of elements {verb}"
    page.section("coverage", text)


def _next_steps(one: Aggregate) -> list[str]:
    return list(dict.fromkeys(found.next for found in one.findings if found.next))


def _all_keys(page: Page, one: Aggregate, rows: int) -> None:
    shown = {found.code for found in one.findings}
    for code, title, keys in (
        ("missing_keys", "missing from the checkpoint", one.missing),
        ("unexpected_keys", "unexpected: in the checkpoint, not in the model", one.unexpected),
    ):
        if keys.count and code not in shown:
            page.section("keys", f"{words.count(keys.count, 'key')} {title}")
            keys_of(page, keys, max(rows, SOME_ROWS + 1))
    report = _lead(one)
    if one.mismatched.count and "shape_mismatch" not in shown and report is not None:
        page.section("keys", f"{words.count(one.mismatched.count, 'key')} with another shape")
        mismatches(page, report, rows)


def _all_findings(page: Page, one: Aggregate, rows: int) -> None:
    for place, found in enumerate(one.findings[:rows]):
        where = f" ({words.some_ranks(found.ranks)})" if found.ranks and one.world_size > 1 else ""
        text = f"{found.level} {found.code}{where}: {first_line(found.text)}"
        page.section("" if place else "findings", text, at_most=20)


def _all_groups(page: Page, one: Aggregate, rows: int) -> None:
    if one.world_size == 1:
        return
    for place, group in enumerate(one.groups[:rows]):
        error = group.report.error
        why = f"{error.type}: {first_line(error.message)}" if error else ""
        facts = (words.some_ranks(group.ranks), group.report.verdict, why)
        page.section("" if place else "groups", page.glyphs.dot.join(filter(None, facts)), at_most=4)
    for place, row in enumerate(one.unfinished[:rows]):
        text = f"{words.some_ranks(row.ranks)}: {row.why}, {doing(row.phase)}"
        page.section("" if place else "unfinished", text, at_most=4)


def _durations(page: Page, one: Aggregate) -> None:
    if one.seconds is None:
        return
    spreads = [("whole", one.seconds.total), *one.seconds.phases]
    if one.world_size == 1:
        facts = [f"{name} {words.seconds(spent.max)}" for name, spent in spreads]
    else:
        facts = [
            f"{name} {words.seconds(spent.min)} to {words.seconds(spent.max)} (rank {spent.slowest_rank})"
            for name, spent in spreads
        ]
    page.section("time", page.glyphs.dot.join(facts), at_most=6)
