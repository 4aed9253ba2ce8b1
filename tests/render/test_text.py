from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.collector.aggregate import Aggregate, Aggregator
from ckpt_sentry.core import codes
from ckpt_sentry.core.report import (
    CheckpointSummary,
    Coverage,
    DtypeCast,
    Finding,
    Identity,
    KeyList,
    LoadError,
    LoadReport,
    ModelSummary,
    Rename,
    ShapeMismatch,
)
from ckpt_sentry.render import cells, text
from ckpt_sentry.render.page import ASCII
from ckpt_sentry.transport import otlp_json
from ckpt_sentry.transport.events import LoadFinished
from tests.collector.jobs import (
    LOAD,
    entered,
    exited,
    failing,
    finished,
    killed,
    over,
    raised,
    seen,
    stalled,
    started,
    stopped,
    told,
)

SIZE = LoadError(
    "ValueError",
    "Size mismatch between saved torch.Size([16, 8]) and current: torch.Size([32, 8]) for model.head.weight",
    "plan",
)
SHAPES = Finding("shape_mismatch", "error", "2 keys have another shape in the checkpoint")
MISSING = Finding("missing_keys", "error", "2 keys are missing from the checkpoint")
UNEXPECTED = Finding("unexpected_keys", "info", "5 keys of the checkpoint are not in the model")
DTYPES = Finding("dtype_cast", "info", "2 keys are cast from float32 to bfloat16")
HEAD = (
    ShapeMismatch("model.head.weight", 1, "model.head", (32, 8), (16, 8)),
    ShapeMismatch("model.head.bias", 1, "model.head", (32,), (16,)),
)
SAVED = CheckpointSummary(146, 300_000_000, 1_200_000_000, 4, saved_by=4)
FACTS: dict[str, Any] = {
    "missing": KeyList(2, ("model.adapter{0-1}",)),
    "coverage": Coverage(0.986, 0.9999),
    "model": ModelSummary(148, 300_000_064, 1_200_000_256),
    "checkpoint": SAVED,
}


def block(one: Aggregate, width: int = 100) -> str:
    return text.plain(text.block(one, width))


def shape_mismatch_on_rank_2() -> Aggregate:
    peer = Finding("peer_failed", "error", "rank 2 failed; this rank had no error of its own")
    others = [
        finished(rank, verdict="failed", error=LoadError("CheckpointException", "…"), findings=(MISSING, peer), **FACTS)
        for rank in (0, 1, 3)
    ]
    own = finished(2, verdict="failed", error=SIZE, findings=(SHAPES, MISSING), mismatched=HEAD, **FACTS)
    return seen(*map(started, range(4)), failing(2, SIZE), *others, own)


def test_line_of_a_good_load() -> None:
    facts = {"model": ModelSummary(148, 1, 4), "coverage": Coverage(1.0, 1.0), "bytes_read": 300_000_000}
    one = seen(*(finished(rank, **facts) for rank in range(4)))
    assert text.plain([text.line(one)]) == (
        "ckpt_sentry ✓ dcp.load  step 1200 · 4 ranks · 148 keys, 100 % · 1.2 GB in 4.0 s (slowest: rank 3)\n"
    )


def test_line_of_a_good_load_of_one_process_with_a_note() -> None:
    found = Finding("unexpected_keys", "info", "5 keys of the checkpoint are not in the model")
    one = seen(finished(0, 1, findings=(found,), step=None))
    assert text.plain([text.line(one)]) == (
        "ckpt_sentry ✓ dcp.load  /data/run7/step-1200 · in 1.0 s · 5 keys of the checkpoint are not in the model\n"
    )


def test_block_of_a_mismatch_on_one_rank() -> None:
    assert (
        block(shape_mismatch_on_rank_2())
        == """\
ckpt_sentry ✗ dcp.load failed on 4 of 4 ranks after 4.0 s · rank 2 first, while planning
  checkpoint  /data/run7/step-1200 · DCP · step 1200 (folder name) · saved by 4 ranks · 146 keys ·
              1.2 GB
  cause       2 keys have another shape in the checkpoint (rank 2 alone)
              model.head.weight    model [32, 8]    checkpoint [16, 8]
              model.head.bias      model [32]       checkpoint [16]
  raised      ValueError: Size mismatch between saved torch.Size([16, 8]) and current:
              torch.Size([32, 8]) for model.head.weight
  also        2 keys are missing from the checkpoint (all 4 ranks)
              model.adapter{0-1}
  others      ranks 0-1,3: rank 2 failed; this rank had no error of its own
  coverage    98.6 % of keys, 99.9 % of elements would have loaded
  next        Rank 2 builds another model than ranks 0-1,3: compare its configuration.
              ckpt-sentry report run7-a1b2    every key
"""
    )


