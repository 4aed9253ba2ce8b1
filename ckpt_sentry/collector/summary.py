"""
`Aggregate`, what is known of one load over all ranks of a job: the contract that `ckpt-sentry report --json` prints.

Ranks are compact ranges ("0-1,3"), times are seconds, sizes are bytes. Plain frozen data, like `LoadReport`.
"""

from __future__ import annotations

from typing import Final, Literal

from ckpt_sentry.core.report import (
    NO_KEYS,
    Coverage,
    FindingFacts,
    Framework,
    KeyList,
    Level,
    LoadReport,
    PhaseName,
    Rename,
    ShapeMismatch,
    Verdict,
)
from ckpt_sentry.dataclasses_ import dataclass

OrderBy = Literal["arrival", "clock"]

SEVERITY: Final[dict[str, int]] = {
    "ok": 0,
    "partial": 1,
    "no_op": 2,
    "diverged": 3,
    "wrong_values": 4,
    "stalled": 5,
    "failed": 6,
}
"""How bad a verdict is: the verdict of a job is the worst of its ranks'."""

STILL_WAITING: Final = "still waiting"
"""Why a rank is unfinished that has been in the load, or away from it, for too long."""

DOING: Final[dict[PhaseName, str]] = {
    "setup": "while setting up",
    "plan": "while planning",
    "read": "while reading",
    "fill": "while filling the model",
    "dispatch": "while dispatching the model to its devices",
    "barrier": "while waiting for the others",
    "restore": "while handing over what was read",
    "verify": "while verifying",
    "finish": "while finishing",
    "optimizer": "while loading the optimizer",
    "scheduler": "while loading the scheduler",
    "sampler": "while loading the sampler",
    "loader": "while loading the dataloader",
    "scaler": "while loading the gradient scaler",
    "random_states": "while loading the random states",
    "custom": "while loading the registered objects",
}
_WORDS: Final = {str(name): words for name, words in DOING.items()}


def doing(phase: str | None) -> str:
    """
    What a rank is about in a phase, to be put behind a verb: "while planning".
    """
    if phase is None:
        return "before it came to this load"
    return _WORDS.get(phase, f"in phase {phase}")


@dataclass(frozen=True, slots=True)
class JobError:
    """
    The error of the first rank that failed. `type` is the signal's name where the rank was killed.

    `order_by` says how "first" was found: by arrival at one receiver, or by the clocks of several machines.
    """

    type: str
    message: str
    phase: str | None
    first_rank: int
    order_by: OrderBy


@dataclass(frozen=True, slots=True)
class RankFinding:
    """
    A finding and the ranks that have it. A text of several lines carries a stack from its second line on.

    `names_ranks` tells that the text itself says of which ranks it is.
    """

    code: str
    level: Level
    ranks: str
    text: str
    next: str | None = None
    facts: FindingFacts = ()
    names_ranks: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """
    Ranks with the same report: that of the lowest of them.
    """

    ranks: str
    count: int
    report: LoadReport


@dataclass(frozen=True, slots=True)
class Unfinished:
    """
    Ranks whose part of the load has no end. `phase` is the last they entered, None where they never came.
    """

    ranks: str
    phase: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Spread:
    """
    A duration over the ranks, in seconds.
    """

    min: float
    median: float
    max: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """
    How long the load took over the ranks, whole and by phase (in the order in which phases were first seen).
    """

    total: Spread
    phases: tuple[tuple[str, Spread], ...] = ()


@dataclass(frozen=True, slots=True)
class Mismatches:
    """
    Keys with two shapes: how many single keys, and the folded items.
    """

    count: int = 0
    items: tuple[ShapeMismatch, ...] = ()


NO_MISMATCHES: Final = Mismatches()


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """
    One load over all ranks. Key counts, coverage and rename are those of the worst group.
    """

    load_id: str
    run_id: str
    ordinal: int
    framework: Framework
    entry_point: str
    world_size: int
    ranks_reported: str
    started_at: float
    ended_at: float
    verdict: Verdict
    attempt: int = 0
    path: str | None = None
    format: str | None = None
    step: int | None = None
    step_source: str | None = None
    error: JobError | None = None
    coverage: Coverage | None = None
    utilisation: float | None = None
    missing: KeyList = NO_KEYS
    unexpected: KeyList = NO_KEYS
    mismatched: Mismatches = NO_MISMATCHES
    rename: Rename | None = None
    findings: tuple[RankFinding, ...] = ()
    groups: tuple[Group, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    failed_ranks: str = ""
    """Ranks that failed or never ended, those that were only told of another's failure included."""
    heard_ranks: int = 0
    """How many ranks have sent events here or would have; fewer than `world_size`: nothing is known of the others."""
    seconds: Seconds | None = None
    bytes_read: int = 0
