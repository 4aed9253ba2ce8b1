"""What models and checkpoints hold."""

from __future__ import annotations

import pytest

from ckpt_sentry.core.inventory import Entry, Inventory


@pytest.mark.parametrize(
    ("entry", "elements", "nbytes"),
    [
        (Entry((2, 3), "float32"), 6, 24),
        (Entry((), "bfloat16"), 1, 2),
        (Entry((0, 5), "int64"), 0, 0),
        (Entry(None, None), 0, 0),
        (Entry((4,), "torch.float16"), 4, 8),
        (Entry((4,), "no_such_type"), 4, 0),
    ],
)
def test_entry(entry, elements, nbytes):
    assert (entry.elements, entry.nbytes) == (elements, nbytes)


def test_ties_count_once():
    entries = {
        "embed.weight": Entry((4, 2), "float32"),
        "head.weight": Entry((4, 2), "float32"),
        "b": Entry((4,), "int8"),
    }
    inventory = Inventory(entries, {"head.weight": "embed.weight"})
    assert (inventory.keys, inventory.elements, inventory.nbytes) == (2, 12, 36)
    assert Inventory(entries).elements == 20


def test_storage_follows_chains_and_ends_in_circles():
    inventory = Inventory({}, {"c": "b", "b": "a", "x": "y", "y": "x", "z": "x"})
    assert inventory.storage("c") == "a"
    assert inventory.storage("x") == inventory.storage("y") == inventory.storage("z") == "x"


def test_a_tie_to_a_name_that_is_not_there_is_still_one_storage():
    inventory = Inventory({"a": Entry((2,), "int8"), "b": Entry((2,), "int8")}, {"a": "gone", "b": "gone"})
    assert inventory.storages() == {"gone": Entry((2,), "int8")}
