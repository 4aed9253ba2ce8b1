"""
`CheckpointException` (torch 2.13.0, api.py): its text, and its way between ranks.

torch prints the failures of all ranks on every rank, so one missing key on W ranks is printed W² times. Here ranks with
the same failure share one copy. No word of torch's is lost but the repetition, and `dict_keys([…])` becomes ranks.

torch gathers failures by pickle and scatters one `CheckpointException` with all of them to each of W ranks
(utils.py:199 and 221), which grows as W². Here ranks with the same failure share one copy of it, and the copy is made
once for all W messages. What is sent is made of builtins and the standard library alone: it is read where this package
is not installed.
"""

from __future__ import annotations

import builtins
import functools
import operator
import pickle
import traceback
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_sentry.core import ranks
from ckpt_sentry.patching.guard import contained, let_through
from ckpt_sentry.session.exceptions import TEXT, raw_text, text_of

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


_PACKED = "_ckpt_sentry_packed"
_BYTE = 256
_OWN = (TEXT, _PACKED, "ckpt_sentry")


def portable(exc: BaseException) -> BaseException:
    """
    The same exception where it survives the way to the other ranks; else the nearest built-in one with its text.

    One that cannot be rebuilt would be replaced by "Can't pickle local object" or "__init__() missing …" on every rank.
    """
    try:
        pickle.loads(pickle.dumps(exc))  # noqa: S301 - bytes of our own making
    except Exception as failure:
        let_through(failure)
        bases = (c for c in type(exc).__mro__ if c.__module__ == "builtins")
        nearest = next((c for c in bases if c not in (BaseException, Exception, object)), RuntimeError)
        name = f"{type(exc).__module__}.{type(exc).__qualname__}"
        return _build(nearest, f"{name}: {text_of(exc)}").with_traceback(exc.__traceback__)
    return exc


def without_code(wrapped: Any) -> None:
    """
    Take the code objects out of a traceback that is to be sent: they cannot be pickled.

    Python 3.13 and later keep them (`FrameSummary._code`), and torch before 2.13 sends them, so that there every
    failure becomes "cannot pickle code objects".
    """
    for frame in wrapped[1]:
        if getattr(frame, "_code", None) is not None:
            frame._code = None


def reducing(original: Callable[[Any], Any], patch: Patch) -> Callable[[Any], Any]:
    """
    Wrap `CheckpointException.__reduce__`.
    """

    @functools.wraps(original)
    def reduce(self: Any) -> Any:
        if not patch.active:
            return original(self)
        return _reduced(self) or original(self)

    return reduce


class _Call(NamedTuple):
    """
    Pickled as the call of a function of the standard library: what is read back is its result.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class _Sent(NamedTuple):
    """
    Failures that are pickled as `call`.
    """

    failures: dict[int, Any]
    call: _Call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call.__reduce__()


class _Class(NamedTuple):
    """
    The class of an exception, pickled as itself. `copy.copy`, which makes no pickle, calls it with the very failures.
    """

    kind: type[BaseException]

    def __call__(self, message: Any, failures: Any) -> BaseException:
        return self.kind(message, failures.failures if isinstance(failures, _Sent) else failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self.kind,), 0)


@contained("dcp.reduce")
def _reduced(exc: Any) -> tuple[Any, ...] | None:
    failures = exc.failures
    if len(exc.args) != 2 or exc.args[1] is not failures:  # noqa: PLR2004 - a class of its own that is made otherwise
        return None
    state = {name: value for name, value in vars(exc).items() if name not in (*_OWN, "_failures")}
    # Good for one content: the dictionary is the caller's, and notes may come.
    stamp = (id(failures), len(failures), tuple(getattr(exc, "__notes__", ())))
    known = vars(exc).get(_PACKED)
    if known is not None and known[0] == stamp:
        sent = known[1]
    else:
        sent = _sent(failures)
        vars(exc)[_PACKED] = (stamp, sent)
    if sent is None:
        return None
    return _Class(type(exc)), (exc.args[0], sent), state or None


def _sent(failures: dict[int, Any]) -> _Sent | None:
    call = _packed(failures)
    return None if call is None else _Sent(failures, call)


def _packed(failures: dict[int, Any]) -> _Call | None:
    """
    The failures as calls that build an equal dictionary, or None where they are no plain, sorted ranks.

    Each distinct failure stands once in a compressed list (different failures of one load have most of their frames in
    common); a number for each rank up to the highest tells which is its own, 0 that it has none.
    """
    ranks = list(failures)
    if not all(type(rank) is int and rank >= 0 for rank in ranks) or ranks != sorted(ranks):
        return None
    distinct: list[Any] = [None]
    places: dict[Any, int] = {}
    which = [0] * (ranks[-1] + 1 if ranks else 0)
    for rank, pair in failures.items():
        place = places.get(id(pair))
        if place is None:
            data = pickle.dumps(pair)
            if data not in places:
                places[data] = len(distinct)
                distinct.append(pair)
            place = places[id(pair)] = places[data]
        which[rank] = place
    numbers = bytes(which) if len(distinct) <= _BYTE else which
    content = _Call(pickle.loads, (_Call(zlib.decompress, (zlib.compress(pickle.dumps((distinct, numbers))),)),))
    choose = _Call(getattr, (_Call(operator.getitem, (content, 0)), "__getitem__"))
    chosen = _Call(map, (choose, _Call(operator.getitem, (content, 1))))
    pairs = _Call(zip, (range(len(which)), chosen))
    return _Call(dict, (_Call(filter, (_Call(operator.itemgetter, (1,)), pairs)),))


def _build(kind: type[BaseException], text: str) -> BaseException:
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and its kin want five arguments
        return builtins.RuntimeError(text)
