"""
`DCPErrorAggregator`: what the ranks of a job say about one failed load, each thing once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_sentry.api.dcp import DCPLoadError, ShapeConflict, conflicts_text, keys_text
from ckpt_sentry.core import ranks
from ckpt_sentry.core.fold import expand
from ckpt_sentry.core.report import LoadReport
from ckpt_sentry.masking import mask_text
from ckpt_sentry.render.stack import first_line
from ckpt_sentry.session.exceptions import text_of

MOST_SHOWN = 20
"""Lines for each kind of thing; the rest is counted."""


class DCPErrorAggregator:
    """
    Collects errors of many ranks and sums them up: how many ranks, which keys, which shapes, each said once.

    Takes `DCPLoadError`s, torch's `CheckpointException`s (with the failures of many ranks in one), and any other
    exception. Memory grows with what is different, not with the number of ranks.
    """

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._paths: dict[tuple[str | None, int | None], set[int]] = {}
        self._missing: dict[tuple[str, ...], set[int]] = {}
        self._unexpected: dict[tuple[str, ...], set[int]] = {}
        self._conflicts: dict[tuple[ShapeConflict, ...], set[int]] = {}
        self._texts: dict[str, set[int]] = {}

    def collect(self, error: BaseException | None, rank: int | None = None) -> None:
        """
        Take in the error of a rank: `rank`, else the one that the error names, else the next free number.

        None, as `precheck` gives it, is no error: of that rank nothing is kept.
        """
        if error is None:
            return
        report = getattr(error, "ckpt_sentry", None)
        failures = getattr(error, "failures", None)
        if isinstance(error, DCPLoadError):
            self._load_error(error, error.rank if rank is None else rank)
        elif isinstance(failures, Mapping) and failures:
            for member, (inner, _) in failures.items():
                self._plain(inner, member)
            if isinstance(report, LoadReport):
                self._report(report, report.identity.rank if rank is None else rank)
        elif isinstance(report, LoadReport):
            self._report(report, report.identity.rank if rank is None else rank)
            self._plain(error, report.identity.rank if rank is None else rank)
        else:
            self._plain(error, self._free() if rank is None else rank)

    def collect_all(self, errors: Iterable[BaseException | None]) -> None:
        """
        Take in one error for each rank, in the order of ranks, as `all_gather_object` gives them; None is no error.
        """
        for rank, error in enumerate(errors):
            self.collect(error, rank)

    @property
    def failed_ranks(self) -> str:
        """
        The ranks of which an error was collected, as in "0-3,7".
        """
        return ranks.compact(self._ranks)

    def summary(self) -> str:
        """
        All that was collected, in lines; "no errors" if nothing was.
        """
        if not self._ranks:
            return "no errors"
        count = "1 rank" if len(self._ranks) == 1 else f"{len(self._ranks):,} ranks"
        lines = [f"{count} failed: {ranks.compact(self._ranks)}"]
        for (path, step), members in _shown(self._paths):
            where = f"step {'unknown' if step is None else step} · {path or 'no path'}"
            lines.append(f"  checkpoint on {_named(members)}: {where}")
        for keys, members in _shown(self._missing):
            lines += [f"{line} · {_named(members)}" for line in keys_text("missing from the checkpoint", keys)]
        for conflicts, members in _shown(self._conflicts):
            lines += [f"{line} · {_named(members)}" for line in conflicts_text(conflicts)]
        for keys, members in _shown(self._unexpected):
            lines += [f"{line} · {_named(members)}" for line in keys_text("unexpected", keys)]
        lines += [f"  {text} · {_named(members)}" for text, members in _shown(self._texts)]
        everything = (self._paths, self._missing, self._conflicts, self._unexpected, self._texts)
        if left_out := sum(max(0, len(rows) - MOST_SHOWN) for rows in everything):
            lines.append(f"  and {left_out:,} more different things")
        return "\n".join(lines)

    __str__ = summary

    def _load_error(self, error: DCPLoadError, rank: int) -> None:
        self._ranks.add(rank)
        _add(self._paths, (error.path, error.checkpoint_step), rank)
        _add(self._missing, error.missing, rank)
        _add(self._unexpected, error.unexpected, rank)
        _add(self._conflicts, error.shape_conflicts, rank)
        for reason in error.reasons:
            _add(self._texts, reason, rank)

    def _report(self, report: LoadReport, rank: int) -> None:
        self._ranks.add(rank)
        _add(self._paths, (report.path, report.step), rank)
        _add(self._missing, tuple(expand(report.missing.keys)), rank)
        _add(self._unexpected, tuple(expand(report.unexpected.keys)), rank)
        found = (
            ShapeConflict(key, key.rpartition(".")[0], item.model_shape, item.checkpoint_shape)
            for item in report.mismatched
            for key in expand(item.keys)
        )
        _add(self._conflicts, tuple(found), rank)

    def _plain(self, error: BaseException, rank: int) -> None:
        self._ranks.add(rank)
        text = first_line(mask_text(text_of(error)))
        _add(self._texts, f"{type(error).__name__}: {text}" if text else type(error).__name__, rank)

    def _free(self) -> int:
        return next(number for number in range(len(self._ranks) + 1) if number not in self._ranks)


def _add(rows: dict[Any, set[int]], what: Any, rank: int) -> None:
    if what:
        rows.setdefault(what, set()).add(rank)


def _shown(rows: Mapping[Any, set[int]]) -> list[tuple[Any, set[int]]]:
    return sorted(rows.items(), key=lambda row: (-len(row[1]), min(row[1]), str(row[0])))[:MOST_SHOWN]


def _named(members: set[int]) -> str:
    return f"rank{'s' if len(members) > 1 else ''} {ranks.compact(members)}"
