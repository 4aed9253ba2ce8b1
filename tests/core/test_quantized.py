from __future__ import annotations

import pytest

from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.quantized import State, dropped, findings

FLOAT, CODES, SCALE = Entry((8, 8), "float32"), Entry((8, 8), "int8"), Entry((8,), "float32")
WANTED = Inventory({"a.weight": FLOAT, "a.bias": SCALE})


@pytest.mark.parametrize(
    "key",
    [
        *(
            "a.SCB",
            "a.weight_format",
            "a.weight.absmax",
            "a.weight.quant_map",
            "a.weight.quant_state.bitsandbytes__nf4",
        ),
        *("a.weight_scale", "a.weight_scale_inv", "a.weight_zero_point", "a.weight._scale"),
        *("a.scale", "a.scales", "a.zeros", "a.qzeros", "a.g_idx"),
    ],
)
def test_the_state_of_a_weight_that_is_loaded_as_codes(key: str) -> None:
    offered = Inventory({"a.weight": CODES, key: SCALE})
    assert dropped(WANTED, offered, [key]) == State(needed=(key,))


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scales"])
def test_a_parameter_of_any_name(suffix: str) -> None:
    model = Inventory({"experts.up": FLOAT})
    offered = Inventory({"experts.up": CODES._replace(dtype="float8_e4m3fn"), f"experts.up{suffix}": SCALE})
    assert dropped(model, offered, [f"experts.up{suffix}"]).needed == (f"experts.up{suffix}",)


@pytest.mark.parametrize(
    ("wanted", "offered", "keys"),
    [
        (FLOAT, FLOAT, ["a.weight_scale"]),
        (FLOAT, Entry((8, 8), None), ["a.weight_scale"]),
        (FLOAT, CODES, ["b.weight_scale", "a.inv_freq", "weight", "SCBs"]),
    ],
    ids=["values", "an unknown type", "other keys"],
)
def test_what_says_nothing(wanted: Entry, offered: Entry, keys: list[str]) -> None:
    held = Inventory({"a.weight": offered, **dict.fromkeys(keys, SCALE)})
    assert dropped(Inventory({"a.weight": wanted}), held, keys) == State()


def test_names_alone_are_information() -> None:
    held = Inventory({"a.weight": CODES, "a.weight_scale": SCALE})
    state = dropped(Inventory({"a.weight": CODES}), held, ["a.weight_scale"])
    assert state == State(beside=("a.weight_scale",))
    (found,) = findings(state)
    assert (found.code, found.level, found.next) == ("quantized_state_unread", "info", None)


def test_a_weight_that_does_not_fit_is_not_loaded() -> None:
    held = Inventory({"a.weight": Entry((32, 1), "uint8"), "a.weight.absmax": SCALE})
    found = examine(Inventory({"a.weight": FLOAT}), held)
    assert not [one for one in found.findings if one.code.startswith("quantized")]


def test_a_packed_weight_needs_its_tables_but_takes_its_scale() -> None:
    packed = Inventory({"a.weight": CODES})
    assert dropped(packed, packed, ["a.weight.absmax", "a.SCB"], {"a.weight"}) == State(needed=("a.weight.absmax",))


def test_it_is_said_once_for_all() -> None:
    keys = tuple(f"{i}.SCB" for i in range(3))
    (found,) = findings(State(needed=keys))
    assert (found.code, found.level) == ("quantized_state_dropped", "error")
    assert found.text.startswith("3 weights are quantized in the checkpoint, and their scales are not read: {0-2}.SCB.")
    assert not list(findings(State()))
