"""
An aggregate for a person: one line for a good load, one block for any other, the cause first.

Pure: aggregates in, lines of styled segments out (see `page`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from ckpt_sentry.collector.aggregate import Aggregate, RankFinding
from ckpt_sentry.collector.summary import doing
from ckpt_sentry.core import codes, ranks
from ckpt_sentry.core.codes import Code
from ckpt_sentry.core.report import Coverage, KeyList, LoadReport
from ckpt_sentry.patching.later import later
from ckpt_sentry.render import head, words
from ckpt_sentry.render.head import NOT_COMPARED
from ckpt_sentry.render.keys import SOME_ROWS, brief, details, headline, keys_of, mismatches
from ckpt_sentry.render.page import UNICODE, Glyphs, Line, Page, Style, plain

if TYPE_CHECKING:
    from ckpt_sentry.core import findings, raised
    from ckpt_sentry.core.optimizer import is_optimizers
    from ckpt_sentry.render import stack
else:
    is_optimizers = later("ckpt_sentry.core.optimizer:is_optimizers")
    raised = later("ckpt_sentry.core.raised")
    stack = later("ckpt_sentry.render.stack")
    findings = later("ckpt_sentry.core.findings")

__all__ = ["block", "full", "line", "plain"]

MAX_LINES: Final = 30
"""Lines of a block."""

_STACK_ROWS: Final = 6
_MOST_NOTES: Final = 4
_CAUSES: Final = 5
_OTHERS: Final = 4
_NEXT_STEPS: Final = 3
_MOST_PARTS: Final = 3
_MANY: Final = 1 << 30


def line(one: Aggregate, width: int = 100, glyphs: Glyphs = UNICODE) -> Line:
    """
    The one line of a good load, with its first finding and all that tell of training state that did not come in.
    """
    page = Page(10_000, glyphs)
    facts = [*head.place(one), *head.facts(one)]
    first, *others = facts or [one.entry_point]
    title = f"{one.entry_point}  {first}" if facts else first
    notes = [found for found in _unexplained(one) if not (found.code == "missing_keys" and head.allows_all(one))]
    uncounted = codes.having(lambda code: code.uncounted)
    notes.sort(key=lambda found: (found.code != NOT_COMPARED, codes.LEVELS[found.level], found.code not in uncounted))
    shown = [found for place, found in enumerate(notes) if not place or found.code in uncounted][:_MOST_NOTES]
    others += [brief(found)[: 2 * width].rstrip(". ") + _of_some(one, found) for found in shown]
    if len(notes) > len(shown):
        others.append(words.count(len(notes) - len(shown), "more finding"))
    page.header(head.glyph(one, glyphs), title, others)
    return page.lines[0]


def _of_some(one: Aggregate, found: RankFinding) -> str:
    """
    Whose finding it is, where it is not everybody's.
    """
    return _whose(one, found) if len(ranks.parse(found.ranks)) < one.world_size else ""


def every_key(one: Aggregate) -> str:
    """
    The command that reads all of a load from its records.
    """
    return f"ckpt-sentry report {one.run_id[:200]}    every key"


def block(
    one: Aggregate,
    width: int = 100,
    glyphs: Glyphs = UNICODE,
    limit: int = MAX_LINES,
    hints: Sequence[str] | None = None,
) -> list[Line]:
    """
    What a load came to, in at most `limit` lines of at most `width` cells (40 at least): what, where, why, what now.

    `hints` are commands, each with what it is good for, that stand below the next steps; None: that of `every_key`.
    The last line names `ckpt-sentry explain` where nothing says what to do about the cause.
    """
    page = Page(width, glyphs)
    found = _unexplained(one)
    head.header(page, one)
    _checkpoint(page, one)
    _reasons(page, one, found, _CAUSES, rows=SOME_ROWS)
    _others(page, one, _OTHERS)
    _coverage(page, one)
    tail = Page(width, glyphs)
    steps = _next_steps(found)
    for place, step in enumerate(steps[:_NEXT_STEPS]):
        tail.section("" if place else "next", step, at_most=2)
    for hint in (every_key(one),) if hints is None else hints:
        tail.section("" if steps or len(tail.lines) else "next", hint, "command", at_most=2)
    if (code := _to_explain(found)) is not None:
        tail.section("" if tail.lines else "next", f"ckpt-sentry explain {code}    what it means", "command", at_most=1)
    room = limit - len(tail.lines)
    if len(page.lines) > room:
        left_out = len(page.lines) - room + 1
        del page.lines[room - 1 :]
        page.row(f"{glyphs.more} {words.count(left_out, 'more line')}", "quiet")
    return page.lines + tail.lines


def full(one: Aggregate, width: int = 100, glyphs: Glyphs = UNICODE, rows: int | None = 200) -> list[Line]:
    """
    The block of a load without its limit: every key, finding and group; `rows` bounds each list (None: not).
    """
    most = _MANY if rows is None else rows
    page = Page(width, glyphs)
    found = _worth_a_word(one)
    head.header(page, one)
    _checkpoint(page, one)
    _reasons(page, one, found, most, rows=max(most, SOME_ROWS + 1) if rows is None else most)
    _others(page, one, most)
    _coverage(page, one)
    for place, step in enumerate(_next_steps(found)):
        page.section("" if place else "next", step, at_most=most)
    _all_keys(page, one, most)
    _all_groups(page, one, most)
    _durations(page, one)
    return page.lines


def _to_explain(found: list[RankFinding]) -> str | None:
    """
    The code of a cause without a next step of its own, of which the catalogue has more to say than the report.
    """
    cause = found[0] if found else None
    if cause is None or cause.level == "info" or cause.next is not None:
        return None
    known = codes.BY_NAME.get(cause.code)
    return cause.code if known is not None and known.is_told_at_length else None


def _worth_a_word(one: Aggregate) -> list[RankFinding]:
    """
    The findings without what is said elsewhere: by the exception itself, or of the ranks that only lost another.
    """
    found = [finding for finding in one.findings if finding.code != "peer_failed"]
    killed = frozenset(r for f in found if f.code == "rank_killed" for r in ranks.parse(f.ranks))
    found = [f for f in found if f.code != "rank_absent" or not killed.issuperset(ranks.parse(f.ranks))]
    return [finding for finding in found if finding is found[0] or not _is_raised(one, finding)]


def _unexplained(one: Aggregate) -> list[RankFinding]:
    """
    The findings of a block: where one explains others, without those.
    """
    found = _worth_a_word(one)
    known = (
        codes.BY_NAME[finding.code] for finding in found if finding.code in codes.BY_NAME and finding.level != "info"
    )
    hidden = frozenset[str]().union(*(_explained(one, code) for code in known))
    return [finding for finding in found if finding.code not in hidden]


def _explained(one: Aggregate, code: Code) -> frozenset[str]:
    """
    What a code that is said explains in this very load.
    """
    lists = {"missing_keys": one.missing, "unexpected_keys": one.unexpected}
    if code.of_optimizer:
        return frozenset(name for name, keys in lists.items() if _is_shown(keys) and all(map(is_optimizers, keys.keys)))
    match code.name:
        case "renamed_keys":
            is_all = one.rename is not None and one.rename.count >= one.missing.count
        case "nested_state_dict":
            is_all = one.coverage is not None and one.coverage.keys == 0
        case "no_overlap":
            # It names the keys, if they are few.
            few = (name for name, keys in lists.items() if _is_shown(keys) and len(keys.keys) <= findings.SHOWN)
            return frozenset(few) if one.unexpected.count else frozenset()
        case _:
            return frozenset()
    return code.explains if is_all else code.always_explains


def _is_shown(keys: KeyList) -> bool:
    return bool(keys.keys) and not keys.omitted


def _checkpoint(page: Page, one: Aggregate) -> None:
    reports = [group.report for group in one.groups]
    of_path = [report for report in reports if report.path == one.path] or reports
    summary = next((report.checkpoint for report in of_path if report.checkpoint), None)
    facts = [one.path or "path unknown"]
    if one.format:
        facts.append(one.format)
    source = f" ({one.step_source})" if one.step_source else ""
    facts.append(f"step {one.step}{source}" if one.step is not None else "step unknown")
    if summary is not None:
        facts += [f"saved by {words.count(summary.saved_by, 'rank')}"] if summary.saved_by else []
        facts += [words.count(summary.keys, "key"), words.size(summary.bytes)] if summary.keys else []
    page.section("checkpoint", page.glyphs.dot.join(facts), at_most=6)


def _reasons(page: Page, one: Aggregate, found: list[RankFinding], most: int, rows: int) -> None:
    """
    The causes, the exception itself where no finding has quoted it, and what else there is.
    """
    causes = _causes(one, found)
    found = [*causes, *(finding for finding in found if finding not in causes)]
    for place, finding in enumerate(found[:most]):
        label = "cause" if place == 0 and causes else "also" if place == len(causes) else ""
        _finding(page, one, finding, label, rows)
        if place == max(0, len(causes) - 1):
            _raised(page, one, finding)
    if not found:
        _raised(page, one, None)
    if len(found) > most:
        page.row(f"{page.glyphs.more} {words.count(len(found) - most, 'more finding')}", "quiet")


def _causes(one: Aggregate, found: list[RankFinding]) -> list[RankFinding]:
    """
    The weightiest finding, and those that torch has named where it raised for something else; none of mere notes.
    """
    if not found or found[0].level == "info":
        return []
    named = raised.codes(one.error.message) if one.error is not None else frozenset()
    if found[0].code not in raised.NAMED:
        # What explains missing keys stands for them.
        named -= raised.KEYS
    return [found[0], *(other for other in found[1:] if other.code in named and other.level != "info")]


def _is_raised(one: Aggregate, found: RankFinding) -> bool:
    """
    Whether a finding only quotes the exception, which is said below the cause.
    """
    quoted = codes.fact(found.facts, codes.QUOTED) if found.code == "rank_raised" else None
    return quoted is not None and one.error is not None and one.error.message == quoted


def _finding(page: Page, one: Aggregate, found: RankFinding, label: str, rows: int) -> None:
    _, frames = stack.parted(found.text)
    whose = _whose(one, found)
    text = headline(found)
    page.section(label, text.rstrip(". ") + whose if whose else text, _style(found), at_most=max(4, min(rows, 40)))
    for row in stack.rows(frames, _STACK_ROWS if rows <= SOME_ROWS else rows, page.room, page.glyphs.more):
        page.row(row, "quiet")
    report = _report_of(one, found)
    if report is not None:
        details(page, report, found, rows)


def _style(found: RankFinding) -> Style:
    return "bad" if found.level == "error" else "warning" if found.level == "warning" else ""


def _whose(one: Aggregate, found: RankFinding) -> str:
    if one.world_size == 1 or not found.ranks or found.code == "rank_stalled":
        return ""
    if found.names_ranks or one.heard_ranks == 1:
        return ""
    if found.ranks == f"0-{one.world_size - 1}":
        return " (both ranks)" if one.world_size == 2 else f" (all {one.world_size:,} ranks)"  # noqa: PLR2004
    alone = " alone" if found.ranks.isdigit() and head.sees_all(one) else ""
    return f" ({words.some_ranks(found.ranks)}{alone})"


def _report_of(one: Aggregate, found: RankFinding) -> LoadReport | None:
    """
    The report whose keys a finding is about: that of one of its ranks, the one in its words before others.
    """
    members = frozenset(ranks.parse(found.ranks))
    whose = [group.report for group in one.groups if not members.isdisjoint(ranks.parse(group.ranks))]
    own = [(same.text == found.text, report) for report in whose for same in report.findings if same.code == found.code]
    return max(own, key=itemgetter(0))[1] if own else None


def _raised(page: Page, one: Aggregate, cause: RankFinding | None) -> None:
    """
    The exception in its own words, unless the cause has quoted it, it is a signal, or the agent's own.
    """
    error = one.error
    if error is None or (cause is not None and head.is_refused(one)):
        return
    quoted = error.message or error.type
    if cause is not None and (cause.code.startswith("rank_") or quoted in cause.text):
        return
    first = stack.first_line(error.message)
    page.section("raised", f"{error.type}: {first}" if first else error.type, "quiet", at_most=2)


def _others(page: Page, one: Aggregate, most: int) -> None:
    """
    Where the ranks stood that have no error of their own.
    """
    rows = _peers(one) if one.world_size > 1 else []
    known = frozenset(r for f in one.findings if f.code.startswith(("rank_", "peer_")) for r in ranks.parse(f.ranks))
    unsaid = (row for row in one.unfinished if not known.issuperset(ranks.parse(row.ranks)))
    rows += [f"{words.some_ranks(row.ranks)}: {row.why}, {doing(row.phase)}" for row in unsaid]
    for place, text in enumerate(rows[:most]):
        page.section("" if place else "others", text, at_most=2)
    if len(rows) > most:
        page.row(f"{page.glyphs.more} {words.count(len(rows) - most, 'more group')} of ranks", "quiet")


def _peers(one: Aggregate) -> list[str]:
    """
    What the ranks say that lost another: in one line where it is known that another has failed.
    """
    lost = [found for found in one.findings if found.code == "peer_failed"]
    no_failure = codes.of_verdict("stalled") | {"peer_failed"}
    if len(lost) > 1 and any(found.level == "error" and found.code not in no_failure for found in one.findings):
        peers = ranks.compact(rank for found in lost for rank in ranks.parse(found.ranks))
        return [f"{words.some_ranks(peers)}: ended because another rank failed"]
    return [
        stack.first_line(found.text if found.names_ranks else f"{words.some_ranks(found.ranks)}: {found.text}")
        for found in lost
    ]


def _coverage(page: Page, one: Aggregate) -> None:
    got = one.coverage
    if got is None or got.judged >= 1:
        return
    verb = "would have loaded" if one.verdict == "failed" and not head.is_refused(one) else "loaded"
    verb = "would load; the model is untouched" if head.is_untouched(one) else verb
    whose = _by_coverage(one)
    some = f" ({words.some_ranks(ranks.compact(whose.pop(got, ())))})" if len(whose) > 1 else ""
    others = [f"{words.percent(part.judged)} on {words.some_ranks(ranks.compact(own))}" for part, own in whose.items()]
    rest = "; ".join(("", *others[:_MOST_PARTS])) if some else ""
    part = f"{words.percent(got.keys)} of keys, {words.percent(got.elements)} of elements"
    page.section("coverage", f"{part} {verb}{some}{rest}")


def _by_coverage(one: Aggregate) -> dict[Coverage, list[int]]:
    """
    The ranks by the coverage that they report.
    """
    found: dict[Coverage, list[int]] = {}
    for group in one.groups:
        if group.report.coverage is not None:
            found.setdefault(group.report.coverage, []).extend(ranks.parse(group.ranks))
    return found


def _next_steps(found: list[RankFinding]) -> list[str]:
    return list(dict.fromkeys(finding.next for finding in found if finding.next))


def _all_keys(page: Page, one: Aggregate, rows: int) -> None:
    shown = {found.code for found in one.findings}
    for code, title, keys in (
        ("missing_keys", "missing from the checkpoint", one.missing),
        ("unexpected_keys", "unexpected: in the checkpoint, not in the model", one.unexpected),
    ):
        if keys.count and code not in shown:
            page.section("keys", f"{words.count(keys.count, 'key')} {title}")
            keys_of(page, keys, max(rows, SOME_ROWS + 1))
    report = head.lead(one)
    if one.mismatched.count and "shape_mismatch" not in shown and report is not None:
        page.section("keys", f"{words.count(one.mismatched.count, 'key')} with another shape")
        mismatches(page, report, rows)


def _all_groups(page: Page, one: Aggregate, rows: int) -> None:
    """
    Who says what, where not all say the same; an exception that is quoted above is not quoted again.
    """
    if len(one.groups) < 2:  # noqa: PLR2004
        return
    for place, group in enumerate(one.groups[:rows]):
        error = group.report.error
        is_known = error is None or (one.error is not None and error.message == one.error.message)
        why = "" if error is None or is_known else f"{error.type}: {stack.first_line(error.message)}"
        facts = (words.some_ranks(group.ranks), group.report.verdict, why)
        page.section("" if place else "groups", page.glyphs.dot.join(filter(None, facts)), at_most=4)


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
