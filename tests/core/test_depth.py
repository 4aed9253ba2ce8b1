from __future__ import annotations

import pytest

from ckpt_sentry.core.depth import shallower


def stack(name: str, depth: int) -> list[str]:
    return ["embed", *(f"{name}.{i}.{part}" for i in range(depth) for part in ("attn.weight", "norm"))]


def said(model: list[str], checkpoint: list[str]) -> str | None:
    return shallower(model, checkpoint, sorted(set(model) - set(checkpoint)))


@pytest.mark.parametrize(
    ("name", "wanted", "held", "text"),
    [
        ("layers", 4, 3, "The checkpoint has layers 0-2: build the model with 3 layers."),
        ("model.blocks", 12, 2, "The checkpoint has blocks 0-1: build the model with 2 blocks."),
        ("transformer.h", 6, 5, "The checkpoint has layers 0-4: build the model with 5 layers."),
        ("layers", 2, 1, "The checkpoint has one of layers, 0: build the model with 1."),
    ],
)
def test_a_model_that_is_too_deep(name: str, wanted: int, held: int, text: str) -> None:
    assert said(stack(name, wanted), stack(name, held)) == text


def test_the_state_of_an_optimizer_agrees() -> None:
    model, saved = (
        [*stack("model.layers", n), *(f"optim.state.{key}.exp_avg" for key in stack("model.layers", n))] for n in (4, 3)
    )
    assert said(model, saved) == "The checkpoint has layers 0-2: build the model with 3 layers."


def test_experts_are_no_depth() -> None:
    model = [f"layers.{i}.experts.{j}.w" for i in range(4) for j in range(2)]
    assert said(model, [key for key in model if not key.startswith("layers.3.")]) == (
        "The checkpoint has layers 0-2: build the model with 3 layers."
    )


@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [
        (stack("layers", 3), stack("layers", 3)),
        (stack("layers", 3), ["embed"]),
        ([*stack("layers", 4), "head"], stack("layers", 3)),
        (stack("layers", 4), [key for key in stack("layers", 4) if ".1." not in key]),
        (stack("layers", 4), [key for key in stack("layers", 4) if "3.norm" not in key]),
        ([*stack("encoder", 4), *stack("decoder", 4)], [*stack("encoder", 3), *stack("decoder", 2)]),
        (["net.0.weight", "net.1.scale"], ["net.0.weight"]),
        (["0.weight", "1.weight"], ["0.weight"]),
    ],
    ids=["equal", "none", "a head too", "in the middle", "a part", "two depths", "unlike layers", "no name"],
)
def test_nothing_is_said_where_that_is_not_all(model: list[str], checkpoint: list[str]) -> None:
    assert said(model, checkpoint) is None
