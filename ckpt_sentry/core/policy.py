"""
When the agent raises an error of its own, and the smallest setting that would let a load pass (docs/policy.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal

from ckpt_sentry.core.report import Coverage
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core.coverage import matcher
else:
    matcher = later("ckpt_sentry.core.coverage:matcher")

Mode = Literal["off", "on", "observe", "strict"]
Reason = Literal["nothing", "too_little", "partial", "wrong_values"]

MOST_GLOBS: Final = 4
"""More patterns than this are no setting but a list: then none is proposed."""

MAY_BE_MISSING: Final = ("num_batches_tracked", "*.num_batches_tracked")
"""Globs of keys whose absence says nothing: counters that BatchNorm got in torch 0.4.1 (batchnorm.py, `_version`)."""

_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)")
_SPECIAL = re.compile(r"([*?[])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """
    What the settings ask for. `minimum` is a coverage in [0, 1].

    `tolerated` says that the caller asked for a partial load in so many words (`nn.Module.load_state_dict(…,
    strict=False)`): then only the mode "strict" refuses. To accelerate's loaders `strict=False` is the default, and no
    such word.
    """

    mode: Mode = "on"
    minimum: float = 0.99
    tolerated: bool = False

    def refusal(self, coverage: Coverage | None) -> Reason | None:
        """
        Why a load of this coverage is to be refused, or None. Without a coverage nothing is known, and nothing refused.
        """
        if coverage is None or self.mode in ("off", "observe"):
            return None
        if self.mode == "strict" and coverage.judged < 1:
            return "nothing" if coverage.keys == 0 else "partial"
        if self.tolerated or coverage.judged >= self.minimum:
            return None
        return "nothing" if coverage.keys == 0 else "too_little"

    def disproof(self, differing: int) -> Reason | None:
        """
        Why a load whose proof found `differing` tensors with other values is to be refused, or None.
        """
        return "wrong_values" if differing and self.mode in ("on", "strict") else None


def allowing(missing: Collection[str], model_keys: Iterable[str]) -> tuple[str, ...]:
    """
    The fewest globs for `CKPT_SENTRY_ALLOW_MISSING` that match all missing keys and no other key of the model.

    A glob is the shortest path below which everything is missing (`classifier.*`), with `*` for the numbers of layers
    where that matches nothing else. Empty where all keys are missing, or where there would be more than `MOST_GLOBS`.
    """
    gone = set(missing)
    kept = [key for key in model_keys if key not in gone]
    if not gone or not kept:
        return ()
    inhabited = {prefix for key in kept for prefix in _prefixes(key)}
    exact = {_glob(key, inhabited) for key in gone}
    wider = {_NUMBER.sub("*", glob) for glob in exact}
    globs = sorted(wider if not _matches_any(sorted(wider), kept) else exact)
    globs = [glob for glob in globs if not _covered(glob, globs)]
    return tuple(globs) if len(globs) <= MOST_GLOBS else ()


def _prefixes(key: str) -> Iterable[str]:
    place = key.find(".")
    while place != -1:
        yield key[:place]
        place = key.find(".", place + 1)


def _glob(key: str, inhabited: Collection[str]) -> str:
    for prefix in _prefixes(key):
        if prefix not in inhabited:
            return f"{_literal(prefix)}.*"
    return _literal(key)


def _literal(text: str) -> str:
    return _SPECIAL.sub(r"[\1]", text)


def _matches_any(globs: Sequence[str], keys: Iterable[str]) -> bool:
    matches = matcher(globs)
    return any(map(matches, keys))


def _covered(glob: str, globs: Iterable[str]) -> bool:
    return any(other != glob and other.endswith(".*") and glob.startswith(other[:-1]) for other in globs)
