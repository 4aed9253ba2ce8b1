"""
The one noun of this package: `LoadReport`, what one rank knows about one load.

Integrations build it, the transport serialises it, the collector restores it, renderers read it. All classes here are
frozen, hold plain data only and survive `codec.dump` and `codec.restore` unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ckpt_sentry.dataclasses_ import dataclass, replace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    class Examined(Protocol):
        """
        What `core.examine` finds in the keys of both sides.
        """

        @property
        def missing(self) -> KeyList: ...
        @property
        def unexpected(self) -> KeyList: ...
        @property
        def mismatched(self) -> tuple[ShapeMismatch, ...]: ...
        @property
        def casts(self) -> tuple[DtypeCast, ...]: ...
        @property
        def coverage(self) -> Coverage: ...
        @property
        def utilisation(self) -> float: ...
        @property
        def rename(self) -> Rename | None: ...
        @property
        def findings(self) -> tuple[Finding, ...]: ...


SCHEMA = "ckpt_sentry.load/1"

Verdict = Literal["ok", "partial", "no_op", "wrong_values", "failed", "diverged", "stalled"]
Level = Literal["error", "warning", "info"]
Framework: TypeAlias = str
"""The name of an integration: text, so that a launcher shows the report of a rank that knows more of them."""
Shape = tuple[int, ...]
FindingFacts = tuple[tuple[str, str], ...]
PhaseName = Literal[
    "setup", "plan", "read", "fill", "dispatch", "barrier", "restore", "verify", "finish",
    "optimizer", "scheduler", "sampler", "loader", "scaler", "random_states", "custom",
]  # fmt: skip
"""The stretches of a load that this version knows. What is read of another version may have more."""


@dataclass(frozen=True, slots=True)
class Identity:
    """
    Which process a report is of. Taken from the environment and the process group, never by communication.

    `attempt` counts the restarts of the run (0 for the first start). `node` is the host's name. A process outside any
    launcher is rank 0 of a world of 1.
    """

    run_id: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: str = ""
    pid: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class KeyList:
    """
    Some keys, folded (see `core.fold`). `count` counts single keys, `omitted` those that `keys` no longer shows.
    """

    count: int = 0
    keys: tuple[str, ...] = ()
    omitted: int = 0


NO_KEYS = KeyList()


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """
    Keys (folded) that are in both the model and the checkpoint, with different shapes (global shapes, in elements).

    `module` is the module path that holds them (folded as well), "" at the root.
    """

    keys: str
    count: int
    module: str
    model_shape: Shape
    checkpoint_shape: Shape


@dataclass(frozen=True, slots=True)
class DtypeCast:
    """
    Keys (folded) whose values change their type on the way in, as in "float32" to "bfloat16".
    """

    keys: str
    count: int
    model_dtype: str
    checkpoint_dtype: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """
    The part of the model's persistent state that the load supplied, each in [0, 1]; `judged` is the smaller one.
    """

    keys: float
    elements: float

    @property
    def judged(self) -> float:
        return min(self.keys, self.elements)


FULL: Final = Coverage(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Rename:
    """
    A rule that maps checkpoint keys to model keys, in words, and the coverage in [0, 1] that it would give.

    `count` is the number of keys that it maps, `example` one of them as (checkpoint key, model key). `stripped` is the
    prefix that is taken away, where the rule is nothing but that.
    """

    rule: str
    coverage: float
    count: int = 0
    example: tuple[str, str] | None = None
    stripped: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing worth saying: a stable code (docs/findings.md), a level, a sentence, and the next step if any.

    `facts` are pairs of a name and a value, as the catalogue (`core.codes`) makes the sentence of them. Ranks whose
    findings have the same facts say the same, whatever else their texts hold; without facts the texts are compared.
    `remedy` tells the two steps that a loader puts into words of its own: "rename" (the keys) and "allow" (the gap).
    """

    code: str
    level: Level
    text: str
    next: str | None = None
    facts: FindingFacts = ()
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """
    Sampled values of the model compared with the checkpoint's after the load: tensors compared, and those (folded)
    whose values differ.
    """

    checked: int
    differing: KeyList = NO_KEYS


@dataclass(frozen=True, slots=True)
class Phase:
    """
    A stretch of the load ("setup", "plan", "read", …) and how long it took, in seconds.
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadError:
    """
    The exception that ended the load: qualified type, text, and the phase in which it was raised.

    `where` is the innermost line of the program's own, as "train.py:44", where that is known.
    """

    type: str
    message: str
    phase: str | None = None
    where: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """
    What the checkpoint holds by its own metadata. `saved_path` is its path at save time, where that is recorded.
    """

    keys: int
    elements: int
    bytes: int
    files: int | None = None
    saved_path: str | None = None
    saved_by: int | None = None
    """How many ranks wrote it."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """
    What the caller wants filled: keys, elements and bytes in global shapes, tied tensors counted once.

    `name` is the model's class, where that is known.
    """

    keys: int
    elements: int
    bytes: int
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    What was observed of a load: the part of its report that an integration fills.
    """

    path: str | None = None
    format: str | None = None
    step: int | None = None
    step_source: str | None = None
    checkpoint: CheckpointSummary | None = None
    model: ModelSummary | None = None
    missing: KeyList = NO_KEYS
    unexpected: KeyList = NO_KEYS
    mismatched: tuple[ShapeMismatch, ...] = ()
    casts: tuple[DtypeCast, ...] = ()
    coverage: Coverage | None = None
    utilisation: float | None = None
    rename: Rename | None = None
    findings: tuple[Finding, ...] = ()
    proof: Proof | None = None
    bytes_read: int = 0
    key_digest: str | None = None
    """
    A digest of the keys this rank asked for: of those at the top, "/", of all; the second part once they are known.
    """

    def examined(self, examination: Examined) -> Facts:
        """
        These facts with what `core.examine` found in the keys, its findings before those already known.
        """
        return replace(
            self,
            missing=examination.missing,
            unexpected=examination.unexpected,
            mismatched=examination.mismatched,
            casts=examination.casts,
            coverage=examination.coverage,
            utilisation=examination.utilisation,
            rename=examination.rename,
            findings=(*examination.findings, *self.findings),
        )

    def at_step(self, step: tuple[int, str] | None) -> Facts:
        """
        These facts with the training step and what told it (`formats.step.Step`); None where nothing did.
        """
        value, source = step or (None, None)
        return replace(self, step=value, step_source=source)

    def with_findings(self, findings: Iterable[Finding]) -> Facts:
        """
        These facts and more findings; one that is known already is not repeated.
        """
        found = tuple(dict.fromkeys((*self.findings, *findings)))
        return self if len(found) == len(self.findings) else replace(self, findings=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Facts):
    """
    What one rank knows about one load.

    `load_id` is the same on all ranks of a load (32 hexadecimal digits, also the trace id); `ordinal` counts the
    loads of this kind in the process, from 0. Times are seconds since the epoch.
    """

    load_id: str
    ordinal: int
    identity: Identity
    framework: Framework
    entry_point: str
    verdict: Verdict
    started_at: float
    ended_at: float
    phases: tuple[Phase, ...] = ()
    error: LoadError | None = None
    schema: str = SCHEMA

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_at - self.started_at)
