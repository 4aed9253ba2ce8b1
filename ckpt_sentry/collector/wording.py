"""
How ranks ended, wait or were late, in words; and one finding for all ranks with the same statement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from ckpt_sentry.collector.groups import LoadState, Stall
from ckpt_sentry.collector.summary import RankFinding, doing
from ckpt_sentry.core import ranks
from ckpt_sentry.core.report import Level, LoadError
from ckpt_sentry.transport.events import RankEnded

CODES: Final = {"killed": "rank_killed", "raised": "rank_raised"}
"""The finding's code by the way in which a rank ended."""


class OneOrSeveral(NamedTuple):
    """
    The same words of one rank, and of several.
    """

    one: str
    several: str


WAS: Final = OneOrSeveral("was", "were")
WAITS: Final = OneOrSeveral("waits", "wait")
HAS: Final = OneOrSeveral("has", "have")

_SIGKILL: Final = OneOrSeveral(
    "SIGKILL without an operator is mostly the out-of-memory killer: see `dmesg -T` on its node.",
    "SIGKILL without an operator is mostly the out-of-memory killer: see `dmesg -T` on their nodes.",
)
MORE_TIME: Final = OneOrSeveral(
    "Find out why it took so long, or give the process group more time: init_process_group(timeout=…).",
    "Find out why they took so long, or give the process group more time: init_process_group(timeout=…).",
)
"""What to do about ranks for which the others did not wait any longer."""
ABSENCE: Final = OneOrSeveral(
    "Find out what it does instead of loading: every rank must make this call.",
    "Find out what they do instead of loading: every rank must make this call.",
)
_SEE_OUTPUT: Final = OneOrSeveral(
    "See that rank's own output for why it left.", "See their own output for why they left."
)


class RankStatement(NamedTuple):
    """
    What is said of one rank: the code, the words behind its name, the next step and its stack if there are any.

    `verb` is the first of these words where it is another for several ranks.
    """

    code: str
    text: str
    step: OneOrSeveral | None = None
    verb: OneOrSeveral | None = None
    stack: str = ""

    def finding(self, members: list[int], level: Level) -> RankFinding:
        """
        The finding for ranks of which all of this is said.
        """
        names, is_one = ranks.compact(members), len(members) == 1
        words = ["rank" if is_one else "ranks", names]
        if self.verb is not None:
            words.append(self.verb.one if is_one else self.verb.several)
        text = " ".join([*words, self.text])
        if self.stack:
            text += f"; {'its stack' if is_one else 'the stack of each'}:\n{self.stack}"
        step = None if self.step is None else self.step.one if is_one else self.step.several
        return RankFinding(self.code, level, names, text, step, names_ranks=True)


def how(event: RankEnded) -> str:
    """
    How a rank ended, in a few words: "killed by SIGKILL", "raised ValueError: …".
    """
    if event.how == "stopped":
        return "stopped by the launcher"
    if event.how == "killed":
        return f"killed by {event.signal or 'a signal'}"
    if event.error is not None:
        return f"raised {event.error.type}: {event.error.message}".rstrip(": ")
    return "ended without a word" if event.exit_code is None else f"exited with code {event.exit_code}"


def was(event: RankEnded) -> str:
    """
    How a rank ended, to be put behind its name: "was killed by SIGKILL".
    """
    return f"was {how(event)}" if event.how == "killed" else how(event)


def ended(event: RankEnded, when: str) -> RankStatement:
    """
    The statement that a rank ended, `when` that was; without a next step.
    """
    code = CODES.get(event.how, "rank_exited")
    return RankStatement(code, f"{how(event)} {when}", verb=WAS if event.how == "killed" else None)


def look_at(event: RankEnded) -> OneOrSeveral | None:
    """
    The next step where a rank ended by an exception of its own: the line that raised it.
    """
    if event.error is None:
        return None
    if not event.error.where:
        return _SEE_OUTPUT
    step = f"Look at {event.error.where}, where it was raised."
    return OneOrSeveral(step, step)


def step_after(event: RankEnded | None) -> OneOrSeveral | None:
    """
    What to do about a rank that ended so; None: nobody knows how.
    """
    if event is None:
        return _SEE_OUTPUT
    if event.how == "killed":
        return _SIGKILL if event.signal == "SIGKILL" else None
    return look_at(event) or _SEE_OUTPUT


def ended_error(event: RankEnded, phase: str | None) -> LoadError:
    """
    The end of a rank as an error of the load, which it left in a phase.
    """
    if event.error is not None:
        return LoadError(event.error.type, event.error.message, event.error.phase or phase)
    kind = (event.signal or "signal") if event.how == "killed" else "SystemExit"
    return LoadError(kind, how(event), phase)


def waits(stall: Stall, phase: str | None) -> RankStatement:
    """
    That a rank waits in a phase, with its stack.
    """
    seconds = max(0.0, stall.at - stall.since)
    # Whole seconds, and coarse ones for long waits: ranks that wait for the same thing should fall together.
    shown = round(seconds, -1) if seconds >= 100 else round(seconds)  # noqa: PLR2004
    text = f"{doing(phase)} for {shown:.0f} s"
    return RankStatement("rank_stalled", text, verb=WAITS, stack=stall.stack.rstrip())


def stalled_before(stalls: Mapping[int, Stall], state: LoadState) -> RankFinding:
    """
    That a load which has ended on these ranks had stalled there: for how long, and who was late or waited.
    """
    longest = 0.0
    rows: dict[str, list[int]] = defaultdict(list)
    for rank, stall in sorted(stalls.items()):
        started, ended, _ = state.times[rank]
        if stall.phase is None:
            longest = max(longest, started - stall.since)
            rows["came late"].append(rank)
        else:
            spent = state.phase_seconds.get(stall.phase, {}).get(rank, ended - stall.since)
            longest = max(longest, spent)
            rows[f"waited {doing(stall.phase)}"].append(rank)
    late_first = sorted(rows.items(), key=lambda row: (row[0] != "came late", row[1]))
    said = ", ".join(f"rank{'s'[: len(some) > 1]} {ranks.compact(some)} {what}" for what, some in late_first)
    text = f"Stalled for {max(0.0, longest):.0f} s: {said}"
    return RankFinding("rank_stalled", "info", ranks.compact(stalls), text)


def by_ranks(members: Iterable[int], statement: Callable[[int], RankStatement], level: Level) -> list[RankFinding]:
    """
    Findings for ranks, one for all of which the same is said; the text names the ranks.
    """
    groups: dict[RankStatement, list[int]] = defaultdict(list)
    for rank in members:
        groups[statement(rank)].append(rank)
    return [same.finding(some, level) for same, some in groups.items()]
