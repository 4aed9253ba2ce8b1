from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.audit.report import (
    CheckpointSummary,
    Coverage,
    DtypeCast,
    Finding,
    KeyList,
    LoadError,
    ModelSummary,
    Rename,
    ShapeMismatch,
)
from ckpt_sentry.collector.aggregate import Aggregate
from ckpt_sentry.render import cells, text
from ckpt_sentry.render.page import ASCII
from tests.collector.jobs import exited, failing, finished, killed, over, seen, stalled, started, stopped, told

SIZE = LoadError(
    "ValueError",
    "Size mismatch between saved torch.Size([16, 8]) and current: torch.Size([32, 8]) for model.head.weight",
    "plan",
)
SHAPES = Finding("shape_mismatch", "error", "2 keys have another shape in the checkpoint")
MISSING = Finding("missing_keys", "error", "2 keys are missing from the checkpoint")
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
        "ckpt_sentry ✓ dcp.load  in 1.0 s · 5 keys of the checkpoint are not in the model\n"
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
  next        rank 2 builds another model than ranks 0-1,3: compare its configuration
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
              node
              ckpt-sentry report run7-a1b2    every key
"""
    )


def test_block_of_a_stall_shows_a_stack_for_each_group() -> None:
    waits = 'File "train.py", line 9, in resume\n  dcp.load(state)\nFile "c10d.py", line 3, in gather'
    sleeps = 'File "train.py", line 4, in early_exit_sleep\n  time.sleep(100)'
    begin = [started(rank) for rank in (0, 2, 3)]
    one = seen(*begin, *(stalled(rank, "plan", waits) for rank in (0, 2, 3)), stalled(1, None, sleeps))
    assert (
        block(one)
        == """\
ckpt_sentry ✗ dcp.load hangs on 4 of 4 ranks after 5.0 s
  checkpoint  /data/run7/step-1200 · step unknown
  cause       rank 1 has not come to this load; its stack:
              File "train.py", line 4, in early_exit_sleep
                time.sleep(100)
  also        ranks 0,2-3 wait while setting up for 5 s; the stack of each:
              File "train.py", line 9, in resume
                dcp.load(state)
              File "c10d.py", line 3, in gather
  next        find out what that rank does instead of loading: every rank must make this call
              ckpt-sentry report run7-a1b2    every key
"""
    )


def test_block_of_a_refused_load_with_the_wrong_prefix() -> None:
    rename = Rename('strip "model." from every checkpoint key', 1.0, 18, ("model.embed.weight", "embed.weight"))
    found = Finding("renamed_keys", "error", 'every checkpoint key starts with "model."', "CKPT_SENTRY_ALIGN=auto")
    one = seen(
        finished(
            0,
            1,
            framework="accelerate",
            entry_point="load_checkpoint_and_dispatch",
            verdict="failed",
            error=LoadError("ckpt_sentry.errors.LowCoverageError", "0 of 18 keys would load"),
            rename=rename,
            findings=(found,),
            coverage=Coverage(0.0, 0.0),
            model=ModelSummary(18, 18, 72),
            path="/models/tiny/model.safetensors",
            format="safetensors",
            step=None,
            step_source=None,
        )
    )
    assert (
        block(one)
        == """\
ckpt_sentry ✗ load_checkpoint_and_dispatch refused: 0 of 18 keys would load after 1.0 s
  checkpoint  /models/tiny/model.safetensors · safetensors · step unknown
  cause       every checkpoint key starts with "model."
              model.embed.weight → embed.weight    18 keys: 100 % would load
  raised      ckpt_sentry.errors.LowCoverageError: 0 of 18 keys would load
  coverage    0 % of keys, 0 % of elements would have loaded
  next        CKPT_SENTRY_ALIGN=auto
              ckpt-sentry report run7-a1b2    every key
"""
    )


def test_full_shows_every_key_group_and_finding() -> None:
    keys = KeyList(40, tuple(f"odd{number}name" for number in range(40)))
    cast = DtypeCast("w{0-9}", 10, "bfloat16", "float32")
    casts = Finding("dtype_cast", "info", "10 keys change their type")
    one = seen(finished(0, 1, verdict="partial", missing=keys, casts=(cast,), findings=(MISSING, casts)))
    shown = text.plain(text.full(one))
    assert [line.strip() for line in shown.splitlines() if "odd" in line] == list(keys.keys)
    assert "w{0-9}    float32 → bfloat16" in shown
    assert "  findings    error missing_keys: 2 keys are missing from the checkpoint\n" in shown
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


def test_keys_listed_in_a_sentence_are_not_said_twice() -> None:
    keys = KeyList(3, ("a{0-2}",))
    for said, shown in (
        ("3 keys missing from the checkpoint: a{0-2}.", "3 keys missing from the checkpoint"),
        (
            "3 keys missing from the checkpoint: a{0-2}. 2 of them may be.",
            "3 keys missing from the checkpoint; 2 of them may be",
        ),
        (
            "3 keys missing from the checkpoint: a{0-2}. All of them may be.",
            "3 keys missing from the checkpoint; all of them may be",
        ),
    ):
        one = seen(
            finished(0, 1, verdict="partial", missing=keys, findings=(Finding("missing_keys", "warning", said),))
        )
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
        "ckpt_sentry ✗ dcp.load failed on 3 of 4 ranks after 4.0 s · while planning",
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
