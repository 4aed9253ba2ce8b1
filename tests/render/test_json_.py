from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings

from ckpt_sentry.collector.aggregate import Aggregate
from ckpt_sentry.core import codec, ranks
from ckpt_sentry.core.report import Coverage, Finding, KeyList, LoadError, LoadReport, Phase, Rename, ShapeMismatch
from ckpt_sentry.render import json_
from tests.collector.jobs import LOAD, RUN, failing, finished, killed, seen, started, told
from tests.render.test_text import aggregates

NUMBER = (int, float)
SPREAD = {"min": NUMBER, "median": NUMBER, "max": NUMBER, "slowest_rank": int}
KEYS = {"count": int, "keys": [str]}
LOAD_SCHEMA: dict[str, Any] = {
    "load_id": str,
    "run_id": str,
    "ordinal": int,
    "framework": str,
    "entry_point": str,
    "path": (str, None),
    "format": (str, None),
    "step": (int, None),
    "step_source": (str, None),
    "world_size": int,
    "ranks_reported": str,
    "started_at": NUMBER,
    "ended_at": NUMBER,
    "verdict": str,
    "error": (
        {"type": str, "message": str, "phase": (str, None), "first_rank": int, "order_by": str},
        None,
    ),
    "coverage": ({"keys": NUMBER, "elements": NUMBER, "judged": NUMBER}, None),
    "utilisation": (float, int, None),
    "missing": KEYS,
    "unexpected": KEYS,
    "mismatched": {
        "count": int,
        "items": [{"keys": str, "module": str, "model_shape": [int], "checkpoint_shape": [int]}],
    },
    "rename": ({"rule": str, "coverage": NUMBER}, None),
    "findings": [{"code": str, "level": str, "ranks": str, "text": str, "next": (str, None)}],
    "groups": [{"ranks": str, "count": int, "report": dict}],
    "unfinished": [{"ranks": str, "phase": (str, None), "why": str}],
    "seconds": ({**SPREAD, "phases": dict}, None),
    "bytes_read": int,
}


