from __future__ import annotations

from dataclasses import replace

from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Facts, Finding, Proof
from ckpt_sentry.render import refusals

KEYS = [f"layers.{i}.{name}.weight" for i in range(3) for name in ("mlp", "norm")]
WANTED = Inventory({key: Entry((4, 4), "float32") for key in [*KEYS, "score.weight"]})


def facts(offered):
    found = examine(WANTED, Inventory({key: Entry((4, 4), "float32") for key in offered}), minimum=0.99)
    return Facts(path="s3://key:secret@bucket/model").examined(found), found.difference.missing


def test_a_wrong_prefix():
    known, missing = facts([f"model.{key}" for key in WANTED.entries])

    assert refusals.refused("load", known, WANTED, missing, 0.99).splitlines() == [
        "load refused, the model is untouched: 0 % of keys and 0 % of elements would load, the minimum is 99 %",
        "  checkpoint  s3://***@bucket/model",
        '  rename      strip the prefix "model." (model.layers.0.mlp.weight → layers.0.mlp.weight): 100 % would load',
        "              Rename its keys: model.load_state_dict(ckpt_sentry.unify_keys(state_dict, model)).",
        "  missing     7 of 7 keys of the model: layers.{0-2}.{mlp,norm}.weight, score.weight",
        "  unexpected  7 keys: model.layers.{0-2}.{mlp,norm}.weight, model.score.weight",
    ]


def test_a_gap_comes_with_the_setting_that_allows_it():
    known, missing = facts(KEYS)

    assert refusals.loaded("load", known, WANTED, missing, 0.99).splitlines() == [
        "load has loaded too little: 85.7 % of keys and 85.7 % of elements came in, the minimum is 99 %",
        "  checkpoint  s3://***@bucket/model",
        "  missing     1 of 7 keys of the model: score.weight",
        "  wanted?     if this gap is wanted: CKPT_SENTRY_ALLOW_MISSING='score.*'",
    ]


def test_what_is_lost_as_a_whole_is_said_in_those_words():
    known, missing = facts([key for key in WANTED.entries if "norm" not in key])

    text = refusals.refused("load", known, WANTED, missing, 0.99)
    assert "  cause       All norms are lost, in every layer: 3 keys." in text


def test_wrong_values():
    known, _ = facts(WANTED.entries)
    lost = Finding("tied_weights_lost", "error", "a and b are tied.", "Tie them again.")
    known = replace(known, proof=Proof(7, key_list(["a", "b"]))).with_findings([lost])

    all_of_it, differing = "100 % of keys and 100 % of elements", "2 of 7 compared tensors"
    assert refusals.disproved("load", known).splitlines() == [
        f"load left wrong values in the model although {all_of_it} match: {differing} differ from the checkpoint",
        "  checkpoint  s3://***@bucket/model",
        "  cause       a and b are tied.",
        "  next        Tie them again.",
        "  differing   {a,b}",
    ]
