"""
The report as JSON: the promise to other programs (README: "The JSON").

Every key is always there, null where nothing is known. Text is ASCII with escapes, keys keep one order.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from ckpt_sentry.collector.aggregate import Aggregate
from ckpt_sentry.collector.summary import Spread
from ckpt_sentry.core import codec
from ckpt_sentry.core.escape import cut
from ckpt_sentry.core.report import KeyList, LoadReport
from ckpt_sentry.render.folded import size as folded_size
from ckpt_sentry.render.keys import brief_key

SCHEMA: Final = "ckpt_sentry.report/1"

LIMIT_BYTES: Final = 256 * 1024
"""Bytes of one load in a document; what had to go is counted in its place or in a `left_out` finding."""

_LONGEST_TEXT: Final = 16_000

_Data = dict[str, Any]


def document(aggregates: Iterable[Aggregate], *, left_out: int = 0) -> _Data:
    """
    The document for some loads, in the order given; `left_out` more good ones are only known by their number.
    """
    data: _Data = {"schema": SCHEMA, "loads": [_bounded(_load(one)) for one in aggregates]}
    return {**data, "left_out": {"loads": left_out}} if left_out else data


def text(data: _Data) -> str:
    """
    A document as ASCII text, indented, with a newline at its end.
    """
    return json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _load(one: Aggregate) -> _Data:
    return {
        "load_id": one.load_id,
        "run_id": one.run_id,
        "ordinal": one.ordinal,
        "framework": one.framework,
        "entry_point": one.entry_point,
        "path": one.path,
        "format": one.format,
        "step": one.step,
        "step_source": one.step_source,
        "world_size": one.world_size,
        "ranks_reported": one.ranks_reported,
        "started_at": _finite(one.started_at),
        "ended_at": _finite(one.ended_at),
        "verdict": one.verdict,
        "error": _error(one),
        "coverage": _coverage(one),
        "utilisation": None if one.utilisation is None else _finite(one.utilisation),
        "missing": _keys(one.missing),
        "unexpected": _keys(one.unexpected),
        "mismatched": _mismatched(one),
        "rename": one.rename and {"rule": one.rename.rule, "coverage": _finite(one.rename.coverage)},
        "findings": [
            {"code": found.code, "level": found.level, "ranks": found.ranks, "text": found.text, "next": found.next}
            for found in one.findings
        ],
        "groups": [
            {"ranks": group.ranks, "count": group.count, "report": _report(group.report)} for group in one.groups
        ],
        "unfinished": [{"ranks": row.ranks, "phase": row.phase, "why": row.why} for row in one.unfinished],
        "seconds": _seconds(one),
        "bytes_read": one.bytes_read,
    }


def _report(one: LoadReport) -> _Data:
    """
    A report without what is empty in it; but who speaks is said in full, for rank 0 is a rank.
    """
    return {**_plain(codec.dump(one)), "identity": dataclasses.asdict(one.identity)}


def _error(one: Aggregate) -> _Data | None:
    error = one.error
    if error is None:
        return None
    return {
        "type": error.type,
        "message": error.message,
        "phase": error.phase,
        "first_rank": error.first_rank,
        "order_by": error.order_by,
    }


def _coverage(one: Aggregate) -> _Data | None:
    got = one.coverage
    if got is None:
        return None
    return {"keys": _finite(got.keys), "elements": _finite(got.elements), "judged": _finite(got.judged)}


def _keys(keys: KeyList) -> _Data:
    data: _Data = {"count": keys.count, "keys": list(map(brief_key, keys.keys))}
    if keys.omitted:
        data["omitted"] = keys.omitted
    return data


def _mismatched(one: Aggregate) -> _Data:
    items = [
        {
            "keys": brief_key(item.keys),
            "module": item.module,
            "model_shape": list(item.model_shape),
            "checkpoint_shape": list(item.checkpoint_shape),
        }
        for item in one.mismatched.items
    ]
    return {"count": one.mismatched.count, "items": items}


def _seconds(one: Aggregate) -> _Data | None:
    if one.seconds is None:
        return None
    return {**_spread(one.seconds.total), "phases": {name: _spread(spent) for name, spent in one.seconds.phases}}


def _spread(spent: Spread) -> _Data:
    return {
        "min": _finite(spent.min),
        "median": _finite(spent.median),
        "max": _finite(spent.max),
        "slowest_rank": spent.slowest_rank,
    }


def _finite(number: float) -> float | None:
    # JSON knows neither NaN nor infinity.
    return number if number - number == 0 else None


def _plain(data: Any) -> Any:
    if isinstance(data, float):
        return _finite(data)
    if isinstance(data, str):
        return cut(data, _LONGEST_TEXT)
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list) else data


def _bounded(load: _Data) -> _Data:
    """
    Cut a load's data, least needed first, until it fits `LIMIT_BYTES`.
    """
    steps: tuple[Callable[[_Data], object], ...] = (
        *(_fewer_group_keys(keep) for keep in (50, 5, 0)),
        *(_fewer(("groups", "unfinished"), keep) for keep in (50, 10)),
        *(_shorter_texts(longest) for longest in (4_000, 1_000)),
        _fewer(("findings",), 50),
        *(_fewer_keys(keep) for keep in (1_000, 200, 50, 10)),
        *(_shorter_texts(longest) for longest in (300, 60)),
        _fewer(("groups", "unfinished", "findings"), 5),
    )
    for step in steps:
        if len(json.dumps(load)) <= LIMIT_BYTES:
            break
        step(load)
    return load


def _fewer_group_keys(keep: int) -> Callable[[_Data], object]:
    def shrink(load: _Data) -> None:
        for group in load["groups"]:
            report = group["report"]
            for name in ("missing", "unexpected"):
                if name in report:
                    _cut_keys(report[name], keep)
            for name in ("mismatched", "casts"):
                if len(report.get(name, ())) > keep:
                    _add_left_out(load, f"{len(report[name]) - keep:,} {name} of ranks {group['ranks'][:40]}")
                    del report[name][keep:]

    return shrink


def _fewer_keys(keep: int) -> Callable[[_Data], object]:
    def shrink(load: _Data) -> None:
        _cut_keys(load["missing"], keep)
        _cut_keys(load["unexpected"], keep)
        items = load["mismatched"]["items"]
        if len(items) > keep:
            gone = sum(folded_size(item["keys"]) for item in items[keep:])
            load["mismatched"]["omitted"] = load["mismatched"].get("omitted", 0) + gone
            del items[keep:]

    return shrink


def _cut_keys(keys: _Data, keep: int) -> None:
    if len(keys.get("keys", ())) > keep:
        keys["omitted"] = keys.get("omitted", 0) + sum(map(folded_size, keys["keys"][keep:]))
        del keys["keys"][keep:]


def _fewer(names: tuple[str, ...], keep: int) -> Callable[[_Data], object]:
    def shrink(load: _Data) -> None:
        for name in names:
            if len(load[name]) > keep:
                gone = len(load[name]) - keep
                del load[name][keep:]
                _add_left_out(load, f"{gone:,} {name}")

    return shrink


def _add_left_out(load: _Data, what: str) -> None:
    text_ = f"left out of this report: {what}"
    load["findings"].append({"code": "left_out", "level": "info", "ranks": "", "text": text_, "next": None})


def _shorter_texts(longest: int) -> Callable[[_Data], object]:
    def cut(data: Any, name: str = "") -> Any:
        if isinstance(data, str) and len(data) > longest:
            if name in ("ranks", "ranks_reported"):
                return data[: data.rfind(",", 0, longest)]
            return f"{data[:longest]}... (+{len(data) - longest:,} characters)"
        if isinstance(data, dict):
            return {key: cut(value, key) for key, value in data.items()}
        return [cut(value) for value in data] if isinstance(data, list) else data

    def shrink(load: _Data) -> None:
        load.update(cut(load))

    return shrink
