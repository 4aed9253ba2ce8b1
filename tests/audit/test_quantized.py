from __future__ import annotations

import pytest

from ckpt_sentry.audit.inventory import Entry, Inventory
from ckpt_sentry.audit.quantized import dropped, findings

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
    ],
)
def test_the_state_of_a_weight_that_is_loaded_as_codes(key: str) -> None:
    offered = Inventory({"a.weight": CODES, key: SCALE})
    assert dropped(WANTED, offered, [key], ()) == [key]


@pytest.mark.parametrize(
    ("wanted", "offered", "keys"),
    [
        (FLOAT, FLOAT, ["a.weight_scale"]),
        (CODES, CODES, ["a.weight_scale"]),
        (FLOAT, CODES, ["b.weight_scale", "a.inv_freq", "weight", "SCBs"]),
    ],
    ids=["values", "a model of codes", "other keys"],
)
def test_what_says_nothing(wanted: Entry, offered: Entry, keys: list[str]) -> None:
    held = Inventory({"a.weight": offered, **dict.fromkeys(keys, SCALE)})
    assert dropped(Inventory({"a.weight": wanted}), held, keys, ()) == []


def test_a_packed_weight_needs_its_tables_but_takes_its_scale() -> None:
    packed = Inventory({"a.weight": CODES})
    assert dropped(packed, packed, ["a.weight.absmax", "a.SCB"], {"a.weight"}) == ["a.weight.absmax"]


def test_it_is_said_once_for_all() -> None:
    keys = [f"{i}.SCB" for i in range(3)]
    offered = Inventory({f"{i}.weight": CODES for i in range(3)})
    (found,) = findings(keys, offered)
    assert (found.code, found.level) == ("quantized_state_dropped", "error")
    assert found.text.startswith("3 weights are quantized in the checkpoint, and their scales are not read: {0-2}.SCB.")
    assert not list(findings([], offered))
