"""Exact folding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.fold import Fold, expand, fold, folds, key_list, natural
from ckpt_sentry.core.report import NO_KEYS

COMPONENT = st.one_of(
    st.sampled_from(
        ["layers", "attn", "wq", "wk", "weight", "bias", "007", "", "0", "1", "2", "10", "h1", "a0b1", "a2b3"]
    ),
    st.integers(0, 12).map(str),
    st.text(st.sampled_from("a0-9{},\\.\x1b\n"), max_size=4),
    st.text(st.characters(categories=None), max_size=3),
)
KEYS = st.lists(st.lists(COMPONENT, min_size=1, max_size=4).map(".".join), max_size=40)


@pytest.mark.parametrize(
    ("keys", "folded"),
    [
        ([], ()),
        ([""], ("",)),
        (["model.adapter0"], ("model.adapter0",)),
        ([f"model.adapter{i}" for i in range(2)], ("model.adapter{0-1}",)),
        ([f"model.adapter{i}" for i in range(800)], ("model.adapter{0-799}",)),
        (
            [f"layers.{i}.attn.{w}.weight" for i in range(80) for w in ("wq", "wk", "wv")],
            ("layers.{0-79}.attn.{wk,wq,wv}.weight",),
        ),
        ([f"layers.{i}.weight" for i in (0, 1, 2, 3, 5)], ("layers.{0-3,5}.weight",)),
        ([f"__{i}_0.distcp" for i in range(4)], ("__{0-3}_0.distcp",)),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)], ("l.{0-2}.e.{0-3}.w",)),
        (["a.007", "a.008", "a.7"], ("a.7", "a.{007,008}")),
        (["b.10", "b.9", "a.weight", "a.bias"], ("a.{bias,weight}", "b.{9-10}")),
        (["x,y", "x{1}"], ("x\\,y", "x\\{1\\}")),
        (["a", "a", "a"], ("a",)),
        (["w.0-3"], ("w.0-3",)),
        (["w.0-3", "w.1-3"], ("w.{0-1}-3",)),
        (["12345678901234567890", "12345678901234567891"], ("{12345678901234567890,12345678901234567891}",)),
    ],
)
def test_fold(keys, folded):
    assert fold(keys) == folded
    assert sorted(expand(folded)) == sorted(set(keys))


def test_fold_splits_what_is_no_cross_product():
    keys = [f"layers.{i}.attn.{w}" for i in range(8) for w in ("wk", "wq", "wv") if (i, w) != (5, "wq")]
    folded = fold(keys)
    assert folded == ("layers.{0-7}.attn.{wk,wv}", "layers.{0-4,6-7}.attn.wq")
    assert sorted(expand(folded)) == sorted(keys)


def test_fold_of_two_indices_on_the_diagonal_invents_nothing():
    assert fold(["a.0.0", "a.1.1"]) == ("a.0.0", "a.1.1")


@given(KEYS)
def test_fold_is_exact_and_disjoint(keys):
    expanded = expand(fold(keys))
    assert len(expanded) == len(set(expanded))
    assert set(expanded) == set(keys)


@given(KEYS, st.randoms(use_true_random=False))
def test_fold_does_not_depend_on_the_order(keys, random):
    shuffled = list(keys)
    random.shuffle(shuffled)
    assert fold(shuffled) == fold(keys)


@given(KEYS)
def test_folds_are_visible_and_count(keys):
    listed = list(folds(keys))
    assert sum(found.count for found in listed) == len(set(keys))
    assert all(found.text.isprintable() for found in listed)


@given(KEYS, st.integers(0, 200))
def test_key_list_counts_what_it_leaves_out(keys, limit):
    listed = key_list(keys, limit)
    assert listed.count == len(set(keys))
    assert len(set(expand(listed.keys))) == listed.count - listed.omitted
    assert sum(len(text.encode()) for text in listed.keys[1:]) <= limit


def test_key_list_of_nothing():
    assert key_list([]) is NO_KEYS


def test_key_list_cuts_a_long_name():
    assert key_list(["x" * 10_000]).keys == ("x" * 300 + "... (+9700 characters)",)


def test_folds_split_a_long_list_of_holes_before_they_cut():
    keys = [f"layers.{2 * i}.weight" for i in range(1000)]
    listed = list(folds(keys))
    assert all(len(found.text) <= 300 for found in listed)
    assert sorted(expand(found.text for found in listed)) == sorted(keys)
    assert Fold("layers.{0,2}.weight", 2) == next(folds(["layers.2.weight", "layers.0.weight"]))


def test_key_list_is_bounded():
    listed = key_list(f"{i:040d}.weight" for i in range(20_000))
    assert listed.count == 20_000
    assert sum(len(text) for text in listed.keys) <= 64 * 1024
    assert len(expand(listed.keys)) == 20_000 - listed.omitted


@pytest.mark.parametrize("text", ["{a", "a}", "{a{b}}", "a\\"])
def test_expand_refuses_what_is_no_fold(text):
    with pytest.raises(ValueError, match="not a fold"):
        expand(text)


def test_natural_order():
    assert sorted(["a.10", "a.9", "a", "b.1", "a.b"], key=natural) == ["a", "a.9", "a.10", "a.b", "b.1"]
