"""Coverage, utilisation and what is lost as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.coverage import Loss, coverage, losses, matcher, utilisation
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Coverage
from tests.core.models import renamed, tensor, tiny, without

MODEL = Inventory({"embed": tensor(8, 2), "head": tensor(4, 2), "norm": tensor(8), "step": Entry(None, None)})


@pytest.mark.parametrize(
    ("supplied", "allowed", "keys", "elements"),
    [
        (tuple(MODEL.entries), (), 1.0, 1.0),
        ((), (), 0.0, 0.0),
        (("embed", "step"), (), 0.5, 0.5),
        (("embed", "norm", "step"), ("head",), 1.0, 1.0),
        (("embed", "step"), ("h*",), 2 / 3, 16 / 24),
        ((), ("*",), 1.0, 1.0),
        ({"embed": 0.5, "head": 1, "norm": 1, "step": 1}, (), 1.0, 24 / 32),
        (("no", "such", "key"), (), 0.0, 0.0),
    ],
)
def test_coverage(supplied, allowed, keys, elements):
    assert coverage(MODEL, supplied, allowed) == Coverage(keys, elements)


def test_nothing_wanted_is_covered():
    assert coverage(Inventory(), ()) == Coverage(1.0, 1.0)


def test_tied_names_are_one_storage():
    tied = Inventory(MODEL.entries | {"lm_head": tensor(8, 2)}, {"lm_head": "embed"})
    assert coverage(tied, ("lm_head", "head", "norm", "step")) == Coverage(1.0, 1.0)
    assert coverage(tied, ("head", "norm", "step")) == Coverage(0.75, 0.5)
    assert coverage(tied, ("head", "norm", "step"), ("lm_head",)) == Coverage(0.75, 0.5)
    assert coverage(tied, ("head", "norm", "step"), ("lm_head", "embed")) == Coverage(1.0, 1.0)


def test_less_than_all_is_never_all():
    huge = Inventory({"a": tensor(10**17), "b": tensor(1)})
    assert coverage(huge, ("a",)).elements < 1


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([tensor(), tensor(3), tensor(0), Entry(None, None)])),
    st.dictionaries(st.sampled_from("abcdefg"), st.floats(0, 1)),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("abcdef")),
    st.lists(st.sampled_from(["a", "b*", "?", "[cd]"]), max_size=2),
)
def test_coverage_is_a_part(entries, parts, ties, allowed):
    part = coverage(Inventory(entries, ties), parts, allowed)
    assert 0 <= part.keys <= 1
    assert 0 <= part.elements <= 1
    assert part.judged == min(part.keys, part.elements)


def test_globs():
    allowed = matcher(["classifier.*", "*.inv_freq"])
    assert [allowed(key) for key in ("classifier.weight", "a.inv_freq", "my.classifier.weight", "Classifier.x")] == [
        True,
        True,
        False,
        False,
    ]


def test_utilisation():
    assert utilisation(MODEL, {"embed", "other"}) == 0.5
    assert utilisation(Inventory(), set()) == 1.0
    assert utilisation(Inventory({"a": Entry(None, None), "b": Entry(None, None)}), {"a"}) == 0.5


def lost(part, layers=4):
    entries = tiny(layers)
    return losses(Inventory(entries), entries.keys() - without(entries, part).keys())


def test_losses():
    assert lost("norm") == (Loss("kind", 8, "all norms are lost, in every layer: 8 keys"),)
    assert lost("bias") == (Loss("kind", 16, "all biases are lost, in every layer: 16 keys"),)
    assert lost("layers.2.") == (Loss("block", 8, "a repeated block is at 0 %: layers.2 (8 keys)"),)
    assert lost("layers.") == (
        Loss("block", 32, "4 repeated blocks are at 0 %: layers.{0-3} (32 keys)"),
        Loss("kind", 16, "all biases are lost, in every layer: 16 keys"),
        Loss("kind", 8, "all norms are lost, in every layer: 8 keys"),
    )
    assert lost("head") == lost("no such key") == lost("") == ()


def test_lost_buffers():
    entries = {f"bn{i}.{name}": tensor(4) for i in range(3) for name in ("weight", "running_mean", "running_var")}
    missing = {key for key in entries if "running" in key}
    assert losses(Inventory(entries), missing) == (Loss("kind", 6, "all buffers are lost, in every layer: 6 keys"),)


def test_blocks_inside_a_lost_block_are_not_said_again():
    entries = {f"layers.{i}.experts.{j}.up": tensor(4) for i in range(2) for j in range(3)}
    missing = {key for key in entries if key.startswith("layers.1.")}
    assert losses(Inventory(entries), missing) == (Loss("block", 3, "a repeated block is at 0 %: layers.1 (3 keys)"),)


def test_only_one_block_is_no_repetition():
    entries = renamed(tiny(1), lambda key: key)
    missing = {key for key in entries if key.startswith("layers.0.attn")}
    assert losses(Inventory(entries), missing) == ()
