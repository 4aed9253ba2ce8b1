from __future__ import annotations

import pytest

from ckpt_sentry.core.training import findings

MODEL = ("model.embed.weight", "model.head.weight")
OPTIM = tuple(f"optim.state.{of}.{slot}" for of in ("embed.weight", "head.weight") for slot in ("exp_avg", "step"))
GROUPS = ("optim.param_groups.0.lr",)


def said(model: tuple[str, ...], missing: tuple[str, ...]) -> list[str]:
    checkpoint = [key for key in model if key not in missing]
    return [found.text for found in findings(model, checkpoint, missing)]


@pytest.mark.parametrize("root", ["", "app."])
def test_a_model_without_its_training_is_whole(root: str) -> None:
    others = ("dataloader.rank_0", "optim.state.head.weight.step", *GROUPS)
    model = tuple(root + key for key in (*MODEL, *others))
    missing = tuple(root + key for key in others)
    assert said(model, missing) == [
        'All 2 keys under "model" are there: what is missing lies under "dataloader", "optim" alone.'
    ]


def test_a_model_with_a_gap_is_not_whole() -> None:
    assert said((*MODEL, *OPTIM), (MODEL[0], *OPTIM)) == []
    assert said(MODEL, MODEL[:1]) == []
    assert said(("embed", "optim.lr"), ("embed",)) == []


def test_a_parameter_that_had_no_state_when_it_was_saved() -> None:
    assert said((*MODEL, *GROUPS, *OPTIM), OPTIM[2:])[1:] == [
        "The optimizer had no state for 1 parameter when it was saved, as before a first gradient: head.weight."
    ]


def test_a_slot_that_is_gone_is_no_state_that_never_was() -> None:
    assert said((*MODEL, *OPTIM), OPTIM[3:]) == [
        'All 2 keys under "model" are there: what is missing lies under "optim" alone.'
    ]


def test_a_whole_state_that_is_gone_tells_nothing_of_gradients() -> None:
    assert len(said((*MODEL, *GROUPS, *OPTIM), OPTIM)) == 1
