"""
The findings of a job: those of the ranks merged, those that only a comparison of ranks can make; causes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from ckpt_sentry.collector.ends import Cause, LoadEnds
from ckpt_sentry.collector.groups import NO_RANK, LoadState, SharedReport, anonymous, finding_key
from ckpt_sentry.collector.summary import RankFinding
from ckpt_sentry.core import codes, ranks
from ckpt_sentry.core.peers import is_refusal
from ckpt_sentry.core.report import Finding, FindingFacts, Level, LoadError

MAX_FINDINGS: Final = 200

_UNKNOWN: Final = codes.PLACE["low_coverage"]
"""Where a code stands that only a newer version knows: behind the causes, before their effects."""


def collect(
    state: LoadState, ends: LoadEnds, groups: list[SharedReport], first: Cause | None
) -> tuple[RankFinding, ...]:
    """
    All findings of a load, sorted: by level, the first failing rank's before others, causes before effects.
    """
    found = [*merged(_ranks_reports(state, groups)), *ends.findings(), *divergence(state, groups)]
    found += _unexplained(state, found)
    lead = first.rank if first else None
    said = {one.code for one in found}
    leading = codes.LEADING.union(*(code.because_of for code in codes.CATALOGUE if code.name in said))

    def order(one: RankFinding) -> tuple[object, ...]:
        is_told = one.code == "peer_failed"
        elsewhere = lead is not None and lead not in _members(one)
        level = 0 if one.code in leading and one.level == "warning" else codes.LEVELS[one.level]
        return level, is_told, elsewhere, codes.PLACE.get(one.code, _UNKNOWN), one.code, one.text, one.ranks

    found.sort(key=order)
    if state.left_out or len(found) > MAX_FINDINGS:
        gone = max(0, len(found) - MAX_FINDINGS)
        text = f"not kept, for their number: {state.left_out:,} events or reports, {gone:,} findings"
        found = [*found[:MAX_FINDINGS], RankFinding("left_out", "info", "", text)]
    return tuple(found)


def _members(found: RankFinding) -> frozenset[int]:
    return frozenset(ranks.parse(found.ranks))


class _SharedFindings(NamedTuple):
    """
    Findings that some ranks share; `rank` is the one whose words they are in.
    """

    rank: int
    findings: tuple[Finding, ...]
    ranks: set[int]
    keys: str | None = None
    """The digest of the keys that they ask for."""


def _ranks_reports(state: LoadState, groups: list[SharedReport]) -> list[_SharedFindings]:
    """
    What ranks found: in their reports, and before their reports, where none has come.
    """
    early = (
        _SharedFindings(rank, found, {rank})
        for rank, found in sorted(state.early.items())
        if rank not in state.finished
    )
    whole = (
        _SharedFindings(one.report.identity.rank, one.report.findings, one.ranks, one.report.key_digest or "")
        for one in groups
    )
    return [*whole, *early]


def merged(shared: list[_SharedFindings]) -> list[RankFinding]:
    """
    The ranks' own findings, each once with the ranks that have it.
    """
    rows: dict[tuple[str, FindingFacts], tuple[Finding, list[Level], set[int]]] = {}
    general = _general(shared)
    for some in shared:
        for one in some.findings:
            key = one.code, finding_key(one, NO_RANK)
            if key not in general or len(some.ranks) > 1:
                key = one.code, finding_key(one, some.rank)
            _, levels, members = rows.setdefault(key, (one, [], set()))
            levels.append(one.level)
            members |= some.ranks
    everyone = set[int]().union(*(some.ranks for some in shared))
    # Pipeline stages have other keys, and rightly so: nothing follows from what only one of them says of a key.
    is_one_model = len({some.keys for some in shared if some.keys is not None}) == 1
    return [
        RankFinding(
            one.code,
            min(levels, key=codes.LEVELS.__getitem__),
            ranks.compact(members),
            one.text,
            _other_model(members, everyone - members)
            if one.code == "shape_mismatch" and members != everyone and is_one_model
            else one.next,
            one.facts,
        )
        for one, levels, members in rows.values()
    ]


def _general(shared: list[_SharedFindings]) -> frozenset[tuple[str, FindingFacts]]:
    """
    What ranks say that do not name themselves in it: another that says the same of itself says no more.
    """
    keys = ((one, finding_key(one, NO_RANK), some.rank) for some in shared for one in some.findings)
    return frozenset((one.code, key) for one, key, rank in keys if key == finding_key(one, rank))


def _other_model(members: set[int], others: set[int]) -> str:
    some, rest = _named(members), _named(others)
    build = "builds" if len(members) == 1 else "build"
    whose = "its" if len(members) == 1 else "their"
    return f"{some.capitalize()} {build} another model than {rest}: compare {whose} configuration."


def _named(members: Collection[int]) -> str:
    return f"rank{'s'[: len(members) > 1]} {ranks.compact(members)}"


def divergence(state: LoadState, groups: list[SharedReport]) -> list[RankFinding]:
    """
    What ranks do differently: paths, steps, sets of keys.
    """
    found: list[RankFinding] = []
    if state.framework in ("dcp", "accelerate"):
        paths = _sorted_by_value(state.paths)
        if len(paths) > 1:
            step = codes.BY_NAME["paths_differ"].step
            found.append(_differ("paths_differ", "ranks load different paths", paths, step))
    steps = _sorted_by_value(
        {rank: f"step {one.report.step}" for one in groups if one.report.step is not None for rank in one.ranks}
    )
    if len(steps) > 1:
        found.append(_differ("steps_differ", "ranks load different steps", steps, None))
    return found + _key_sets(groups)


def _sorted_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        rows[value].append(rank)
    return dict(sorted(rows.items(), key=lambda row: min(row[1])))


def _differ(code: str, what: str, rows: dict[str, list[int]], step: str | None) -> RankFinding:
    some = [f"{value} ({_named(row)})" for value, row in list(rows.items())[:4]]
    more = f" and {len(rows) - 4} others" if len(rows) > 4 else ""  # noqa: PLR2004
    everyone = ranks.compact(rank for row in rows.values() for rank in row)
    return RankFinding(code, "warning", everyone, f"{what}: {', '.join(some)}{more}", step, names_ranks=True)


def _key_sets(groups: list[SharedReport]) -> list[RankFinding]:
    digests: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    planned = all("/" in one.report.key_digest for one in groups if one.report.key_digest is not None)
    for one in groups:
        if (digest := one.report.key_digest) is not None:
            # Ranks that did not come to planning only know their top-level keys: then these are compared.
            digest = digest if planned else digest.partition("/")[0]
            digests[digest] |= one.ranks
            if one.report.model is not None:
                sizes[digest] = one.report.model.keys
    if len(digests) < 2:  # noqa: PLR2004
        return []
    rows = sorted(digests.items(), key=lambda row: (-len(row[1]), min(row[1])))
    minority = ranks.compact(rank for _, members in rows[1:] for rank in members)
    some = [_asks(members, sizes.get(digest)) for digest, members in rows[:4]]
    more = f" and {len(rows) - 4} other sets" if len(rows) > 4 else ""  # noqa: PLR2004
    text = f"ranks ask for different keys, as pipeline stages do: {', '.join(some)}{more}"
    return [RankFinding("key_sets_differ", "info", minority, text, names_ranks=True)]


def _asks(members: set[int], keys: int | None) -> str:
    return f"{_named(members)} for {keys:,}" if keys is not None else _named(members)


def _unexplained(state: LoadState, found: list[RankFinding]) -> list[RankFinding]:
    """
    A `rank_raised` for ranks whose own error no finding of theirs explains, or whose report never came.

    Errors that only echo another's end count where nothing else explains the failure.
    """
    explained, vague = set[int](), codes.having(lambda code: not code.tells_why)
    for one in found:
        if one.level == "error" and one.code not in vague:
            explained |= _members(one)
    explained |= {rank for rank, failure in state.failures.items() if is_refusal(failure.error)}
    own = {rank: failure for rank, failure in state.failures.items() if failure.own and rank not in explained}
    if not own and not any(one.level == "error" for one in found):
        own = {rank: failure for rank, failure in state.failures.items() if not is_refusal(failure.error)}
    rows: dict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    texts = ((rank, failure.error, anonymous(failure.error.message, NO_RANK)) for rank, failure in own.items())
    general = {(error.type, text, error.phase) for rank, error, text in texts if text == anonymous(error.message, rank)}
    for rank, failure in own.items():
        error = failure.error
        key = error.type, anonymous(error.message, NO_RANK), error.phase
        if key not in general:
            key = error.type, anonymous(error.message, rank), error.phase
        rows[key].append(rank)
    return [_raised(row, own[row[0]].error) for row in rows.values()]


def _raised(row: list[int], error: LoadError) -> RankFinding:
    one = codes.finding("rank_raised", "error", type=error.type, message=error.message)
    return RankFinding(one.code, one.level, ranks.compact(row), one.text.rstrip(": "), facts=one.facts)