def test_the_same_in_ascii() -> None:
    shown = text.plain(text.block(shape_mismatch_on_rank_2(), glyphs=ASCII))
    assert shown.isascii()
    assert shown.startswith(
        "ckpt_sentry x dcp.load failed on 4 of 4 ranks after 4.0 s - rank 2 first, while planning\n"
    )


def test_block_of_a_killed_rank() -> None:
    one = seen(*map(started, range(4)), told(0), told(2), killed(1, "SIGKILL"), stopped(3), over(ok=False))
    assert (
        block(one)
        == """\
ckpt_sentry ✗ dcp.load failed on 4 of 4 ranks after 3.0 s · rank 1 first, while setting up
  checkpoint  /data/run7/step-1200 · DCP · step 1200 (folder name)
  cause       rank 1 was killed by SIGKILL while setting up
  others      ranks 0,2-3: ended because another rank failed
  next        SIGKILL without an operator is mostly the out-of-memory killer: see `dmesg -T` on its
              node.
              ckpt-sentry report run7-a1b2    every key
"""
    )


def test_block_of_a_stall_shows_a_stack_for_each_group() -> None:
    inside = 'File "/v/site-packages/torch/distributed/c10d.py", line 3, in gather'
    waits = f'File "train.py", line 9, in resume\n  dcp.load(state)\n{inside}'
    sleeps = 'File "train.py", line 4, in early_exit_sleep\n  time.sleep(100)'
    begin = [started(rank) for rank in (0, 2, 3)]
    one = seen(*begin, *(stalled(rank, "plan", waits) for rank in (0, 2, 3)), stalled(1, None, sleeps))
    assert (
        block(one)
        == """\
ckpt_sentry ✗ dcp.load hangs after 5.0 s · 3 of 4 ranks wait, rank 1 has not come
  checkpoint  /data/run7/step-1200 · step unknown
  cause       rank 1 has not come to this load; its stack:
              train.py:4 in early_exit_sleep: time.sleep(100)
  also        ranks 0,2-3 wait while setting up for 5 s; the stack of each:
              train.py:9 in resume: dcp.load(state)
              torch/distributed/c10d.py:3 in gather
  next        Find out what it does instead of loading: every rank must make this call.
              ckpt-sentry report run7-a1b2    every key
"""
    )


LOW = Finding("low_coverage", "error", "Coverage is 0 % of keys, under the minimum of 99 %.", "Lower the minimum.")
NO_OVERLAP = Finding("no_overlap", "error", "No key of the checkpoint is a key of this model: 0 of 18 keys would load.")


def refused_for_its_prefix(phase: str | None) -> Aggregate:
    rename = Rename('strip "model." from every checkpoint key', 1.0, 18, ("model.embed.weight", "embed.weight"))
    found = Finding("renamed_keys", "warning", 'every checkpoint key starts with "model."', "CKPT_SENTRY_ALIGN=auto")
    return seen(
        finished(
            0,
            1,
            framework="accelerate",
            entry_point="load_checkpoint_and_dispatch",
            verdict="no_op",
            error=LoadError("ckpt_sentry.errors.LowCoverageError", "0 of 18 keys", phase),
            rename=rename,
            missing=KeyList(18, ("w{0-17}",)),
            unexpected=KeyList(18, ("model.w{0-17}",)),
            findings=(found, NO_OVERLAP, MISSING, Finding("unexpected_keys", "info", "18 keys unexpected"), LOW),
            coverage=Coverage(0.0, 0.0),
            model=ModelSummary(18, 18, 72),
            path="/models/tiny/model.safetensors",
            format="safetensors",
            step=None,
            step_source=None,
        )
    )


def test_block_of_a_load_refused_for_its_prefix_says_it_once() -> None:
    assert (
        block(refused_for_its_prefix("setup"))
        == """\
ckpt_sentry ✗ load_checkpoint_and_dispatch refused: 0 of 18 keys would load · after 1.0 s
  checkpoint  /models/tiny/model.safetensors · safetensors · step unknown
  cause       every checkpoint key starts with "model."
              model.embed.weight → embed.weight    18 keys: 100 % would load
  coverage    0 % of keys, 0 % of elements would load; the model is untouched
  next        CKPT_SENTRY_ALIGN=auto
              ckpt-sentry report run7-a1b2    every key
"""
    )


def test_what_the_block_left_out_of_a_rename_is_in_the_full_report() -> None:
    shown = text.plain(text.full(refused_for_its_prefix("setup"), rows=None))
    for said in ("w{0-17}", "model.w{0-17}", NO_OVERLAP.text, LOW.text):
        assert said in shown


