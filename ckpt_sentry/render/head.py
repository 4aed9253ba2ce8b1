"""
The first line of a report: how the load went, how much came in, on which ranks, and who was first.
"""

from __future__ import annotations

from typing import Final

from ckpt_sentry.collector.aggregate import Aggregate
from ckpt_sentry.collector.summary import STILL_WAITING, doing
from ckpt_sentry.core import codes, ranks
from ckpt_sentry.core.peers import REFUSAL
from ckpt_sentry.core.report import LoadReport
from ckpt_sentry.core.verdict import WRONG_VALUES
from ckpt_sentry.render import cells, words
from ckpt_sentry.render.page import Glyphs, Page, Segment

_WRONG: Final = {
    "no_op": "loaded nothing into the model",
    "wrong_values": "loaded, but the values are wrong",
    "diverged": "loaded different checkpoints on different ranks",
    "stalled": "hangs",
    "failed": "failed",
    "partial": "loaded a part of the model only",
}
_OF_ITS_RANKS: Final = frozenset({"no_op", "partial", "wrong_values"})
"""What one rank may have come to, and another not."""
NOT_COMPARED: Final = "not_compared"
"""The finding that a load could not be compared with what it was to bring in."""
_LONGEST_PATH: Final = 80


def glyph(one: Aggregate, glyphs: Glyphs) -> Segment:
    """
    The sign of a verdict, in its style. What was refused has stopped the job, however much of it was loaded.
    """
    if one.verdict == "ok":
        return Segment(glyphs.good, "good") if is_compared(one) else Segment(glyphs.unknown, "quiet")
    if one.verdict in ("partial", "diverged") and not is_refused(one):
        return Segment(glyphs.warning, "warning")
    return Segment(glyphs.bad, "bad")


def header(page: Page, one: Aggregate) -> None:
    """
    Write the first line of a block.
    """
    sign = glyph(one, page.glyphs)
    if one.verdict == "ok":
        page.header(sign, one.entry_point, facts(one))
        return
    lasted = words.seconds(max(0.0, one.ended_at - one.started_at))
    title = f"{one.entry_point} {_what(one)}{_where(one)}"
    details = [*filter(None, _details(one)), *_attempt(one)]
    if ": " in _what(one):
        page.header(sign, title, [f"after {lasted}", *details])
    else:
        page.header(sign, f"{title} after {lasted}", details)


def facts(one: Aggregate) -> list[str]:
    """
    What is worth a word of a load that is well.
    """
    return [*_world(one), *_loaded(one), *_took(one), *_attempt(one)]


def place(one: Aggregate) -> list[str]:
    """
    The step of a load, or the path where no step is known.
    """
    if one.step is not None:
        return [f"step {one.step}"]
    return [cells.cut(cells.visible(one.path), _LONGEST_PATH)] if one.path else []


def sees_all(one: Aggregate) -> bool:
    """
    Whether something is known of all ranks: else nothing may be said of those that were not heard.
    """
    return one.heard_ranks >= one.world_size


def is_compared(one: Aggregate) -> bool:
    """
    Whether it is known what came in: nothing is called good that was not looked at.
    """
    return all(found.code != NOT_COMPARED for found in one.findings)


def is_refused(one: Aggregate) -> bool:
    """
    Whether the agent itself refused the load.
    """
    return one.error is not None and one.error.type == REFUSAL


def is_untouched(one: Aggregate) -> bool:
    """
    Whether the load was refused before anything was written: that is in the first phase, and in no other.
    """
    return is_refused(one) and one.error is not None and one.error.phase == "setup"


def lead(one: Aggregate) -> LoadReport | None:
    """
    The report whose counts are the aggregate's own.
    """
    wanted = one.missing, one.unexpected, one.mismatched.items, one.coverage
    reports = [group.report for group in one.groups]
    same = (r for r in reports if (r.missing, r.unexpected, r.mismatched, r.coverage) == wanted)
    return next(same, reports[0] if reports else None)


def allows_all(one: Aggregate) -> bool:
    """
    Whether keys are missing, all of which may be.
    """
    return one.coverage is not None and one.coverage.judged >= 1 and one.missing.count > 0 and _came(one) is not None


def _came(one: Aggregate) -> tuple[int, int] | None:
    """
    How many keys of the model came in, or would, and how many there are.
    """
    report = lead(one)
    if report is None or report.model is None or one.coverage is None:
        return None
    total = report.model.keys
    came = round(total * one.coverage.keys)
    allowed = (codes.fact(found.facts, "allowed") for found in report.findings if found.code == "missing_keys")
    if any(some not in (None, "0") for some in allowed):
        # Coverage leaves out what may be missing.
        came = min(came, total - one.missing.count - one.mismatched.count)
    return max(0, came), total


