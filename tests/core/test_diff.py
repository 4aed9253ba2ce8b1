"""The two-way difference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.diff import Diff, Pair, diff
from ckpt_sentry.core.inventory import Entry

ENTRIES = st.builds(
    Entry, st.none() | st.sampled_from([(), (2,), (2, 3)]), st.none() | st.sampled_from(["float32", "bfloat16"])
)
SIDES = st.dictionaries(st.sampled_from("abcdefgh"), ENTRIES)


def test_every_difference():
    f32, bf16, other = Entry((2,), "float32"), Entry((2,), "bfloat16"), Entry(None, None)
    model = {"same": f32, "cast": bf16, "shape": f32, "new": f32, "step": f32}
    checkpoint = {
        "same": Entry((2,), "float32"),
        "cast": f32,
        "shape": Entry((3,), "float32"),
        "old": f32,
        "step": other,
    }
    assert diff(model, checkpoint) == Diff(
        missing=("new",),
        unexpected=("old",),
        mismatched=(Pair("shape", f32, Entry((3,), "float32")),),
        casts=(Pair("cast", bf16, f32),),
        retyped=(Pair("step", f32, other),),
        matched=2,
    )


def test_equal_sides():
    side = {"a": Entry((2,), "float32")}
    assert diff(side, side) == diff(side, dict(side)) == Diff(matched=1)


@given(SIDES, SIDES)
def test_swapping_the_sides_swaps_the_result(model, checkpoint):
    there, back = diff(model, checkpoint), diff(checkpoint, model)
    assert (there.missing, there.unexpected, there.matched) == (back.unexpected, back.missing, back.matched)
    for mine, other in ((there.mismatched, back.mismatched), (there.casts, back.casts), (there.retyped, back.retyped)):
        assert [Pair(pair.key, pair.checkpoint, pair.model) for pair in mine] == list(other)


@given(SIDES, SIDES)
def test_every_key_is_counted_once(model, checkpoint):
    result = diff(model, checkpoint)
    common = result.matched + len(result.mismatched) + len(result.retyped)
    assert common == len(model.keys() & checkpoint.keys())
    assert common + len(result.missing) == len(model)
    assert common + len(result.unexpected) == len(checkpoint)
    assert len(result.casts) <= result.matched
