"""
The findings of a job: those of the ranks merged, those that only a look at all ranks can make, the cause first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from ckpt_sentry.collector.ends import Cause, Ending
from ckpt_sentry.collector.groups import NO_RANK, LoadState, RanksReport, anonymous, finding_key
from ckpt_sentry.collector.summary import LEVELS, RankFinding
from ckpt_sentry.core import codes, ranks
from ckpt_sentry.core.peers import is_refusal
from ckpt_sentry.core.report import Finding, Level

MAX_FINDINGS: Final = 200

_UNKNOWN: Final = codes.PLACE["low_coverage"]
"""Where a code stands that a newer rank has said: behind the causes, before their effects."""


def collect(state: LoadState, story: Ending, groups: list[RanksReport], first: Cause | None) -> tuple[RankFinding, ...]:
    """
    All findings of a load, sorted: by level, what the first failing rank says before others, causes before effects.
    """
    found = [*merged(_ranks_reports(state, groups)), *story.findings(), *divergence(state, groups)]
    found += _unexplained(state, found)
    lead = first.rank if first else None
    leading = codes.LEADING
    if any(one.code == "low_coverage" for one in found):
        # That too little came in says no more than that keys are missing.
        leading |= {"missing_keys"}

    def order(one: RankFinding) -> tuple[object, ...]:
        told = one.code == "peer_failed"
        elsewhere = lead is not None and lead not in _members(one)
        level = 0 if one.code in leading and one.level == "warning" else LEVELS[one.level]
        return level, told, elsewhere, codes.PLACE.get(one.code, _UNKNOWN), one.code, one.text, one.ranks

    found.sort(key=order)
    if state.left_out or len(found) > MAX_FINDINGS:
        gone = max(0, len(found) - MAX_FINDINGS)
        text = f"not kept, for their number: {state.left_out:,} events or reports, {gone:,} findings"
        found = [*found[:MAX_FINDINGS], RankFinding("left_out", "info", "", text)]
    return tuple(found)


def _members(found: RankFinding) -> frozenset[int]:
    return frozenset(ranks.parse(found.ranks))


class _Said(NamedTuple):
    """
    Findings that some ranks share; `rank` is the one whose words they are in.
    """

    rank: int
    findings: tuple[Finding, ...]
    ranks: set[int]
    keys: str | None = None
    """The digest of the keys that they ask for."""


def _ranks_reports(state: LoadState, groups: list[RanksReport]) -> list[_Said]:
    """
    What ranks found: in their reports, and before their reports, where none has come.
    """
    early = (_Said(rank, found, {rank}) for rank, found in sorted(state.early.items()) if rank not in state.finished)
    said = (
        _Said(one.report.identity.rank, one.report.findings, one.ranks, one.report.key_digest or "") for one in groups
    )
    return [*said, *early]


def merged(sayings: list[_Said]) -> list[RankFinding]:
    """
    The ranks' own findings, each once with the ranks that have it.
    """
    rows: dict[tuple[str, str], tuple[list[Level], set[int], str, str | None]] = {}
    facts = _facts(sayings)
    for said in sayings:
        for one in said.findings:
            key = one.code, finding_key(one, NO_RANK)
            if key not in facts or len(said.ranks) > 1:
                key = one.code, finding_key(one, said.rank)
            levels, members, _, _ = rows.setdefault(key, ([], set(), one.text, one.next))
            levels.append(one.level)
            members |= said.ranks
    everyone = set[int]().union(*(said.ranks for said in sayings))
    # Pipeline stages have other keys, and rightly so: nothing follows from what only one of them says of a key.
    is_one_model = len({said.keys for said in sayings if said.keys is not None}) == 1
    return [
        RankFinding(
            code,
            min(levels, key=LEVELS.__getitem__),
            ranks.compact(members),
            text,
            _other_model(members, everyone - members)
            if code == "shape_mismatch" and members != everyone and is_one_model
            else step,
        )
        for (code, _), (levels, members, text, step) in rows.items()
    ]


def _facts(sayings: list[_Said]) -> frozenset[tuple[str, str]]:
    """
    What ranks say that do not name themselves in it: another that says the same of itself says no more.
    """
    texts = ((one, finding_key(one, NO_RANK), said.rank) for said in sayings for one in said.findings)
    return frozenset((one.code, text) for one, text, rank in texts if text == finding_key(one, rank))


def _other_model(members: set[int], others: set[int]) -> str:
    some, rest = _named(members), _named(others)
    build = "builds" if len(members) == 1 else "build"
    whose = "its" if len(members) == 1 else "their"
    return f"{some.capitalize()} {build} another model than {rest}: compare {whose} configuration."


def _named(members: Collection[int]) -> str:
    return f"rank{'s'[: len(members) > 1]} {ranks.compact(members)}"


def divergence(state: LoadState, groups: list[RanksReport]) -> list[RankFinding]:
    """
    What ranks do differently: paths, steps, sets of keys.
    """
    found: list[RankFinding] = []
    if state.framework in ("dcp", "accelerate"):
        paths = _sorted_by_value(state.paths)
        if len(paths) > 1:
            found.append(_differ("paths_differ", "ranks load different paths", paths, "Give every rank the same path."))
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
    return RankFinding(code, "warning", everyone, f"{what}: {', '.join(some)}{more}", step)


def _key_sets(groups: list[RanksReport]) -> list[RankFinding]:
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
    return [RankFinding("key_sets_differ", "info", minority, text)]


def _asks(members: set[int], keys: int | None) -> str:
    return f"{_named(members)} for {keys:,}" if keys is not None else _named(members)


_TOLD: Final = frozenset({"peer_failed", "storage_error"})
"""Findings that say whose error it was, or what the exception says as well, but not why."""


def _unexplained(state: LoadState, found: list[RankFinding]) -> list[RankFinding]:
    """
    A `rank_raised` for ranks whose own error no finding of theirs explains, or whose report never came.

    Errors that only echo another's end count where nothing else explains the failure.
    """
    explained = set[int]()
    for one in found:
        if one.level == "error" and one.code not in _TOLD:
            explained |= _members(one)
    explained |= {rank for rank, failure in state.failures.items() if is_refusal(failure.error)}
    own = {rank: failure for rank, failure in state.failures.items() if failure.own and rank not in explained}
    if not own and not any(one.level == "error" for one in found):
        own = {rank: failure for rank, failure in state.failures.items() if not is_refusal(failure.error)}
    rows: dict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    texts: dict[tuple[str, str, str | None], str] = {}
    said = ((rank, failure.error, anonymous(failure.error.message, NO_RANK)) for rank, failure in own.items())
    facts = {(error.type, text, error.phase) for rank, error, text in said if text == anonymous(error.message, rank)}
    for rank, failure in own.items():
        error = failure.error
        key = error.type, anonymous(error.message, NO_RANK), error.phase
        if key not in facts:
            key = error.type, anonymous(error.message, rank), error.phase
        rows[key].append(rank)
        texts.setdefault(key, f"{error.type}: {error.message}".rstrip(": "))
    return [RankFinding("rank_raised", "error", ranks.compact(row), texts[key]) for key, row in rows.items()]
