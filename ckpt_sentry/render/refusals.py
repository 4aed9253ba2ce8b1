"""
The text of a `LowCoverageError`: how much would load, why, and the one setting or call that changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckpt_sentry.core import codes, policy
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.findings import is_anew
from ckpt_sentry.core.fold import folds
from ckpt_sentry.core.words import counted, percent, verb
from ckpt_sentry.formats.paths import shown_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_sentry.core.inventory import Inventory
    from ckpt_sentry.core.report import Coverage, Facts, Finding, KeyList

_SHOWN: Final = 6
_CAUSES: Final = 3
_PLAIN_LISTS: Final = frozenset({"missing_keys", "unexpected_keys", "low_coverage", "renamed_keys", "no_overlap"})
"""Findings that the lines below say in their own words."""
_OWN_STEPS: Final = frozenset({"low_coverage", "renamed_keys"})


def refused(entry_point: str, facts: Facts, wanted: Inventory, missing: Sequence[str], minimum: float) -> str:
    """
    The text of an error that was raised before anything was written.
    """
    return _text(f"{entry_point} refused, the model is untouched", facts, wanted, missing, minimum, would=True)


def loaded(entry_point: str, facts: Facts, wanted: Inventory, missing: Sequence[str], minimum: float) -> str:
    """
    The text of an error that was raised after the load: only then it could be judged.
    """
    return _text(f"{entry_point} has loaded too little", facts, wanted, missing, minimum, would=False)


def tensors(count: int, one: str, more: str) -> str:
    """
    "1 tensor" with the verb for one, or so many with that for more.
    """
    return f"{counted(count, 'tensor')} {verb(count, one, more)}"


def disproved(entry_point: str, facts: Facts) -> str:
    """
    The text of an error about values: the keys match, what the model holds does not.
    """
    proof, coverage = facts.proof, facts.coverage
    part = "" if coverage is None else f" although {_coverage(coverage)} match"
    head = f"{entry_point} left wrong values in the model{part}"
    if proof is not None and proof.differing.count:
        differ = verb(proof.differing.count, "differs", "differ")
        head += f": {proof.differing.count:,} of {proof.checked:,} compared tensors {differ} from the checkpoint"
    lines = [head, *_checkpoint(facts)]
    for finding in facts.findings:
        if finding.level == "error":
            lines.append(_line("cause", finding.text))
            lines += _next(finding)
    if proof is not None and proof.differing.count:
        lines.append(_line("differing", _keys(proof.differing)))
    return "\n".join(lines)


def _text(  # noqa: PLR0913 - the parts of one sentence
    head: str,
    facts: Facts,
    wanted: Inventory,
    missing: Sequence[str],
    minimum: float,
    *,
    would: bool,
) -> str:
    # Without the names of `missing`, the findings alone know what would let the gap pass.
    coverage = facts.coverage
    came = "would load" if would else "came in"
    part = "" if coverage is None else f": {_coverage(coverage)} {came}, the minimum is {percent(minimum)}"
    lines = [head + part, *_checkpoint(facts)]
    lines += [_line("cause", finding.text) for finding in _causes(facts.findings)]
    if (rename := facts.rename) is not None:
        example = "" if rename.example is None else " ({} → {})".format(*map(shown, rename.example))
        lines.append(_line("rename", f"{rename.rule}{example}: {percent(rename.coverage)} would load"))
        lines += [_line("", one.next) for one in facts.findings if one.code == "renamed_keys" and one.next]
    if facts.missing.count:
        count = f"{facts.missing.count:,} of {wanted.keys:,} keys of the model"
        lines.append(_line("missing", f"{count}: {_keys(facts.missing)}"))
    if facts.unexpected.count:
        lines.append(_line("unexpected", f"{facts.unexpected.count:,} keys: {_keys(facts.unexpected)}"))
    lines += [_line("next", step) for step in _steps(facts.findings)]
    if _is_gap(facts) and (globs := policy.allowing(missing, wanted.entries)):
        lines.append(_line("wanted?", f"if this gap is wanted: CKPT_SENTRY_ALLOW_MISSING='{','.join(globs)}'"))
    elif _is_gap(facts) and not missing:
        lines += [_line("wanted?", one.next) for one in facts.findings if one.next and is_anew(one)][:1]
    return "\n".join(lines)


def _causes(findings: Iterable[Finding]) -> list[Finding]:
    return [one for one in findings if one.level != "info" and one.code not in _PLAIN_LISTS][:_CAUSES]


def _steps(findings: Iterable[Finding]) -> list[str]:
    """
    The next steps, each once, that no other line gives.
    """
    steps = [
        one.next
        for one in findings
        if one.next and one.level != "info" and one.code not in _OWN_STEPS and not is_anew(one)
    ]
    return list(dict.fromkeys(steps))[:_CAUSES]


def _is_gap(facts: Facts) -> bool:
    """
    Whether it would load if the missing keys were allowed.
    """
    no_gap, fatal = codes.having(lambda code: code.finds_missing), codes.having(lambda code: code.ends_load)
    if facts.rename is not None or any(one.code in no_gap for one in facts.findings):
        return False
    return not any(one.code in fatal and one.level == "error" for one in facts.findings)


def _checkpoint(facts: Facts) -> list[str]:
    what = [shown_path(facts.path or "no path")]
    if facts.checkpoint is not None:
        what.append(f"{facts.checkpoint.keys:,} keys")
    return [_line("checkpoint", " · ".join(what))]


def _next(finding: Finding) -> list[str]:
    return [] if finding.next is None else [_line("next", finding.next)]


def _coverage(coverage: Coverage) -> str:
    return f"{percent(coverage.keys)} of keys and {percent(coverage.elements)} of elements"


def _keys(keys: KeyList) -> str:
    rest = keys.omitted + sum(fold.count for fold in folds(keys.keys[_SHOWN:]))
    return ", ".join(keys.keys[:_SHOWN]) + (", …" if rest else "")


def _line(label: str, text: str) -> str:
    return f"  {label:<11} {text}"