def test_a_partial_load_that_was_refused_is_marked_as_one() -> None:
    refusal = LoadError("ckpt_sentry.errors.LowCoverageError", "dcp.load refused, a partial load", "finish")
    facts = FACTS | {"findings": (MISSING,)}
    head = block(seen(finished(0, 1, verdict="partial", error=refusal, **facts))).splitlines()[0]
    assert head.startswith("ckpt_sentry ✗ dcp.load refused: ")
    head = block(seen(finished(0, 1, verdict="partial", **facts))).splitlines()[0]
    assert head.startswith("ckpt_sentry ! dcp.load loaded a part of the model only")


def test_the_checkpoint_line_is_of_one_path() -> None:
    missing = Finding("path_missing", "error", "/data/other does not exist")
    own = finished(1, 2, verdict="failed", error=LoadError("OSError", "gone", "plan"), findings=(missing,))
    own = replace(own, report=replace(own.report, path="/data/other", format=None, step=None, step_source=None))
    lines = block(seen(own, told(0, 2), finished(0, 2, **FACTS))).splitlines()
    assert "  checkpoint  /data/other · step unknown" in lines


def test_a_load_that_was_refused_when_it_was_over_has_been_loaded() -> None:
    lines = block(refused_for_its_prefix(None)).splitlines()
    assert lines[0] == ("ckpt_sentry ✗ load_checkpoint_and_dispatch refused: 0 of 18 keys were loaded · after 1.0 s")
    assert "  coverage    0 % of keys, 0 % of elements loaded" in lines


def test_full_shows_every_key_group_and_finding() -> None:
    keys = KeyList(40, tuple(f"odd{number}name" for number in range(40)))
    cast = DtypeCast("w{0-9}", 10, "bfloat16", "float32")
    casts = Finding("dtype_cast", "info", "10 keys change their type")
    one = seen(finished(0, 1, verdict="partial", missing=keys, casts=(cast,), findings=(MISSING, casts)))
    shown = text.plain(text.full(one))
    assert [line.strip() for line in shown.splitlines() if "odd" in line] == list(keys.keys)
    assert "w{0-9}    float32 → bfloat16" in shown
    assert shown.count("2 keys are missing from the checkpoint") == 1
    assert len(text.block(one)) <= 30
    assert "… 34 more keys" in block(one)
    assert "… 35 more keys" in text.plain(text.full(one, rows=5))


def test_columns_stand_under_each_other_with_wide_characters() -> None:
    items = (replace(HEAD[0], keys="模型.头"), replace(HEAD[1], keys="model.b"))
    one = seen(finished(0, 1, verdict="failed", mismatched=items, findings=(SHAPES,), error=SIZE))
    rows = [line for line in block(one).splitlines() if "model [" in line]
    places = {cells.width(row[: row.index("model [")]) for row in rows}
    assert len(rows) == 2
    assert len(places) == 1


def test_a_key_too_wide_for_its_column_is_shown_whole_with_the_shapes_below() -> None:
    name = "layer." * 30 + "weight"
    one = seen(
        finished(0, 1, verdict="failed", mismatched=(replace(HEAD[0], keys=name),), findings=(SHAPES,), error=SIZE)
    )
    assert name in "".join(line[14:] for line in block(one, 60).splitlines())


NASTY = st.text(st.characters(), max_size=60) | st.sampled_from(
    ["\x1b[31mred\x1b[0m", "a\nb", "\u202egnp.exe", "[bold]x[/bold]", "k" * 5000, "模" * 200, "\ud800", "\r\x07\x08"]
)
LEVELS = st.sampled_from(["error", "warning", "info"])
CODES = st.sampled_from(["missing_keys", "unexpected_keys", "shape_mismatch", "dtype_cast", "renamed_keys", "x"])
FINDINGS = st.builds(Finding, CODES, LEVELS, NASTY, st.none() | NASTY)
KEYS = st.builds(KeyList, st.integers(0, 10**9), st.lists(NASTY, max_size=12).map(tuple), st.integers(0, 99))
SHAPE = st.lists(st.integers(0, 10**12), max_size=12).map(tuple)
MISMATCHES = st.lists(st.builds(ShapeMismatch, NASTY, st.integers(1, 99), NASTY, SHAPE, SHAPE), max_size=9).map(tuple)
VERDICTS = st.sampled_from(["ok", "partial", "no_op", "wrong_values", "failed", "diverged", "stalled"])
ERRORS = st.none() | st.builds(LoadError, NASTY, NASTY, st.none() | NASTY)


