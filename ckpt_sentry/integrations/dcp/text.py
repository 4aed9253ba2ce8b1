"""
The text of a `CheckpointException`: what torch says (api.py:54), each distinct failure once.

torch prints the failures of all ranks on every rank, so one missing key on W ranks is printed W² times. Here ranks with
the same failure share one copy. No word of torch's is lost but the repetition, and `dict_keys([…])` becomes ranks.
"""

from __future__ import annotations

import functools
import traceback
from typing import TYPE_CHECKING, Any

from ckpt_sentry.core import ranks
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.session.exceptions import raw_text, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt_sentry.patching.ledger import Patch


def readable(original: Callable[..., str], patch: Patch) -> Callable[..., str]:
    """
    Wrap `CheckpointException.__str__`.
    """

    @functools.wraps(original)
    def text(self: Any) -> str:
        if not patch.active:
            return original(self)
        return _text(self) or original(self)

    return text


@contained("dcp.text")
def _text(exc: Any) -> str:
    report = getattr(exc, "ckpt_sentry", None)
    where = "" if report is None else _where(report)
    lines = [f"CheckpointException ranks:[{ranks.compact(exc.failures)}]{where}\n"]
    for text, members in grouped(exc.failures).items():
        lines.append(f"Traceback (most recent call last): ({_name(members)})\n{text}")
    return "".join(lines)


def grouped(failures: Any) -> dict[str, list[int]]:
    """
    Ranks by the text of their failure, in the order of the first rank of each.
    """
    texts: dict[Any, str] = {}
    groups: dict[str, list[int]] = {}
    for rank, (error, stack) in failures.items():
        same = _same(error, stack)
        if same not in texts:
            texts[same] = "".join(traceback.format_list(stack) if stack is not None else ()) + _last_lines(error)
        groups.setdefault(texts[same], []).append(rank)
    return groups


def _same(error: BaseException, stack: Any) -> Any:
    """
    What two failures have in common whose text need not be made twice.
    """
    frames = None if stack is None else tuple((frame.filename, frame.lineno, frame.name) for frame in stack)
    return type(error), raw_text(error), tuple(getattr(error, "__notes__", ())), frames


def _last_lines(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(type(error), error))
    raw, told = raw_text(error), text_of(error)
    return lines if raw == told else lines.replace(raw, told)


def _name(members: Iterable[int]) -> str:
    members = list(members)
    return f"RANK {members[0]}" if len(members) == 1 else f"RANK {members[0]}, the same on {ranks.compact(members)}"


def _where(report: Any) -> str:
    parts = [f"rank {report.identity.rank}"]
    if report.step is not None:
        parts.append(f"step {report.step}")
    if report.path is not None:
        parts.append(report.path)
    return " · " + " · ".join(parts)
