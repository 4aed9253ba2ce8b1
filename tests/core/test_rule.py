"""What a rename rule does, and how it is said."""

from __future__ import annotations

import pytest

from ckpt_sentry.core.rule import Rule, Swap, without


@pytest.mark.parametrize(
    ("key", "bare"),
    [
        ("module.a.w", "a.w"),
        ("module.module.a.w", "a.w"),
        ("a.module._orig_mod.module.w", "a.w"),
        ("a.module", "a.module"),
        ("amodule.module_.w", "amodule.module_.w"),
        ("module.", ""),
        ("", ""),
    ],
)
def test_without(key, bare):
    assert without(("module", "_orig_mod"))(key) == bare


def test_steps_apply_in_order():
    rule = Rule(dropped=("module",), remove="model.", add="net.", swaps=(Swap("h", "layers", last=False),))
    targets = rule.targets(["net.layers.0.w", "layers.1.w", "other"])
    keys = ["model.module.h.0.w", "h.1.w", "else"]
    assert dict(rule.apply(keys, targets)) == {"model.module.h.0.w": "net.layers.0.w", "h.1.w": "layers.1.w"}
    assert (rule.steps, rule.kind) == (4, "combined")
    assert (
        rule.words() == 'strip "module." wherever it stands, the prefix "model." becomes "net.", "h." becomes "layers."'
    )


def test_a_swap_at_the_end_leaves_the_rest():
    rule = Rule(swaps=(Swap("b", "bias", last=True),))
    assert dict(rule.apply(["b.b"], {"b.bias": "b.bias"})) == {"b.b": "b.bias"}
    assert rule.words() == '".b" becomes ".bias"'


def test_model_keys_that_come_out_the_same_are_no_target():
    rule = Rule(inserted=("module",))
    targets = rule.targets(["module.a", "a", "module.b"])
    assert dict(rule.apply(["a", "b"], targets)) == {"b": "module.b"}


@pytest.mark.parametrize(
    ("rule", "guesses"),
    [
        (Rule(remove="a."), ()),
        (Rule(add="a."), ()),
        (Rule(remove="a.", add="b."), (("a.", "b."),)),
        (Rule(swaps=(Swap("gamma", "weight", last=True),)), ()),
        (Rule(remove="a.", swaps=(Swap("h", "layers", last=False),)), (("h", "layers"),)),
    ],
)
def test_what_is_a_guess(rule, guesses):
    assert rule.guesses == guesses