@st.composite
def aggregates(draw: st.DrawFn) -> Aggregate:
    world = draw(st.integers(1, 6))
    events: list[Any] = []
    for rank in range(world):
        kind = draw(st.sampled_from(["report", "silent", "killed", "exited", "stalled"]))
        events.append(started(rank, world))
        if kind == "report":
            events.append(
                finished(
                    rank,
                    world,
                    verdict=draw(VERDICTS),
                    error=draw(ERRORS),
                    findings=draw(st.lists(FINDINGS, max_size=8).map(tuple)),
                    missing=draw(KEYS),
                    unexpected=draw(KEYS),
                    mismatched=draw(MISMATCHES),
                    path=draw(st.none() | NASTY),
                    format=draw(st.none() | NASTY),
                    step_source=draw(NASTY),
                    coverage=draw(st.none() | st.builds(Coverage, st.floats(0, 1), st.floats(0, 1))),
                    key_digest=draw(st.none() | NASTY),
                )
            )
        elif kind == "killed":
            events.append(replace(killed(rank, draw(NASTY))))
        elif kind == "exited":
            events.append(exited(rank, draw(st.integers(0, 255))))
        elif kind == "stalled":
            events.append(stalled(rank, draw(st.none() | NASTY), draw(NASTY)))
    return seen(*events, settled=draw(st.booleans()))


@given(aggregates(), st.integers(20, 200))
def test_a_block_has_at_most_30_lines_of_its_width_and_no_control_character(one: Aggregate, width: int) -> None:
    lines = text.block(one, width)
    assert len(lines) <= 30
    for line in text.plain(lines).split("\n"):
        assert cells.width(line) <= max(40, width)
        assert line.isprintable()


@given(aggregates())
def test_full_and_line_have_no_control_character(one: Aggregate) -> None:
    for line in text.plain([*text.full(one), text.line(one)]).split("\n"):
        assert line.isprintable()


@given(aggregates())
def test_ascii_glyphs_bring_nothing_else(one: Aggregate) -> None:
    own = {"…", "·", "→", "✓", "✗"}
    shown = text.plain(text.block(one, glyphs=ASCII))
    assert not own & set(shown) or own & set(repr(one))


def test_the_last_line_explains_a_cause_without_a_next_step() -> None:
    terminated, killed_ = (
        seen(started(1, 2), finished(0, 2), killed(1, signal, 2), over(ok=False)) for signal in ("SIGTERM", "SIGKILL")
    )
    assert [one.findings[0].next is None for one in (terminated, killed_)] == [True, False]
    assert "ckpt-sentry explain" not in block(killed_)
    assert block(terminated).splitlines()[-1] == "              ckpt-sentry explain rank_killed    what it means"
    short = text.plain(text.block(terminated, 60, limit=4)).splitlines()
    assert len(short) <= 4
    assert short[-1].split()[:3] == ["ckpt-sentry", "explain", "rank_killed"]


def test_a_cause_whose_sentence_is_all_there_is_to_say_is_not_explained() -> None:
    found = Finding("rank_raised", "error", "ValueError: no", facts=(("type", "ValueError"), ("message", "no")))
    one = seen(finished(0, 1, verdict="failed", error=LoadError("ValueError", "no", "plan"), findings=(found,)))
    assert "ckpt-sentry explain" not in block(one)


def test_keys_listed_in_a_sentence_are_not_said_twice() -> None:
    keys = KeyList(3, ("a{0-2}",))
    for may_be, shown in (
        (0, "3 keys missing from the checkpoint"),
        (2, "3 keys missing from the checkpoint, 2 of which may be"),
        (3, "3 keys missing from the checkpoint, as they may be"),
    ):
        found = codes.finding("missing_keys", "warning", count=3, listed="a{0-2}", allowed=may_be)
        one = seen(finished(0, 1, verdict="partial", missing=keys, findings=(found,)))
        lines = block(one).splitlines()
        assert lines[2:4] == [f"  cause       {shown}", "              a{0-2}"]


def test_a_rename_is_the_cause_of_missing_keys_whatever_their_levels() -> None:
    rename = Rename("strip module.", 1.0, 2, ("module.a", "a"))
    found = Finding("renamed_keys", "warning", "2 keys have other names: strip module. (module.a → a)")
    one = seen(finished(0, 1, verdict="failed", error=SIZE, rename=rename, findings=(MISSING, found)))
    assert [finding.code for finding in one.findings] == ["renamed_keys", "missing_keys"]
    assert block(one).splitlines()[2] == "  cause       2 keys have other names: strip module. (module.a → a)"


def test_nobody_is_called_first_where_all_waited_for_one() -> None:
    begin = [started(rank) for rank in (0, 2, 3)]
    one = seen(*begin, told(0), told(2), told(3), exited(0, 1), stopped(1), over(ok=False))
    assert block(one).splitlines()[:3] == [
        "ckpt_sentry ✗ dcp.load failed after 4.0 s · rank 1 never came to it",
        "  checkpoint  /data/run7/step-1200 · DCP · step 1200 (folder name)",
        "  cause       rank 1 never came to this load",
    ]


def test_ranks_that_the_launcher_stopped_are_named_once() -> None:
    error = LoadError("OSError", "[Errno 5] Input/output error", "read")
    own = finished(1, verdict="failed", error=error)
    ends = [exited(1, 1), *(stopped(rank) for rank in (0, 2, 3))]
    one = seen(*map(started, range(4)), failing(1, error), own, *ends, over(ok=False))
    assert block(one).splitlines()[2:4] == [
        "  cause       OSError: [Errno 5] Input/output error (rank 1 alone)",
        "  others      ranks 0,2-3 were stopped by the launcher while setting up",
    ]


