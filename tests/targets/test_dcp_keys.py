from __future__ import annotations

from dataclasses import replace

from ckpt_sentry.audit.examine import examine
from ckpt_sentry.audit.inventory import Entry, Inventory
from ckpt_sentry.audit.report import Finding
from ckpt_sentry.targets import dcp_keys

ENTRY = Entry((2,), "float32")


def inventory(*keys: str) -> Inventory:
    return Inventory(dict.fromkeys(keys, ENTRY))


def found(model: tuple[str, ...], checkpoint: tuple[str, ...], outer: str = ".") -> list[tuple[str, str, str]]:
    paths = {key: tuple(key.split(outer)) for key in checkpoint}
    examination = examine(inventory(*model), inventory(*checkpoint))
    return [(one.code, one.level, one.text) for one in dcp_keys.findings(examination, paths)]


def test_entries_that_were_not_asked_for_are_one_short_sentence() -> None:
    saved = ("model.w", "optim.state.w.a", "optim.state.w.b", "step.n")

    assert found(("model.w",), saved) == [
        ("not_asked_for", "info", '2 keys under "optim", 1 key under "step" were not asked for.')
    ]


def test_unexpected_keys_of_the_model_are_still_said() -> None:
    saved = ("model.w", "model.extra", "optim.state.w.a")

    assert found(("model.w",), saved) == [
        ("unexpected_keys", "info", "1 key of the checkpoint is not in the model, unexpected: model.extra."),
        ("not_asked_for", "info", '1 key under "optim" was not asked for.'),
    ]


def test_a_flat_state_dict_has_no_entries_to_leave_out() -> None:
    assert [code for code, _, _ in found(("a.w",), ("a.w", "b.w"), outer="/")] == ["unexpected_keys"]


def test_keys_that_a_rename_explains_are_not_listed_again() -> None:
    names = [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]

    assert [code for code, _, _ in found(tuple(names), tuple(f"module.{name}" for name in names))] == ["renamed_keys"]


def test_what_ends_a_load_is_an_error() -> None:
    missing = Finding("missing_keys", "warning", "1 key missing.", "If the missing keys are to start anew, name them.")
    renamed = Finding("renamed_keys", "warning", "other names", "rename")
    info = Finding("unexpected_keys", "info", "more")

    step = "If the missing keys are to start anew: the way."
    assert dcp_keys.decisive([info, missing], "the way") == (info, replace(missing, level="error", next=step))
    deeper = replace(missing, next="build it so")
    assert dcp_keys.decisive([deeper], "the way") == (replace(deeper, level="error"),)
    assert dcp_keys.decisive([renamed, info], "the way") == (replace(renamed, level="error"), info)
    assert dcp_keys.decisive([], "the way") == ()
