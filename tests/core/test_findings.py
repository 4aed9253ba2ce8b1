from __future__ import annotations

from ckpt_sentry.core.examine import Examination, examine
from ckpt_sentry.core.findings import (
    BY_ALLOWING,
    BY_RENAMING,
    RENAME,
    RENAME_BY_HAND,
    RENAME_ONE_BY_ONE,
    anew,
    renaming,
)
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Finding

SQUARE, OBJECT = Entry((4, 4), "float32"), Entry(None, None)
LAYERS = [f"layers.{i}.{part}.weight" for i in range(3) for part in ("attn", "mlp")]
ALLOW = "If the missing keys are to start anew, name them in CKPT_SENTRY_ALLOW_MISSING."


def inventory(*keys: str, **other: Entry) -> Inventory:
    return Inventory(dict.fromkeys(keys, SQUARE) | other)


def steps(found: Examination) -> dict[str, str | None]:
    return {one.code: one.next for one in found.findings}


def test_a_gap_alone_may_be_allowed() -> None:
    found = steps(examine(inventory(*LAYERS, "head"), inventory(*LAYERS), minimum=0.99))
    assert found["missing_keys"] == ALLOW
    assert found["low_coverage"].startswith("Mend the cause; if the gap is wanted")


def test_no_way_around_beside_a_rename() -> None:
    found = steps(examine(inventory(*LAYERS), inventory(*(f"model.{key}" for key in LAYERS)), minimum=0.99))
    assert found == {
        "renamed_keys": RENAME,
        "no_overlap": None,
        "missing_keys": None,
        "low_coverage": None,
        "unexpected_keys": None,
    }


def test_no_way_around_for_the_checkpoint_of_another_model() -> None:
    found = steps(examine(inventory(*LAYERS), inventory("quite.another", "thing"), minimum=0.99))
    assert found == {
        "no_overlap": "Check that the checkpoint belongs to this model.",
        "missing_keys": None,
        "low_coverage": None,
        "unexpected_keys": None,
    }


def test_no_way_around_where_something_else_ends_the_load() -> None:
    for other in (Entry((5, 4), "float32"), OBJECT):
        model, saved = inventory(*LAYERS, "head", new=SQUARE), inventory(*LAYERS, head=other)
        found = steps(examine(model, saved, minimum=0.99))
        assert (found["missing_keys"], found["low_coverage"]) == (None, None)


def test_shapes_that_are_copied_as_far_as_they_go_end_nothing() -> None:
    model, saved = inventory(*LAYERS, "head", new=SQUARE), inventory(*LAYERS, head=Entry((5, 4), "float32"))
    assert steps(examine(model, saved, read_fractions={"head": 0.5}))["missing_keys"] == ALLOW


def test_a_model_that_is_too_deep_is_to_be_built_anew() -> None:
    found = steps(examine(inventory(*LAYERS, "head"), inventory(*LAYERS[:4], "head"), minimum=0.99))
    assert found["missing_keys"] == "The checkpoint has layers 0-1: build the model with 2 layers."
    assert found["block_lost"] == ALLOW


def test_a_tied_name_is_in_nobodys_way() -> None:
    wanted = Inventory(inventory("embed", *LAYERS, "head").entries, {"head": "embed"})
    found = examine(wanted, inventory("embed", *LAYERS[:4]))
    assert steps(found)["missing_keys"] == "The checkpoint has layers 0-1: build the model with 2 layers."


def test_tied_names_are_counted_once_everywhere() -> None:
    wanted = Inventory(inventory("embed", "head", *LAYERS).entries, {"head": "embed"})
    found = examine(wanted, inventory("other"))
    assert "0 of 7 keys would load" in found.findings[0].text
    assert (found.missing.count, wanted.keys, found.missing.keys[0]) == (7, 7, "embed")
    assert len(found.difference.missing) == 8
    for globs, text in ((["embed", "head"], "1 of them may be."), (["embed"], "mlp}.weight.")):
        missing = next(one for one in examine(wanted, inventory("other"), allow_missing=globs).findings[1:])
        assert missing.text.endswith(text)


def test_a_rule_in_doubt_is_left_to_a_person() -> None:
    sides = inventory("a.weight", "b.weight", "c.weight"), inventory("x.weight", "y.weight", "z.weight")
    doubtful = Finding("renamed_keys", "warning", "", RENAME_BY_HAND)
    sure = Finding("renamed_keys", "warning", "", RENAME, remedy=BY_RENAMING)
    assert renaming([doubtful, sure], "so") == (doubtful, Finding("renamed_keys", "warning", "", "so"))
    assert all(one.next != RENAME for one in examine(*sides).findings)


def test_a_rule_in_doubt_is_done_by_what_can_do_it() -> None:
    prefixes = examine(inventory("x"), inventory("a.x", "b.x"))
    assert steps(prefixes)["renamed_keys"] == RENAME_BY_HAND
    model = [f"layers.{i}.attn.{name}_proj.weight" for i in range(3) for name in "qkvo"]
    components = examine(
        inventory(*model), inventory(*(key.replace("_proj", "").replace("attn.", "attn.w") for key in model))
    )
    assert steps(components)["renamed_keys"] == RENAME_ONE_BY_ONE


def test_the_way_of_a_loader() -> None:
    one = Finding("missing_keys", "warning", "", ALLOW, remedy=BY_ALLOWING)
    other = Finding("low_coverage", "error", "", "Mend it.")
    assert [one.next for one in anew([one, other], "f()")] == [
        "If the missing keys are to start anew: f().",
        "Mend it.",
    ]
    assert [one.next for one in anew([one, other], None)] == [None, "Mend it."]


def test_tensors_that_were_saved_without_being_gathered() -> None:
    empty = Entry((0,), "float32")
    step = steps(examine(inventory(*LAYERS), Inventory(dict.fromkeys(LAYERS, empty))))["shape_mismatch"]
    assert step is not None
    assert "Gather them when saving" in step
    one_other = Inventory(dict.fromkeys(LAYERS, empty) | {LAYERS[0]: Entry((5, 4), "float32")})
    other = steps(examine(inventory(*LAYERS), one_other))["shape_mismatch"]
    assert other == "Build the model with the configuration that the checkpoint was saved with."