def heard_alone(*events: Any, rank: int = 0) -> Aggregate:
    """
    The aggregate of a rank that hears nobody but itself.
    """
    aggregator = Aggregator()
    for event in events:
        aggregator.add(event)
    one = aggregator.aggregate(LOAD, expected=(rank,))
    assert one is not None
    return one


def test_nothing_is_said_of_ranks_that_were_not_heard() -> None:
    error = LoadError("RuntimeError", "Missing key in checkpoint state_dict: w.", "plan")
    own = finished(1, 2, verdict="failed", error=error, findings=(MISSING,), missing=KeyList(2, ("w{0-1}",)))
    one = heard_alone(started(1, 2), failing(1, error, 2), own, rank=1)
    hint = "ckpt-sentry run -- COMMAND    one report for all ranks"
    assert (
        text.plain(text.block(one, hints=(text.every_key(one), hint)))
        == """\
ckpt_sentry ✗ dcp.load failed on rank 1 after 2.0 s · while planning
  checkpoint  /data/run7/step-1200 · DCP · step 1200 (folder name)
  cause       2 keys are missing from the checkpoint
              w{0-1}
  raised      RuntimeError: Missing key in checkpoint state_dict: w.
  next        ckpt-sentry report run7-a1b2    every key
              ckpt-sentry run -- COMMAND    one report for all ranks
              ckpt-sentry explain missing_keys    what it means
"""
    )


def test_line_of_a_rank_that_hears_nobody_else() -> None:
    assert text.plain([text.line(heard_alone(finished(0, 2)))]) == (
        "ckpt_sentry ✓ dcp.load  step 1200 · rank 0 · in 1.0 s\n"
    )


def allowed(keys: int, missing: int) -> Aggregate:
    found = codes.finding("missing_keys", "info", count=missing, listed="gate", allowed=missing)
    return seen(
        finished(
            0,
            1,
            findings=(found,),
            missing=KeyList(missing, ("gate",)),
            model=ModelSummary(keys, 1, 4),
            coverage=Coverage(1.0, 1.0),
        )
    )


def test_line_of_a_load_that_lacks_what_it_may() -> None:
    assert text.plain([text.line(allowed(120, 24))]) == (
        "ckpt_sentry ✓ dcp.load  step 1200 · 96 of 120 keys, the other 24 may be missing · in 1.0 s\n"
    )
    assert text.plain([text.line(allowed(19, 19))]) == (
        "ckpt_sentry ✓ dcp.load  step 1200 · 0 of 19 keys, all 19 may be missing · in 1.0 s\n"
    )


def test_a_line_names_the_keys_and_the_class_of_the_model() -> None:
    facts = {"coverage": Coverage(0.5, 0.5), "missing": KeyList(1, ("bias",)), "step": None, "path": None}
    lost = codes.finding("missing_keys", "info", count=1, listed="bias")
    fresh = codes.finding("missing_keys", "info", count=1, listed="bias", is_new="yes")
    assert fresh.text == "New in this model, and to be trained: bias (1 key is not the checkpoint's)."
    for found, shown in (
        (lost, "1 key missing from the checkpoint: bias"),
        (fresh, "New in this model, and to be trained: bias"),
    ):
        model = ModelSummary(2, 6, 24, "Linear")
        one = seen(finished(0, 1, verdict="partial", findings=(found,), model=model, **facts))
        assert text.plain([text.line(one)]) == (
            f"ckpt_sentry ! dcp.load  1 of 2 keys of Linear, 50.0 % · in 1.0 s · {shown}\n"
        )


def test_no_two_keys_look_the_same() -> None:
    items = tuple(
        ShapeMismatch(f"optim.state.blocks.{{0-2}}.{name}.{{exp_avg,exp_avg_sq}}", 6, "", (64,), (32,))
        for name in ("fc1.bias", "fc2.bias")
    )
    one = seen(finished(0, 1, verdict="failed", error=SIZE, findings=(SHAPES,), mismatched=items))
    for lines in (block(one, 60), text.plain(text.full(one, 60, rows=None))):
        assert lines[lines.index("  cause") : lines.index("  raised")].splitlines()[1:] == [
            "              optim.state.blocks.{0-2}.fc1.bias.{exp_avg,",
            "              exp_avg_sq}",
            "                model [64]    checkpoint [32]",
            "              optim.state.blocks.{0-2}.fc2.bias.{exp_avg,",
            "              exp_avg_sq}",
            "                model [64]    checkpoint [32]",
        ]


