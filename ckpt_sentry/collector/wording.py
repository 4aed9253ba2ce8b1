"""
How ranks ended, wait or were late, in words; and one finding for all ranks of which the same is said.
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

_SIGKILL: Final = "SIGKILL without an operator is mostly the out-of-memory killer: see `dmesg -T` on its node."
MORE_TIME: Final = "Find out why it took so long, or give the process group more time: init_process_group(timeout=…)."
"""What to do about a rank for which the others did not wait any longer."""
_SEE_OUTPUT: Final = "See that rank's own output for why it left."


class RanksEnded(NamedTuple):
    """
    What is said of one rank: the code, the words behind its name, and the next step if there is any.
    """

    code: str
    text: str
    next: str | None = None


def how(event: RankEnded) -> str:
    """
    How a rank ended, in a word or two: "killed by SIGKILL", "raised ValueError: …".
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


def look_at(event: RankEnded) -> str | None:
    """
    The next step where a rank ended by an exception of its own, which has been said: where it was raised.
    """
    if event.error is None:
        return None
    return f"Look at {event.error.where}, where it was raised." if event.error.where else _SEE_OUTPUT


def step_after(event: RankEnded | None) -> str | None:
    """
    What to do about a rank that ended so; None: without a word.
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


def waits(stall: Stall, phase: str | None) -> RanksEnded:
    """
    That a rank waits in a phase, with its stack.
    """
    seconds = max(0.0, stall.at - stall.since)
    # Whole seconds, and coarse ones for long waits: ranks that wait for the same thing should fall together.
    shown = round(seconds, -1) if seconds >= 100 else round(seconds)  # noqa: PLR2004
    return RanksEnded("rank_stalled", f"waits {doing(phase)} for {shown:.0f} s{stack_below(stall)}")


def stack_below(stall: Stall | None) -> str:
    """
    The stack of a rank, to be put behind what is said of it; "" where it has none.
    """
    stack = "" if stall is None else stall.stack.rstrip()
    return f"; its stack:\n{stack}" if stack else ""


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


def by_ranks(members: Iterable[int], say: Callable[[int], RanksEnded], level: Level) -> list[RankFinding]:
    """
    Findings for ranks, one for all that say the same; the text names the ranks.
    """
    groups: dict[RanksEnded, list[int]] = defaultdict(list)
    for rank in members:
        groups[say(rank)].append(rank)
    found = []
    for told, some in groups.items():
        names = ranks.compact(some)
        said = f"rank {names} {told.text}" if len(some) == 1 else f"ranks {names} {_plural(told.text)}"
        step = None if told.next is None else told.next if len(some) == 1 else _steps_of_several(told.next)
        found.append(RankFinding(told.code, level, names, said, step))
    return found


def _plural(text: str) -> str:
    verb, _, rest = text.partition(" ")
    verb = {"was": "were", "waits": "wait", "has": "have"}.get(verb, verb)
    return f"{verb} {rest}".replace("; its stack:\n", "; the stack of each:\n")


def _steps_of_several(step: str) -> str:
    return (
        step.replace("what it does", "what they do")
        .replace("why it took", "why they took")
        .replace("that rank's own output for why it left", "their own output for why they left")
        .replace("on its node", "on their nodes")
    )
