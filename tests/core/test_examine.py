"""The whole of what names, shapes and dtypes tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.codec import dump, restore
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.findings import percent
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Coverage, DtypeCast, Finding, KeyList, ShapeMismatch
from tests.core.models import inventories, renamed, tensor, tiny, without

TINY = tiny()


def examined(model, checkpoint, **settings):
    return examine(*inventories(model, checkpoint), **settings)


def codes(examination):
    return {finding.code: finding.level for finding in examination.findings}


def test_a_good_load_says_nothing():
    found = examined(TINY, dict(TINY), minimum=0.99)
    assert (found.matched, found.coverage, found.utilisation, found.findings) == (18, Coverage(1.0, 1.0), 1.0, ())
    assert found.missing == found.unexpected == KeyList()


def test_missing_keys():
    model = TINY | {f"adapter{i}": tensor(2) for i in range(800)}
    found = examined(model, TINY)
    assert found.missing == KeyList(800, ("adapter{0-799}",))
    assert found.coverage.keys == pytest.approx(18 / 818)
    assert found.findings == (
        Finding(
            "missing_keys",
            "warning",
            "800 keys missing from the checkpoint: adapter{0-799}.",
            "If the missing keys are to start anew, name them in CKPT_SENTRY_ALLOW_MISSING.",
            (("count", "800"), ("listed", "adapter{0-799}"), ("allowed", "0")),
            "allow",
        ),
    )


def test_unexpected_keys_are_for_information():
    found = examined(TINY, TINY | {f"adapter{i}": tensor(2) for i in range(5)})
    assert found.unexpected == KeyList(5, ("adapter{0-4}",))
    assert found.coverage == Coverage(1.0, 1.0)
    assert found.utilisation < 1
    assert [(finding.level, finding.text) for finding in found.findings] == [
        ("info", "5 keys of the checkpoint are not in the model, unexpected: adapter{0-4}.")
    ]


def test_other_shapes():
    model = {"model.head.weight": tensor(32, 8), "model.head.bias": tensor(32), "model.a.weight": tensor(2)}
    checkpoint = {"model.head.weight": tensor(16, 8), "model.head.bias": tensor(16), "model.a.weight": tensor(2)}
    found = examined(model, checkpoint)
    assert found.mismatched == (
        ShapeMismatch("model.head.bias", 1, "model.head", (32,), (16,)),
        ShapeMismatch("model.head.weight", 1, "model.head", (32, 8), (16, 8)),
    )
    (finding,) = found.findings
    assert (finding.code, finding.level) == ("shape_mismatch", "error")
    assert finding.text == (
        "2 keys have other shapes in the checkpoint: model.head.bias (model [32], checkpoint [16]); "
        "model.head.weight (model [32, 8], checkpoint [16, 8])."
    )
    assert found.coverage == Coverage(1 / 3, 2 / 290)


def test_other_shapes_fold_with_their_modules():
    model = {f"layers.{i}.{name}.weight": tensor(4, 4) for i in range(3) for name in ("wk", "wq")} | {"w": tensor(2)}
    found = examined(model, {key: tensor(8, 8) for key in model})
    assert [(item.keys, item.count, item.module) for item in found.mismatched] == [
        ("layers.{0-2}.{wk,wq}.weight", 6, "layers.{0-2}.{wk,wq}"),
        ("w", 1, ""),
    ]


def test_what_is_read_in_spite_of_its_shape():
    short = examined({"w": tensor(6)}, {"w": tensor(4)}, read_fractions={"w": 4 / 6})
    assert (short.coverage, codes(short)) == (Coverage(1.0, 4 / 6), {"shape_mismatch": "warning"})
    long = examined({"w": tensor(2)}, {"w": tensor(4)}, read_fractions={"w": 1.0})
    assert (long.coverage, codes(long)) == (Coverage(1.0, 1.0), {"shape_mismatch": "warning"})


def test_a_tensor_that_is_half_read():
    found = examined({"a": tensor(4), "b": tensor(4)}, {"a": tensor(4), "b": tensor(4)}, read_fractions={"a": 0.25})
    assert found.coverage == Coverage(1.0, 5 / 8)
    unread = examined({"a": tensor(4), "b": tensor(4)}, {"a": tensor(4), "b": tensor(4)}, read_fractions={"a": 0.0})
    assert unread.coverage == Coverage(0.5, 0.5)


def test_casts():
    found = examined({key: tensor(*e.shape, dtype="bfloat16") for key, e in TINY.items()}, TINY, minimum=0.99)
    assert found.casts == (
        DtypeCast("{embed,head}.weight", 2, "bfloat16", "float32"),
        DtypeCast("layers.{0-1}.{attn,mlp,norm,out}.{bias,weight}", 16, "bfloat16", "float32"),
    )
    assert codes(found) == {"dtype_cast": "info"}
    assert found.coverage == Coverage(1.0, 1.0)
    assert found.findings[0].text.startswith("18 keys are cast from float32 to bfloat16: ")


def test_a_tensor_against_another_object():
    found = examined({"step": tensor(), "t": Entry(None, None)}, {"step": Entry(None, None), "t": tensor()})
    assert found.retyped == KeyList(2, ("{step,t}",))
    assert [finding.text for finding in found.findings] == [
        "1 key is a tensor in the checkpoint where the program asks for another object: t.",
        "1 key is another object in the checkpoint where the program asks for a tensor: step.",
    ]


def test_renamed_keys_come_first():
    found = examined(TINY, renamed(TINY, lambda key: "module." + key), minimum=0.99)
    assert list(codes(found)) == ["renamed_keys", "no_overlap", "missing_keys", "low_coverage", "unexpected_keys"]
    assert found.rename.coverage == 1.0
    assert found.findings[0].text == (
        'The checkpoint has 18 keys of this model under other names: strip the prefix "module." '
        "(module.embed.weight → embed.weight), then 100 % would load."
    )
    assert found.inference.mapping["module.head.weight"] == "head.weight"


def test_an_empty_checkpoint():
    found = examined(TINY, {})
    assert found.coverage == Coverage(0.0, 0.0)
    assert codes(found) == {"no_overlap": "error", "missing_keys": "warning"}
    assert found.findings[0].text == "The checkpoint holds nothing: 0 of 18 keys would load."


def test_an_empty_model():
    assert codes(examined({}, TINY)) == {"unexpected_keys": "info"}
    assert examined({}, {}).findings == ()


def test_missing_keys_that_may_be():
    found = examined(TINY, without(TINY, "head"), allow_missing=["head.*"], minimum=0.99)
    assert (found.coverage, found.missing.count) == (Coverage(1.0, 1.0), 1)
    assert codes(found) == {"missing_keys": "info"}


def test_a_tied_name_is_not_missing():
    model = Inventory(TINY, {"head.weight": "embed.weight"})
    for lacking in ("head", "embed"):
        found = examine(model, Inventory(without(TINY, lacking)), minimum=0.99)
        assert (found.coverage, found.missing, found.findings) == (Coverage(1.0, 1.0), KeyList(), ())


def test_ema_keys_beside_the_weights_are_no_rename():
    found = examined(TINY, TINY | renamed(TINY, lambda key: "ema." + key), minimum=0.99)
    assert (found.rename, codes(found)) == (None, {"unexpected_keys": "info"})


def test_lost_kinds_and_blocks_are_said():
    texts = {finding.code: finding.text for finding in examined(tiny(4), without(tiny(4), "norm")).findings}
    assert texts["kind_lost"] == "All norms are lost, in every layer: 8 keys."
    texts = {finding.code: finding.text for finding in examined(tiny(4), without(tiny(4), "layers.2.")).findings}
    assert texts["block_lost"] == "A repeated block is at 0 %: layers.2 (8 keys)."


def test_low_coverage_says_both_parts():
    found = examined(TINY, without(TINY, "head"), minimum=0.99)
    assert codes(found) == {"missing_keys": "warning", "low_coverage": "error"}
    text = found.findings[-1].text
    assert text == "Coverage is 94.4 % of keys and 87 % of elements, under the minimum of 99 %."


def test_optimizer_keys_are_not_renamed():
    model = {
        f"optim.param_groups.l.{i}.weight.{name}": Entry(None, None) for i in range(3) for name in ("betas", "amsgrad")
    }
    checkpoint = renamed(model, lambda key: key.replace("betas", "momentum").replace("amsgrad", "dampening"))
    found = examined(model, checkpoint)
    assert found.rename is None
    assert codes(found)["optimizer_class_changed"] == "error"


def test_everything_is_bounded():
    keys = {f"{i:x}" * 40: tensor(i + 1) for i in range(3000)}
    found = examined({**keys, "a": tensor(1)}, {key: tensor(1, 1) for key in keys} | {"z": tensor(7)}, limit_bytes=4096)
    assert sum(len(item.keys) for item in found.mismatched) <= 4096
    assert sum(len(finding.text) for finding in found.findings) <= 8192
    assert "3,000 keys" in next(finding.text for finding in found.findings if finding.code == "shape_mismatch")


def test_hostile_names_are_escaped_everywhere():
    name = "\x1b[2J\n{x}\u202e"
    found = examined({name: tensor(2)}, {"b" + name: tensor(3)})
    assert all(text.isprintable() for finding in found.findings for text in (finding.text, finding.next or ""))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (1.0, "100 %"),
        (0.99999, "99.9 %"),
        (0.5, "50 %"),
        (0.0, "0 %"),
        (1e-9, "<0.1 %"),
        (0.123, "12.3 %"),
        (0.57, "57 %"),
        (1 - 1e-16, "99.9 %"),
    ],
)
def test_percent(part, text):
    assert percent(part) == text


ENTRIES = st.sampled_from([tensor(), tensor(2), tensor(2, dtype="bfloat16"), tensor(2, 3), Entry(None, None)])
NAMES = st.lists(st.sampled_from(["module", "layers", "0", "1", "weight", "bias", "norm"]), min_size=1, max_size=4)
SIDES = st.dictionaries(NAMES.map(".".join), ENTRIES, max_size=12)


@given(SIDES, SIDES)
def test_parts_and_counts_agree(model, checkpoint):
    found = examined(model, checkpoint, minimum=0.5)
    assert 0 <= found.coverage.keys <= 1
    assert 0 <= found.utilisation <= 1
    assert found.missing.count == len(model.keys() - checkpoint.keys())
    assert found.unexpected.count == len(checkpoint.keys() - model.keys())
    mismatched = sum(item.count for item in found.mismatched)
    assert found.matched + found.missing.count + mismatched + found.retyped.count == len(model)
    assert (found.coverage.judged == 1) == (found.matched == len(model))
    for finding in found.findings:
        assert restore(Finding, dump(finding)) == finding