def test_two_ranks_are_both() -> None:
    one = seen(*(finished(rank, 2, verdict="failed", error=SIZE, findings=(SHAPES,)) for rank in range(2)))
    assert block(one).splitlines()[2] == "  cause       2 keys have another shape in the checkpoint (both ranks)"


def test_a_header_breaks_between_its_facts() -> None:
    error = LoadError("ValueError", "bad data", "plan")
    one = seen(started(0, 2), failing(0, error, 2), finished(0, 2, verdict="failed", error=error), started(1, 2))
    assert block(one, 60).splitlines()[:2] == [
        "ckpt_sentry ✗ dcp.load failed on 1 of 2 ranks after 1.0 s",
        "  rank 0 first, while planning",
    ]


def test_a_rank_that_raised_before_the_load_is_to_be_looked_at() -> None:
    error = LoadError("ValueError", "bad data config", where="train.py:44")
    begin = [started(rank) for rank in (0, 2, 3)]
    one = seen(*begin, told(0), told(2), told(3), raised(1, error), over(ok=False))
    lines = block(one).splitlines()
    assert lines[0] == "ckpt_sentry ✗ dcp.load failed after 4.0 s · rank 1 never came to it"
    assert lines[2] == "  cause       rank 1 never came to this load: raised ValueError: bad data config"
    assert "  next        Look at train.py:44, where it was raised." in lines


def test_a_rank_that_was_killed_before_the_load_is_said_once() -> None:
    one = seen(started(0), told(0), killed(1, "SIGKILL"), over(ok=False))
    assert block(one).splitlines()[2:4] == [
        "  cause       rank 1 was killed by SIGKILL before it came to this load",
        "  others      rank 0: another rank failed; this rank had no error of its own",
    ]


def test_a_stall_is_shown_by_a_report_that_is_read_while_it_lasts() -> None:
    waits = 'File "train.py", line 9, in resume\n  dcp.load(state)'
    one = seen(started(0), stalled(0, "plan", waits), *(started(rank) for rank in (1, 2, 3)), settled=True)
    shown = text.plain(text.full(one))
    assert shown.startswith("ckpt_sentry ✗ dcp.load hangs after 5.0 s · 4 of 4 ranks wait\n")
    assert "              train.py:9 in resume: dcp.load(state)\n" in shown


def test_a_stall_that_is_over_is_mentioned() -> None:
    late = finished(1, started_at=112.0, ended_at=113.0)
    others = (finished(rank, ended_at=113.0) for rank in (0, 2, 3))
    one = seen(started(0), stalled(0, "plan", "x"), stalled(1, None, "y"), *others, late)
    assert text.plain([text.line(one)]) == (
        "ckpt_sentry ✓ dcp.load  step 1200 · 4 ranks · in 13 s (slowest: rank 0) · "
        "Stalled for 13 s: rank 1 came late, rank 0 waited while planning\n"
    )


def test_groups_are_shown_where_there_are_several_and_repeat_nothing() -> None:
    shown = text.plain(text.full(shape_mismatch_on_rank_2()))
    assert "  groups      ranks 0-1,3 · failed · CheckpointException: …\n              rank 2 · failed\n" in shown
    assert shown.count("Size mismatch") == 1
    one = seen(*(finished(rank, 2, verdict="failed", error=SIZE, findings=(SHAPES,)) for rank in range(2)))
    assert "groups" not in text.plain(text.full(one))


def test_each_finding_has_the_keys_of_its_own_ranks() -> None:
    def lacks(rank: int, key: str) -> Any:
        error = LoadError("RuntimeError", f"Missing key in checkpoint state_dict: {key}.", "plan")
        found = Finding("missing_keys", "error", f"1 key missing from the checkpoint: {key}.")
        return finished(rank, verdict="failed", error=error, findings=(found,), missing=KeyList(1, (key,)))

    one = seen(*map(started, range(4)), told(0), told(1), lacks(2, "state.gamma"), lacks(3, "state.delta"))
    for shown in (block(one), text.plain(text.full(one))):
        lines = shown.splitlines()
        for rank, key in ((2, "state.gamma"), (3, "state.delta")):
            (place,) = (at for at, line in enumerate(lines) if f"(rank {rank} alone)" in line)
            assert next(line.strip() for line in lines[place + 1 :] if "Missing key in" not in line) == key


def test_a_shape_and_a_missing_key_are_both_the_cause_where_torch_raised_for_the_key() -> None:
    missing = LoadError("RuntimeError", "Missing key in checkpoint state_dict: model.adapter0.", "plan")
    facts = FACTS | {"findings": (SHAPES, MISSING, UNEXPECTED), "mismatched": HEAD}
    lines = block(seen(finished(0, 1, verdict="failed", error=missing, **facts))).splitlines()
    assert lines[3:] == [
        "  cause       2 keys have another shape in the checkpoint",
        "              model.head.weight    model [32, 8]    checkpoint [16, 8]",
        "              model.head.bias      model [32]       checkpoint [16]",
        "              2 keys are missing from the checkpoint",
        "              model.adapter{0-1}",
        "  raised      RuntimeError: Missing key in checkpoint state_dict: model.adapter0.",
        "  also        5 keys of the checkpoint are not in the model",
        "  coverage    98.6 % of keys, 99.9 % of elements would have loaded",
        "  next        ckpt-sentry report run7-a1b2    every key",
        "              ckpt-sentry explain shape_mismatch    what it means",
    ]


