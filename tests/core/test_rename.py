"""Rename rules inferred from two key sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.diff import diff
from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.core.rename import Inference, infer
from tests.core.models import Entries, inventories, renamed, tensor, tiny

TINY = tiny()


def inferred(model: Entries, checkpoint: Entries) -> Inference | None:
    return infer(*inventories(model, checkpoint), diff(model, checkpoint))


def short_names(key: str) -> str:
    return key.replace(".weight", ".w").replace(".bias", ".b")


def norms_of_tensorflow(key: str) -> str:
    return key.replace("norm.weight", "norm.gamma").replace("norm.bias", "norm.beta")


PREFIXES = ["model.", "module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.", "0."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_in_the_checkpoint(prefix):
    found = inferred(TINY, renamed(TINY, lambda key: prefix + key))
    assert (found.rename.rule, found.rename.coverage, found.rename.count) == (f'strip the prefix "{prefix}"', 1.0, 18)
    assert (found.kind, found.ambiguous) == ("prefix", False)
    assert found.mapping == {prefix + key: key for key in TINY}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_in_the_model(prefix):
    found = inferred(renamed(TINY, lambda key: prefix + key), TINY)
    assert (found.rename.rule, found.rename.coverage, found.rename.count) == (f'add the prefix "{prefix}"', 1.0, 18)


def under_model(key: str) -> str:
    return "model." + key


@pytest.mark.parametrize(
    ("model", "checkpoint", "rule", "count"),
    [
        (TINY, renamed(TINY, short_names), '".w" becomes ".weight", ".b" becomes ".bias"', 18),
        (renamed(TINY, short_names), TINY, '".weight" becomes ".w", ".bias" becomes ".b"', 18),
        (TINY, renamed(TINY, norms_of_tensorflow), '".beta" becomes ".bias", ".gamma" becomes ".weight"', 4),
        (renamed(TINY, norms_of_tensorflow), TINY, '".bias" becomes ".beta", ".weight" becomes ".gamma"', 4),
        (TINY, renamed(TINY, lambda k: k.replace("layers.", "h.")), 'the prefix "h." becomes "layers."', 16),
        (
            renamed(TINY, under_model),
            renamed(TINY, lambda k: under_model(k).replace("layers.", "h.")),
            'the prefix "model.h." becomes "model.layers."',
            16,
        ),
        (
            TINY,
            renamed(TINY, lambda k: k if k.startswith("embed") else "transformer." + k),
            'strip the prefix "transformer."',
            17,
        ),
        (
            TINY,
            renamed(TINY, lambda k: "transformer." + short_names(k.replace("layers.", "h."))),
            'strip the prefix "transformer.", ".w" becomes ".weight", ".b" becomes ".bias", "h." becomes "layers."',
            18,
        ),
        (
            renamed(TINY, lambda k: "bert." + k),
            renamed(TINY, lambda k: "base_model.model." + k),
            'the prefix "base_model.model." becomes "bert."',
            18,
        ),
        (
            TINY,
            renamed(TINY, lambda k: k.replace("attn.", "attn.base_layer.")),
            'strip "base_layer." wherever it stands',
            4,
        ),
    ],
)
def test_a_rule(model, checkpoint, rule, count):
    found = inferred(model, checkpoint)
    assert (found.rename.rule, found.rename.count, found.rename.coverage) == (rule, count, 1.0)
    assert not found.ambiguous


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_a_wrapper_inside_the_path(wrapper):
    wrapped = renamed(TINY, lambda key: under_model(key).replace("layers.0.", f"layers.0.{wrapper}"))
    plain = renamed(TINY, under_model)
    saved = inferred(plain, wrapped)
    assert (saved.rename.rule, saved.rename.coverage) == (f'strip "{wrapper}" wherever it stands', 1.0)
    wanted = inferred(wrapped, plain)
    assert (wanted.rename.rule, wanted.rename.coverage) == (f'insert "{wrapper}" where the model has it', 1.0)


def test_wrappers_on_both_sides():
    model = renamed(TINY, lambda key: "module." + key.replace("s.0.", "s.0._checkpoint_wrapped_module."))
    found = inferred(model, renamed(TINY, lambda key: "_orig_mod." + key))
    assert found.rename.coverage == 1.0
    for literal in ("module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        assert f'"{literal}"' in found.rename.rule


def test_a_wrapper_together_with_a_component():
    checkpoint = renamed(TINY, lambda key: "module." + key.replace("layers.", "h.").replace("attn.", "attn._orig_mod."))
    found = inferred(TINY, checkpoint)
    assert (found.rename.coverage, found.rename.count, found.kind) == (1.0, 18, "combined")


def test_several_components_at_once_that_shapes_do_not_tell_apart():
    model = {f"layers.{i}.attn.{name}_proj.weight": tensor(8, 8) for i in range(3) for name in "qkvo"}
    found = inferred(model, renamed(model, lambda key: key.replace("_proj", "").replace("attn.", "attn.w")))
    assert found.mapping["layers.0.attn.wq.weight"] == "layers.0.attn.q_proj.weight"
    assert (found.rename.count, found.ambiguous) == (12, True)


def test_two_prefixes_that_do_as_much():
    found = inferred({"x": tensor(2)}, {"a.x": tensor(2), "b.x": tensor(2)})
    assert (found.mapping, found.ambiguous) == ({"a.x": "x"}, True)


def attention(*names: str) -> Entries:
    return {
        f"mid.{i}.{name}.{kind}": tensor(8, 8) if kind == "weight" else tensor(8)
        for i in range(2)
        for name in names
        for kind in ("weight", "bias")
    }


def test_names_decide_among_rules_that_shapes_allow():
    found = inferred(attention("to_q", "to_k", "to_v", "to_out.0"), attention("query", "key", "value", "proj_attn"))
    pairs = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
    assert {before.split(".")[2]: after[6:].rpartition(".")[0] for before, after in found.mapping.items()} == pairs
    assert (found.rename.coverage, found.ambiguous) == (1.0, True)


@pytest.mark.parametrize("names", [("wq", "wk", "wv", "wo"), ("query", "key", "value", "output")])
def test_a_letter_stands_for_a_name(names):
    found = inferred(attention("q_proj", "k_proj", "v_proj", "o_proj"), attention(*names))
    assert [found.mapping[f"mid.0.{name}.weight"][6] for name in names] == ["q", "k", "v", "o"]


BIAS = ("bias", (4,))
WEIGHT_NORM = (BIAS, ("weight_g", (4, 1, 1)), ("weight_v", (4, 4, 3)))
WEIGHT_NORM_NEW = (
    BIAS,
    ("parametrizations.weight.original0", (4, 1, 1)),
    ("parametrizations.weight.original1", (4, 4, 3)),
)
SPECTRAL_NORM = (BIAS, ("weight_orig", (4, 4, 3)), ("weight_u", (4,)), ("weight_v", (12,)))
SPECTRAL_NORM_NEW = (
    BIAS,
    ("parametrizations.weight.original", (4, 4, 3)),
    ("parametrizations.weight.0._u", (4,)),
    ("parametrizations.weight.0._v", (12,)),
)


def layers(prefix: str, names: tuple[tuple[str, tuple[int, ...]], ...]) -> Entries:
    return {f"{prefix}{i}.{name}": tensor(*shape) for i in range(3) for name, shape in names}


@pytest.mark.parametrize(("old", "new"), [(WEIGHT_NORM, WEIGHT_NORM_NEW), (SPECTRAL_NORM, SPECTRAL_NORM_NEW)])
@pytest.mark.parametrize("prefix", ["", "module.", "net."])
def test_both_forms_of_torchs_own_parametrizations(old, new, prefix):
    for mine, theirs in ((old, new), (new, old)):
        found = inferred(layers("", mine), layers(prefix, theirs))
        expected = dict(zip(layers(prefix, theirs), layers("", mine), strict=True))
        assert found.mapping == {key: target for key, target in expected.items() if key != target}
        assert (found.rename.coverage, found.ambiguous) == (1.0, False)
        assert "_norm" in found.rename.rule


def test_an_adapter_around_some_layers_of_a_wrapped_model():
    def wrapped(key: str) -> str:
        return "base_model.model." + key.replace("attn.", "attn.base_layer.")

    found = inferred(TINY, {**renamed(TINY, wrapped), "base_model.model.layers.0.attn.lora_A.weight": tensor(2, 8)})
    assert (found.rename.coverage, found.rename.count, found.ambiguous) == (1.0, 18, False)
    assert found.rename.rule.startswith('strip "base_layer." wherever it stands')


def test_shapes_restrict_a_rule_and_it_says_so():
    checkpoint = {**renamed(TINY, under_model), "model.head.weight": tensor(20, 8)}
    found = inferred(TINY, checkpoint)
    assert found.rename.rule == 'strip the prefix "model.", but not for model.head.weight: other shapes'
    assert "model.head.weight" not in found.mapping
    assert found.rename.coverage < 1


@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [
        ({"x": tensor(2)}, {"a.x": tensor(3)}),
        ({"x": tensor(2)}, {"a.x": Entry(None, None)}),
        (TINY, TINY),
        (TINY, {}),
        ({}, TINY),
        (TINY, {**TINY, **renamed(TINY, lambda key: "ema." + key)}),
        (
            {f"pooler.dense.{kind}": tensor(8) for kind in ("weight", "bias")},
            {f"cls.transform.dense.{kind}": tensor(8) for kind in ("weight", "bias")} | {"cls.bias": tensor(30)},
        ),
    ],
)
def test_no_rule(model, checkpoint):
    assert inferred(model, checkpoint) is None


@pytest.mark.parametrize(
    ("model", "checkpoint", "rest"),
    [
        ({"q": tensor(4)}, {"b": tensor(4)}, {}),
        ({"q": tensor(4)}, {"b": tensor(4)}, TINY),
        ({"fc.weight": tensor(4)}, {"linear.weight": tensor(4)}, {}),
        ({"x.fc.weight": tensor(4)}, {"y.linear.weight": tensor(4)}, {}),
    ],
)
def test_one_key_of_a_shape_is_no_rename(model, checkpoint, rest):
    assert inferred({**model, **rest}, {**checkpoint, **rest}) is None


@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [
        ({"attention.weight": tensor(4)}, {"attn.weight": tensor(4)}),
        ({"head": tensor(4)}, {"lm_head": tensor(4)}),
        ({"norm.bias": tensor(4)}, {"norm.beta": tensor(4)}),
        ({"q": tensor(4)}, {"module.q": tensor(4)}),
        ({"fc.weight": tensor(4, 4), "fc.bias": tensor(4)}, {"linear.weight": tensor(4, 4), "linear.bias": tensor(4)}),
    ],
)
def test_a_few_keys_are_enough_where_something_else_tells(model, checkpoint):
    assert len(inferred(model, checkpoint).mapping) == len(model)


def test_a_whole_model_under_another_prefix_beside_an_optimizer():
    model = {f"inner.{i}.{name}": tensor(*shape) for i in range(3) for name, shape in (("weight", (4, 4)), BIAS)}
    saved = renamed(model, lambda key: key.replace("inner.", "model."))
    optimizer = {f"optim.state.{key}.exp_avg": entry for key, entry in renamed(model, lambda key: key[6:]).items()}
    found = inferred(model, {**saved, **optimizer, "optim.lr": tensor()})
    assert found.mapping == {key.replace("inner.", "model."): key for key in model}
    assert found.rename.coverage == 1.0


def test_names_from_a_checkpoint_are_escaped():
    found = inferred(TINY, renamed(TINY, lambda key: "\x1b[31m." + key))
    assert found.rename.rule == 'strip the prefix "\\x1b[31m."'


KEY = st.lists(
    st.sampled_from(["module", "_orig_mod", "model", "h", "layers", "0", "1", "w", "weight", "gamma", "bias"]),
    min_size=1,
    max_size=5,
).map(".".join)
SIDE = st.dictionaries(KEY, st.sampled_from([tensor(), tensor(2), tensor(2, 3), Entry(None, None)]), max_size=14)


@given(SIDE, SIDE)
def test_a_rule_never_contradicts(model, checkpoint):
    found = inferred(model, checkpoint)
    if found is None:
        return
    assert found.mapping
    assert len(set(found.mapping.values())) == len(found.mapping) == found.rename.count
    assert found.mapping.keys() <= checkpoint.keys() - model.keys()
    assert set(found.mapping.values()) <= model.keys() - checkpoint.keys()
    assert all(checkpoint[key].shape == model[target].shape for key, target in found.mapping.items())
    assert 0 <= found.rename.coverage <= 1
    assert found.mapping[found.rename.example[0]] == found.rename.example[1]


@given(SIDE.filter(bool), st.sampled_from(PREFIXES))
def test_a_prefix_before_all_keys_is_found(model, prefix):
    checkpoint = renamed(model, lambda key: prefix + key)
    if model.keys().isdisjoint(checkpoint):
        assert inferred(model, checkpoint).rename.coverage == 1.0


@given(SIDE, SIDE)
def test_the_order_of_keys_does_not_matter(model, checkpoint):
    backwards = dict(reversed(model.items())), dict(reversed(checkpoint.items()))
    assert inferred(model, checkpoint) == inferred(*backwards)


def test_names_do_not_change_places():
    model = {"a.weight": tensor(2, 3), "b.weight": tensor(3, 2)}
    assert inferred(model, {"module.a.weight": tensor(3, 2), "module.b.weight": tensor(2, 3)}) is None
    three = {"a.weight": tensor(2), "b.weight": tensor(3), "c.weight": tensor(4)}
    turned = {"module.a.weight": tensor(3), "module.b.weight": tensor(4), "module.c.weight": tensor(2)}
    assert inferred(three, turned) is None
