"""
`LoadAuditor`: the coverage of a load, for programs that want to ask for it themselves.

It needs no hooks: neither `CKPT_SENTRY` nor `install()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckpt_sentry.core.coverage import coverage
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.examine import Examination, examine
from ckpt_sentry.core.findings import percent
from ckpt_sentry.core.inventory import Inventory, outer_name, under
from ckpt_sentry.core.policy import MAY_BE_MISSING
from ckpt_sentry.core.report import Coverage, Facts, Finding
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.errors import LowCoverageError
from ckpt_sentry.formats import folder
from ckpt_sentry.formats.dcp import metadata as dcp_metadata
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.integrations.dcp import keys as dcp_keys
from ckpt_sentry.model.unify import comparable, inventory_of, needed

if TYPE_CHECKING:
    from typing_extensions import Self

_SHOWN = 6


class LoadAuditor:
    """
    Demands that a load covers a model.

    Three ways to use it: `audit` compares two sets of keys, `check` a model with what lies at a path, by headers alone,
    and `with LoadAuditor(model=model):` watches any load into that model, whoever does it.

    Args:
        min_coverage: the part of the model, in [0, 1], that has to be supplied, by keys and by elements.
        allow_missing: globs of keys that may stay unloaded, such as "classifier.*".
        model: the module to watch as a context manager.
    """

    def __init__(self, min_coverage: float = 0.99, allow_missing: Iterable[str] = (), *, model: Any = None) -> None:
        if not 0 <= min_coverage <= 1:
            raise ValueError(f"min_coverage is {min_coverage}, not a number from 0 to 1")
        if isinstance(allow_missing, str):
            raise TypeError("allow_missing is one text; several globs are wanted")
        self.min_coverage = min_coverage
        self.allow_missing = tuple(allow_missing)
        self.coverage: Coverage | None = None
        """What was found last; also where it was too little."""
        self._model = model
        self._before: Any = None
        self._wanted = Inventory()

    def audit(self, model_keys: Any, checkpoint_keys: Any) -> Coverage:
        """
        Compare what a model wants with what a checkpoint holds.

        Each side is a mapping of names to tensors (a state dict), or names alone; the model may be the module itself.
        Shapes are compared, and elements counted, where both sides have shapes.

        Raises:
            LowCoverageError: too little would load.
        """
        wanted, held = inventory_of(model_keys), inventory_of(checkpoint_keys)
        return self._judge("LoadAuditor.audit", needed(model_keys, wanted, held), held, Facts())

    def check(self, model: Any, path: str | os.PathLike[str]) -> Coverage:
        """
        Say how much of a model a checkpoint would fill: a file, an index, a folder, or a DCP folder. Headers only.

        Of a DCP folder in which the model is one part of the saved state, that part is compared.

        Raises:
            LowCoverageError: too little would load, or nothing can be read; the text says why.
        """
        path = os.fspath(path)
        wanted = inventory_of(model)
        if os.path.isfile(os.path.join(path, dcp_metadata.FILE_NAME)):
            try:
                entries = dcp_metadata.read(path).entries
            except (OSError, ValueError) as error:
                found = error.finding() if isinstance(error, HeaderError) else _unreadable(error)
                return self._judge("LoadAuditor.check", wanted, Inventory(), Facts(path=path, findings=(found,)))
            held = Inventory(under(outer_name(entries, wanted.entries), entries))
            return self._judge(
                "LoadAuditor.check", needed(model, wanted, held), held, Facts(path=path), dcp_keys.advised
            )
        choice = folder.choose(path)
        wanted = needed(model, wanted, choice.inventory)
        return self._judge("LoadAuditor.check", wanted, choice.inventory, Facts(path=path, findings=choice.findings))

    def __enter__(self) -> Self:
        if self._model is None:
            raise ValueError("LoadAuditor has no model to watch: LoadAuditor(model=…)")
        from ckpt_sentry.model.snapshot import Snapshot

        self._wanted = inventory_of(self._model)
        self._before = Snapshot(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before, self._before = self._before, None
        if error is not None:
            return
        entries = self._wanted.entries
        came = Inventory({key: entries[key] for key in before.written(self._model) if key in entries})
        self._judge("LoadAuditor", needed(self._model, self._wanted, came), came, Facts())

    def _judge(
        self,
        entry_point: str,
        wanted: Inventory,
        held: Inventory,
        facts: Facts,
        advise: Callable[[Iterable[Finding]], tuple[Finding, ...]] = tuple,
    ) -> Coverage:
        """
        Compare both sides and raise below the minimum; `advise` gives the findings the next steps of the loader.
        """
        allowed = (*self.allow_missing, *MAY_BE_MISSING)
        found = examine(*comparable(wanted, held), allow_missing=allowed)
        self.coverage = _honest(found, wanted, allowed)
        if self.coverage.judged < self.min_coverage:
            from ckpt_sentry.render import refusals

            if entry_point == "LoadAuditor" and not held.entries:
                raise LowCoverageError(_nothing_came(wanted, found, self.min_coverage))
            say = refusals.loaded if entry_point == "LoadAuditor" else refusals.refused
            found = replace(found, findings=advise(found.findings))
            facts = replace(facts.examined(found), coverage=self.coverage)
            raise LowCoverageError(say(entry_point, facts, wanted, found.difference.missing, self.min_coverage))
        return self.coverage


def _honest(found: Examination, wanted: Inventory, allow_missing: tuple[str, ...]) -> Coverage:
    """
    The coverage by what enters, in elements where the model's are known; else the keys speak for them.
    """
    difference = found.difference
    lost = {*difference.missing, *(pair.key for pair in (*difference.mismatched, *difference.retyped))}
    part = coverage(wanted, wanted.entries.keys() - lost, allow_missing)
    return part if wanted.elements else Coverage(part.keys, part.keys)


def _nothing_came(wanted: Inventory, found: Examination, minimum: float) -> str:
    """
    The text of the error where no load has written anything: none was made, or one whose keys were all wrong.
    """
    return (
        "LoadAuditor: nothing was loaded into the model inside the with block: "
        f"0 of {wanted.keys:,} keys came in, the minimum is {percent(minimum)}\n"
        f"  missing     {', '.join(found.missing.keys[:_SHOWN])}{', …' if found.missing.keys[_SHOWN:] else ''}\n"
        "  next        Load inside the block, into this model and not into a copy; if it was load_state_dict(…, "
        "strict=False), look at the unexpected_keys that it returns."
    )


def _unreadable(error: Exception) -> Finding:
    reason = getattr(error, "strerror", None) or str(error)
    return Finding("metadata_unreadable", "error", f".metadata cannot be read: {shown(reason)}")