def test_no_line_ends_in_a_colon_that_says_nothing() -> None:
    listing = LoadError("RuntimeError", 'Error(s) in loading state_dict for Net:\n\tMissing key(s): "w".', "plan")
    shown = block(seen(finished(0, 1, verdict="failed", error=listing)))
    assert '  cause       RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): "w".' in shown
    bare = LoadError("ValueError", "no hope:", "plan")
    assert "  cause       ValueError: no hope\n" in block(seen(finished(0, 1, verdict="failed", error=bare)))
    assert "rank 0 waits while setting up for 5 s\n" in block(seen(started(0), stalled(0, "plan", "")))


def test_what_one_rank_alone_has_not_loaded_is_said_of_that_rank() -> None:
    nothing = finished(1, 2, verdict="no_op", coverage=Coverage(0.0, 0.0))
    one = seen(finished(0, 2, verdict="partial", coverage=Coverage(0.5, 0.5)), nothing)
    lines = block(one).splitlines()
    assert lines[0] == "ckpt_sentry ✗ dcp.load loaded nothing into the model on rank 1 after 2.0 s"
    assert "  coverage    0 % of keys, 0 % of elements loaded (rank 1); 50.0 % on rank 0" in lines
    both = seen(*(finished(rank, 2, verdict="no_op", coverage=Coverage(0.0, 0.0)) for rank in range(2)))
    assert block(both).splitlines()[0] == "ckpt_sentry ✗ dcp.load loaded nothing into the model after 2.0 s"


def test_no_check_mark_over_a_load_that_was_not_compared() -> None:
    found = Finding("not_compared", "info", "not compared: Planner makes plans of its own")
    one = seen(finished(0, 1, findings=(UNEXPECTED, found), model=ModelSummary(3, 9, 36)))
    said = "dcp.load  step 1200 · 3 keys · in 1.0 s · not compared: Planner makes plans of its own · 1 more finding\n"
    assert text.plain([text.line(one)]) == f"ckpt_sentry – {said}"
    assert text.plain([text.line(one, glyphs=ASCII)]).startswith("ckpt_sentry - dcp.load  step 1200 - 3 keys")
    assert text.plain(text.full(one)).startswith("ckpt_sentry – dcp.load")


def test_lost_training_state_is_named_in_the_line_of_a_good_load() -> None:
    lost = Finding("optimizer_extra", "warning", "The folder holds optimizer_1.bin, of optimizers not prepared.")
    idle = Finding("not_asked_for", "info", '3 keys under "loader" were not asked for.')
    one = seen(finished(0, 1, findings=(UNEXPECTED, DTYPES, idle, lost)))
    assert text.plain([text.line(one)]) == (
        "ckpt_sentry ✓ dcp.load  step 1200 · in 1.0 s · The folder holds optimizer_1.bin, of optimizers not prepared · "
        '3 keys under "loader" were not asked for · 2 more findings\n'
    )


def test_who_still_reads_is_the_cause_where_the_others_gave_up() -> None:
    lost = LoadError("RuntimeError", "[gloo] Timed out waiting 8000ms for send operation to complete", "barrier")
    peer = Finding("peer_failed", "error", f"another rank went away or did not answer: {lost.message}")
    gave_up = finished(0, 2, verdict="failed", error=lost, findings=(peer,))
    begin = [started(0, 2), started(1, 2), entered(1, "read", 2), entered(0, "barrier", 2)]
    one = seen(*begin, gave_up, raised(0, lost), stopped(1, 2), over(ok=False))
    assert (
        block(one)
        == """\
ckpt_sentry ✗ dcp.load failed on 2 of 2 ranks after 1.0 s · while waiting for the others
  checkpoint  /data/run7/step-1200 · DCP · step 1200 (folder name)
  cause       rank 1 was still reading when rank 0 gave up waiting
  others      rank 0: another rank went away or did not answer: [gloo] Timed out waiting 8000ms for
              send operation to complete
  next        Find out why it took so long, or give the process group more time:
              init_process_group(timeout=…).
              ckpt-sentry report run7-a1b2    every key
"""
    )
    same = [started(0, 2), started(1, 2), entered(0, "barrier", 2), entered(1, "barrier", 2)]
    shown = block(seen(*same, gave_up, raised(0, lost), stopped(1, 2), over(ok=False)))
    assert "gave up" not in shown
    assert "another rank failed" not in shown
    assert "rank 1 was stopped by the launcher while waiting for the others" in shown