def _what(one: Aggregate) -> str:
    if is_refused(one) and one.verdict != "wrong_values":
        if any(found.code in WRONG_VALUES for found in one.findings):
            return "refused: the values are wrong"
        came = _came(one)
        verb = "would load" if is_untouched(one) else "were loaded"
        return "refused" if came is None else f"refused: {came[0]:,} of {words.count(came[1], 'key')} {verb}"
    if one.verdict == "stalled" and all(row.why != STILL_WAITING for row in one.unfinished):
        return "has not ended"
    return _WRONG[one.verdict]


def _where(one: Aggregate) -> str:
    """
    On which ranks: a count where all are known, names where they are not.
    """
    if one.world_size == 1:
        return ""
    if one.verdict in _OF_ITS_RANKS and sees_all(one):
        return _on(one, [group.ranks for group in one.groups if group.report.verdict == one.verdict])
    if not sees_all(one):
        some = one.failed_ranks if one.verdict == "failed" else one.ranks_reported or _open(one)
        return f" on {words.some_ranks(some)}" if some else ""
    if one.verdict != "failed" or _absent(one) or not one.failed_ranks:
        return ""
    return f" on {len(ranks.parse(one.failed_ranks)):,} of {words.count(one.world_size, 'rank')}"


def _on(one: Aggregate, parts: list[str]) -> str:
    """
    Which ranks a headline is of, where it is not of all.
    """
    some = [rank for part in parts for rank in ranks.parse(part)]
    return "" if not some or len(some) >= one.world_size else f" on {words.some_ranks(ranks.compact(some))}"


def _details(one: Aggregate) -> list[str]:
    absent = _absent(one)
    if one.verdict == "stalled":
        away = f"{words.some_ranks(absent)} {_have(absent)} not come" if absent else ""
        return [", ".join(filter(None, (_waiting(one), away)))]
    if absent:
        return [f"{words.some_ranks(absent)} never came to it"]
    error = one.error
    if error is None:
        return []
    first = f"rank {error.first_rank} first" if one.world_size > 1 and sees_all(one) and not _is_echo(one) else ""
    first += " by the machines' clocks" if first and error.order_by == "clock" else ""
    stage = doing(error.phase) if error.phase and not is_refused(one) else ""
    return [", ".join(filter(None, (first, stage)))]


def _have(some: str) -> str:
    return "has" if some.isdigit() else "have"


def _absent(one: Aggregate) -> str:
    """
    Ranks whose absence is the trouble, or a part of it.
    """
    return ranks.compact(
        rank for found in one.findings if found.code == "rank_absent" for rank in ranks.parse(found.ranks)
    )


def _open(one: Aggregate) -> str:
    """
    Ranks that are in the load.
    """
    return ranks.compact(rank for row in one.unfinished if row.phase is not None for rank in ranks.parse(row.ranks))


def _waiting(one: Aggregate) -> str:
    some = len(ranks.parse(_open(one)))
    if not some or one.world_size == 1 or not sees_all(one):
        return ""
    if all(row.why != STILL_WAITING for row in one.unfinished):
        return f"{some:,} of {words.count(one.world_size, 'rank')} still in it"
    return f"{some:,} of {words.count(one.world_size, 'rank')} {'waits' if some == 1 else 'wait'}"


def _is_echo(one: Aggregate) -> bool:
    """
    Whether the first error only says that another rank has failed: then nobody here failed first.
    """
    first = None if one.error is None else one.error.first_rank
    return any(found.code == "peer_failed" and first in ranks.parse(found.ranks) for found in one.findings)


def _attempt(one: Aggregate) -> list[str]:
    return [f"attempt {one.attempt + 1}"] if one.attempt else []


def _world(one: Aggregate) -> list[str]:
    if one.world_size == 1:
        return []
    if sees_all(one):
        return [words.count(one.world_size, "rank")]
    return [words.some_ranks(one.ranks_reported)] if one.ranks_reported else []


def _loaded(one: Aggregate) -> list[str]:
    report, came = lead(one), _came(one)
    if report is None:
        return []
    of_model = f" of {cells.visible(report.model.name)}" if report.model and report.model.name else ""
    if came is not None and came[0] < came[1]:
        some, total = came
        if allows_all(one):
            rest = f"the other {total - some:,}" if some else f"all {total:,}"
            return [f"{some:,} of {words.count(total, 'key')}{of_model}, {rest} may be missing"]
        found = [f"{some:,} of {words.count(total, 'key')}{of_model}"]
    else:
        keys = report.model.keys if report.model else report.checkpoint.keys if report.checkpoint else None
        found = [] if keys is None else [words.count(keys, "key") + of_model]
    if one.coverage is not None and is_compared(one):
        found.append(words.percent(one.coverage.judged))
    return [", ".join(found)] if found else []


def _took(one: Aggregate) -> list[str]:
    if one.seconds is None:
        return []
    longest = words.seconds(one.seconds.total.max)
    size = f"{words.size(one.bytes_read)} in {longest}" if one.bytes_read else f"in {longest}"
    slowest = f" (slowest: rank {one.seconds.total.slowest_rank})" if one.world_size > 1 and sees_all(one) else ""
    return [size + slowest]