def check(data: object, schema: Any, where: str = "load") -> None:
    """
    Raises AssertionError where data does not have exactly the keys and types of the schema.
    """
    if isinstance(schema, tuple):
        if data is None and None in schema:
            return
        inner = [one for one in schema if one is not None]
        if isinstance(inner[0], dict):
            check(data, inner[0], where)
        else:
            assert isinstance(data, tuple(inner)), where
    elif isinstance(schema, dict):
        assert isinstance(data, dict), where
        assert set(data) - {"omitted"} == set(schema), where
        for name, inside in schema.items():
            check(data[name], inside, f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(data, list), where
        for item in data:
            check(item, schema[0], f"{where}[]")
    else:
        assert isinstance(data, schema), where


def loads(*some: Aggregate) -> list[dict[str, Any]]:
    document = json.loads(json_.text(json_.document(some)))
    assert list(document) == ["schema", "loads"]
    assert document["schema"] == "ckpt_sentry.report/1"
    return list(document["loads"])


def test_no_loads() -> None:
    assert json_.document([]) == {"schema": "ckpt_sentry.report/1", "loads": []}


def test_every_field_of_a_failed_load() -> None:
    error = LoadError("ValueError", "Size mismatch", "plan")
    head = ShapeMismatch("model.head.weight", 1, "model.head", (32, 8), (16, 8))
    found = Finding("shape_mismatch", "error", "1 key has another shape", "compare")
    own = finished(
        1,
        2,
        verdict="failed",
        error=error,
        mismatched=(head,),
        missing=KeyList(800, ("model.adapter{0-799}",)),
        unexpected=KeyList(5, ("old{0-2}",), 2),
        coverage=Coverage(0.5, 0.25),
        utilisation=0.75,
        rename=Rename("strip module.", 1.0),
        findings=(found,),
        phases=(Phase("plan", 0.5),),
        bytes_read=7,
    )
    (load,) = loads(seen(started(0, 2), failing(1, error, 2), own, killed(0, "SIGKILL", 2)))
    groups = load.pop("groups")
    assert load == {
        "load_id": LOAD,
        "run_id": RUN,
        "ordinal": 0,
        "framework": "dcp",
        "entry_point": "dcp.load",
        "path": "/data/run7/step-1200",
        "format": "DCP",
        "step": 1200,
        "step_source": "folder name",
        "world_size": 2,
        "ranks_reported": "1",
        "started_at": 100.0,
        "ended_at": 102.0,
        "verdict": "failed",
        "error": {
            "type": "ValueError",
            "message": "Size mismatch",
            "phase": "plan",
            "first_rank": 1,
            "order_by": "arrival",
        },
        "coverage": {"keys": 0.5, "elements": 0.25, "judged": 0.25},
        "utilisation": 0.75,
        "missing": {"count": 800, "keys": ["model.adapter{0-799}"]},
        "unexpected": {"count": 5, "keys": ["old{0-2}"], "omitted": 2},
        "mismatched": {
            "count": 1,
            "items": [
                {
                    "keys": "model.head.weight",
                    "module": "model.head",
                    "model_shape": [32, 8],
                    "checkpoint_shape": [16, 8],
                }
            ],
        },
        "rename": {"rule": "strip module.", "coverage": 1.0},
        "findings": [
            {
                "code": "shape_mismatch",
                "level": "error",
                "ranks": "1",
                "text": "1 key has another shape",
                "next": "compare",
            },
            {
                "code": "rank_killed",
                "level": "error",
                "ranks": "0",
                "text": "rank 0 was killed by SIGKILL while setting up",
                "next": load["findings"][1]["next"],
            },
        ],
        "unfinished": [{"ranks": "0", "phase": "setup", "why": "killed by SIGKILL"}],
        "seconds": {
            "min": 2.0,
            "median": 2.0,
            "max": 2.0,
            "slowest_rank": 1,
            "phases": {"plan": {"min": 0.5, "median": 0.5, "max": 0.5, "slowest_rank": 1}},
        },
        "bytes_read": 7,
    }
    assert [(group["ranks"], group["count"]) for group in groups] == [("1", 1)]
    assert codec.restore(LoadReport, groups[0]["report"]) == own.report


@given(aggregates())
def test_every_load_follows_the_schema_in_ascii(one: Aggregate) -> None:
    text = json_.text(json_.document([one]))
    assert text.isascii()
    assert all(char.isprintable() or char == "\n" for char in text)
    (load,) = loads(one)
    check(load, LOAD_SCHEMA)
    for row in (*load["findings"], *load["groups"], *load["unfinished"]):
        assert ranks.compact(ranks.parse(row["ranks"])) == row["ranks"]


def test_numbers_that_json_lacks_become_null() -> None:
    (load,) = loads(seen(finished(0, coverage=Coverage(float("nan"), float("inf")))))
    assert load["coverage"] == {"keys": None, "elements": None, "judged": None}


def test_a_huge_report_is_cut_to_256_kib_and_says_what_is_gone() -> None:
    keys = KeyList(60_000, tuple(f"model.layer{n}.{'x' * 250}" for n in range(60_000)))
    (load,) = loads(seen(told(0), finished(1, verdict="partial", missing=keys)))
    assert len(json.dumps(load)) <= json_.LIMIT_BYTES
    assert load["missing"]["count"] == 60_000
    assert len(load["missing"]["keys"]) + load["missing"]["omitted"] == 60_000
    (group,) = (group for group in load["groups"] if group["ranks"] == "1")
    assert len(group["report"]["missing"].get("keys", [])) + group["report"]["missing"]["omitted"] == 60_000


def test_many_groups_and_long_texts_are_cut_too() -> None:
    errors = [LoadError("OSError", f"{'x' * 1900} shard{rank}z") for rank in range(400)]
    texts = [Finding("rank_raised", "error", f"{'y' * 1900} shard{rank}z") for rank in range(400)]
    events = [finished(rank, 400, verdict="failed", error=errors[rank], findings=(texts[rank],)) for rank in range(400)]
    (load,) = loads(seen(*events))
    assert len(json.dumps(load)) <= json_.LIMIT_BYTES
    assert "left_out" in {found["code"] for found in load["findings"]}
    check(load, LOAD_SCHEMA)


@settings(max_examples=20)
@given(aggregates())
def test_the_order_of_keys_is_always_the_same(one: Aggregate) -> None:
    (load,) = loads(replace(one, bytes_read=1))
    assert list(load) == list(LOAD_SCHEMA)


def test_who_reports_is_said_in_full_for_rank_0_as_well() -> None:
    one = seen(finished(0, 2), finished(1, 2, step=7))
    groups = json_.document([one])["loads"][0]["groups"]
    names = {"run_id", "rank", "local_rank", "world_size", "local_world_size", "node", "pid", "attempt"}
    assert [group["report"]["identity"].keys() for group in groups] == [names, names]
    assert [group["report"]["identity"]["rank"] for group in groups] == [0, 1]
    assert codec.restore(LoadReport, groups[0]["report"]).identity.rank == 0