def test_what_an_optimizer_explains_is_not_listed_again() -> None:
    cause = Finding("flat_optimizer", "error", "The optimizer state in the checkpoint is flat.", "Pass options=…")
    optim, model = "optim.param_groups.0.{betas,lr}", "model.w"
    keys = {"missing": KeyList(2, (optim,)), "unexpected": KeyList(1, ("optim.param_groups.w.lr",))}
    findings = (cause, MISSING, UNEXPECTED)
    assert "also" not in block(seen(finished(0, 1, verdict="failed", error=SIZE, findings=findings, **keys)))
    keys["missing"] = KeyList(3, (model, optim))
    shown = block(seen(finished(0, 1, verdict="failed", error=SIZE, findings=findings, **keys)))
    assert "  also        2 keys are missing from the checkpoint\n              model.w\n" in shown


def test_that_too_little_came_in_stands_below_what_is_missing() -> None:
    gap = replace(MISSING, level="warning")
    one = seen(finished(0, 1, verdict="failed", error=SIZE, findings=(LOW, gap), missing=KeyList(2, ("w{0-1}",))))
    lines = block(one).splitlines()
    assert lines[2] == "  cause       2 keys are missing from the checkpoint"
    assert "  also        Coverage is 0 % of keys, under the minimum of 99 %." in lines


def test_a_state_dict_one_level_down_says_all() -> None:
    nested = Finding("nested_state_dict", "error", "The state dict is one level down, under 'model'.", "Pass it on.")
    keys = {"missing": KeyList(1, ("w",)), "unexpected": KeyList(1, ("model",)), "coverage": Coverage(0.0, 0.0)}
    findings = (nested, NO_OVERLAP, MISSING, UNEXPECTED, LOW)
    shown = block(seen(finished(0, 1, verdict="failed", error=SIZE, findings=findings, **keys)))
    assert "also" not in shown
    assert "  next        Pass it on.\n" in shown


def test_keys_that_the_sentence_names_are_not_listed_below_it() -> None:
    keys = {"missing": KeyList(1, ("w",)), "unexpected": KeyList(4, ("a", "b", "c", "d"))}
    findings = (NO_OVERLAP, MISSING, UNEXPECTED)
    shown = block(seen(finished(0, 1, verdict="no_op", findings=findings, coverage=Coverage(0.0, 0.0), **keys)))
    assert "are missing" not in shown
    assert "  also        5 keys of the checkpoint are not in the model\n              a\n" in shown


def test_what_a_library_raised_for_is_a_cause_beside_a_rename() -> None:
    error = LoadError("ValueError", "The device_map provided does not give any device for: w", "setup")
    rule = {"rule": "strip", "before": "module.w", "after": "w", "coverage": "100 %"}
    rename = codes.finding("renamed_keys", "warning", count=1, **rule)
    uncovered = Finding("device_map_uncovered", "error", "device_map gives no device for 1 key of the model: w.")
    keys = {"missing": KeyList(1, ("w",)), "rename": Rename("strip", 1.0, 1, ("module.w", "w"))}
    one = seen(finished(0, 1, verdict="failed", error=error, findings=(rename, uncovered, MISSING), **keys))
    assert block(one).splitlines()[2:6] == [
        "  cause       The checkpoint has 1 key of this model under other names: strip (module.w → w), then",
        "              100 % would load.",
        "              device_map gives no device for 1 key of the model: w.",
        "  raised      ValueError: The device_map provided does not give any device for: w",
    ]


def test_a_framework_and_a_phase_that_this_version_does_not_know() -> None:
    identity = Identity("run7-a1b2", 0, 0, 1, 1, "n1", 4711)
    report = LoadReport(
        load_id="0af7651916cd43dd8448eb211c80319c",
        ordinal=0,
        identity=identity,
        framework="boxes",
        entry_point="boxes.restore",
        verdict="failed",
        started_at=1.0,
        ended_at=1.5,
        path="/data/step-7",
        error=LoadError("LookupError", "no such box", "unpack"),
        findings=(Finding("box_lost", "error", "1 box is not there", "Look below the table."),),
    )
    # As it comes from a rank whose agent is newer than the launcher's.
    events, refused = otlp_json.decode(otlp_json.encode((LoadFinished(identity=identity, at=1.5, report=report),)))
    aggregator = Aggregator()
    aggregator.add(events[0], source="n1:4711")
    aggregate = aggregator.aggregate(report.load_id)
    assert aggregate is not None
    assert (refused, aggregate.framework) == (0, "boxes")
    printed = text.plain(text.block(aggregate))
    for words in ("boxes.restore failed", "in phase unpack", "1 box is not there", "Look below the table."):
        assert words in printed
