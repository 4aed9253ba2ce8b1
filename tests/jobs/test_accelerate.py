"""
Real loads by accelerate, from the environment variable to the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.jobs import harness

if TYPE_CHECKING:
    from pathlib import Path

    from tests.jobs.harness import Outcome

PROGRAM = "accelerate_loads.py"


def run(scenario: str, folder: Path, *words: str, **settings: str) -> Outcome:
    return harness.run(PROGRAM, scenario, str(folder), *words, folder=folder, **settings)


def codes(load: dict) -> dict[str, str]:
    return {finding["code"]: finding["level"] for finding in load["findings"]}


def test_a_good_load_is_one_line(tmp_path: Path) -> None:
    outcome = run("good", tmp_path)

    assert outcome.code == 0
    (load,) = outcome.loads()
    assert (load["framework"], load["entry_point"]) == ("accelerate", "load_checkpoint_and_dispatch")
    assert load["verdict"] == "ok"
    assert load["coverage"] == {"keys": 1.0, "elements": 1.0, "judged": 1.0}
    assert load["path"] == str(tmp_path / "checkpoint-40" / "model.safetensors")
    assert (load["format"], load["step"]) == ("safetensors", 40)
    assert load["findings"] == []
    assert load["groups"][0]["report"]["proof"] == {"checked": 10}
    assert list(load["seconds"]["phases"]) == ["setup", "read", "fill", "dispatch", "verify"]
    (line,) = outcome.block()
    assert line.startswith("ckpt_sentry ✓ load_checkpoint_and_dispatch  step 40 · ")


def test_one_call_of_the_inner_loader_is_one_report(tmp_path: Path) -> None:
    outcome = run("in_model", tmp_path)

    assert [(load["entry_point"], load["verdict"]) for load in outcome.loads()] == [("load_checkpoint_in_model", "ok")]


def test_a_wrong_prefix_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    outcome = run("wrong_prefix", tmp_path)

    assert outcome.code == 1
    assert "UNCHANGED" in outcome.out
    assert not (tmp_path / "off").exists()
    (load,) = outcome.loads()
    assert load["verdict"] == "no_op"
    assert load["error"]["type"] == "ckpt_sentry.errors.LowCoverageError"
    assert load["rename"] == {"rule": 'strip the prefix "model."', "coverage": 1.0}
    last = outcome.err[outcome.err.rindex("LowCoverageError: ") :]
    for words in (
        "the model is untouched: 0 % of keys and 0 % of elements would load",
        'strip the prefix "model." (model.embed.weight → embed.weight): 100 % would load',
        "Set CKPT_SENTRY_ALIGN=auto.",
        "layers.{0-1}.{0-1}.{bias,weight}",
    ):
        assert words in last


def test_observe_says_the_same_and_never_raises(tmp_path: Path) -> None:
    outcome = run("wrong_prefix_in_model", tmp_path, CKPT_SENTRY="observe")

    assert outcome.code == 0
    (load,) = outcome.loads()
    assert load["verdict"] == "no_op"
    assert load["rename"]["coverage"] == 1.0
    assert load["error"] is None


def test_align_applies_the_rule_and_says_so(tmp_path: Path) -> None:
    outcome = run("aligned", tmp_path, CKPT_SENTRY_ALIGN="auto")

    assert outcome.code == 0, outcome.err
    loads = outcome.loads()
    assert [load["verdict"] for load in loads] == ["ok"] * 3
    for load in loads:
        assert codes(load)["renamed_keys"] == "info"
        assert load["coverage"]["judged"] == 1.0


def test_a_new_head_is_refused_with_the_setting_that_allows_it(tmp_path: Path) -> None:
    outcome = run("new_head", tmp_path)

    assert outcome.code == 1
    assert "UNCHANGED" in outcome.out
    assert "CKPT_SENTRY_ALLOW_MISSING='head.*'" in outcome.err


def test_with_that_setting_it_loads(tmp_path: Path) -> None:
    outcome = run("new_head", tmp_path, CKPT_SENTRY_ALLOW_MISSING="head.*")

    assert outcome.code == 0, outcome.err
    (load,) = outcome.loads()
    assert load["verdict"] == "ok"
    assert codes(load) == {"missing_keys": "info"}
    assert len(outcome.block()) == 1


def test_strict_refuses_what_the_minimum_would_let_pass(tmp_path: Path) -> None:
    settings = {"CKPT_SENTRY_MIN_COVERAGE": "0.5"}

    assert run("new_head", tmp_path / "on", **settings).code == 0
    strict = run("new_head", tmp_path / "strict", CKPT_SENTRY="strict", **settings)
    assert strict.code == 1
    assert strict.loads()[0]["verdict"] == "partial"
    assert "the minimum is 100 %" in strict.err


def test_a_lost_tie_is_found_by_its_values(tmp_path: Path) -> None:
    outcome = run("tied_lost", tmp_path)

    assert outcome.code == 1
    (load,) = outcome.loads()
    assert load["verdict"] == "wrong_values"
    assert load["coverage"]["judged"] == 1.0
    (finding,) = [one for one in load["findings"] if one["level"] == "error"]
    assert finding["code"] == "tied_weights_lost"
    assert "head.weight and embed.weight are tied" in finding["text"]
    assert "100 % of keys" in outcome.err


def test_without_verification_nobody_sees_it(tmp_path: Path) -> None:
    outcome = run("tied_lost", tmp_path, CKPT_SENTRY_VERIFY="off")

    assert outcome.code == 0
    assert outcome.loads()[0]["verdict"] == "ok"


@pytest.mark.parametrize("depth", ["sample", "full"])
def test_a_stale_folder_is_found_when_a_model_is_dispatched(tmp_path: Path, depth: str) -> None:
    outcome = run("stale_dispatch", tmp_path, CKPT_SENTRY_VERIFY=depth)

    assert outcome.code == 1
    load = outcome.loads()[-1]
    assert (load["entry_point"], load["verdict"]) == ("dispatch_model", "wrong_values")
    assert codes(load) == {"stale_offload_folder": "error"}
    assert "8 tensors now come from" in outcome.err


def test_a_stale_folder_fills_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    outcome = run("stale_missing", tmp_path, CKPT_SENTRY_ALLOW_MISSING="layers.*")

    assert outcome.code == 1
    load = outcome.loads()[-1]
    assert load["verdict"] == "wrong_values"
    assert "stale_offload_folder" in codes(load)


@pytest.mark.parametrize("depth", ["sample", "full"])
def test_a_folder_that_is_written_anew_is_no_stale_one(tmp_path: Path, depth: str) -> None:
    outcome = run("reused_folder", tmp_path, CKPT_SENTRY_VERIFY=depth)

    assert outcome.code == 0
    assert [load["verdict"] for load in outcome.loads()] == ["ok", "ok"]


def test_an_uncovered_module_raises_before_anything_is_written(tmp_path: Path) -> None:
    outcome = run("uncovered", tmp_path)

    assert "UNCHANGED" in outcome.out
    (load,) = outcome.loads()
    assert load["error"]["type"] == "ValueError"
    assert codes(load) == {"device_map_uncovered": "error"}
    assert "5 keys of the model" in load["findings"][0]["text"]


def test_to_observe_is_to_let_the_load_run(tmp_path: Path) -> None:
    outcome = run("uncovered", tmp_path, CKPT_SENTRY="observe")

    assert outcome.out.split() == ["CHANGED"]
    assert codes(outcome.loads()[0]) == {"device_map_uncovered": "error"}


def test_a_missing_shard_raises_when_the_shards_before_it_are_in(tmp_path: Path) -> None:
    outcome = run("missing_shard", tmp_path)

    assert outcome.out.split() == ["CHANGED"]
    (load,) = outcome.loads()
    assert load["error"]["type"] == "FileNotFoundError"
    assert codes(load) == {"shard_missing": "error", "partly_overwritten": "warning"}
    assert "1 file had been loaded before it failed: a.safetensors." in load["findings"][-1]["text"]


def test_a_model_without_values_needs_a_map(tmp_path: Path) -> None:
    outcome = run("meta_without_map", tmp_path)

    assert outcome.code == 1
    assert codes(outcome.loads()[0])["meta_left"] == "error"


def test_a_hostile_pickle_is_not_run(tmp_path: Path) -> None:
    outcome = run("hostile", tmp_path)

    assert "CLEAN" in outcome.out
    (load,) = outcome.loads()
    assert load["error"]["type"] == "ckpt_sentry.errors.LowCoverageError"
    assert "unsafe_globals" in codes(load)


def test_load_hooks_that_rename_are_judged_by_what_came_in(tmp_path: Path) -> None:
    working, idle = run("renaming_hook", tmp_path / "a", "working"), run("renaming_hook", tmp_path / "b", "idle")

    assert working.code == 0, working.err
    assert [load["verdict"] for load in working.loads()] == ["ok"]
    assert set(codes(working.loads()[0]).values()) <= {"info"}
    assert idle.code == 1
    assert idle.loads()[0]["verdict"] == "no_op"


def test_a_whole_state_dict_under_fsdp(tmp_path: Path) -> None:
    whole, part = run("fsdp_model", tmp_path / "a", "whole"), run("fsdp_model", tmp_path / "b", "headless")

    assert whole.code == 0, whole.err
    assert [(load["entry_point"], load["verdict"]) for load in whole.loads()] == [("load_fsdp_model", "ok")]
    assert part.code == 1
    assert "UNCHANGED" in part.out
    assert "LowCoverageError: load_fsdp_model refused" in part.err


def test_loads_in_threads_are_reported_each(tmp_path: Path) -> None:
    outcome = run("in_threads", tmp_path)

    assert [load["verdict"] for load in outcome.loads()] == ["ok", "ok"]


def test_names_that_were_bound_before_the_agent_came(tmp_path: Path) -> None:
    outcome = run("late_install", tmp_path, CKPT_SENTRY="")

    assert outcome.out.split() == ["LowCoverageError", "LowCoverageError", "PASSED"], outcome.err


@pytest.mark.slow
def test_no_broken_function_reaches_a_load_by_accelerate(tmp_path: Path) -> None:
    result = harness.chaos("accelerate_chaos.py", tmp_path, CKPT_SENTRY="1")

    assert result["different"] == []
    assert result["points"] > result["reached"] >= 100


@pytest.mark.slow
def test_legitimate_loads_of_transformers_models_raise_no_alarm(tmp_path: Path) -> None:
    outcome = harness.run("accelerate_legitimate.py", str(tmp_path), folder=tmp_path)

    assert outcome.code == 0, outcome.err
    loads = outcome.loads()
    assert len(loads) == int(outcome.out.split()[-1]) >= 40
    alarms = {load["path"]: load["findings"] for load in loads if set(codes(load).values()) - {"info"}}
    assert alarms == {}
    assert {load["verdict"] for load in loads} == {"ok"}
