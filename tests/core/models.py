"""Small models and checkpoints, as names and shapes."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_sentry.core.inventory import Entry, Inventory

Entries = dict[str, Entry]


def tensor(*shape: int, dtype: str = "float32") -> Entry:
    return Entry(shape, dtype)


def tiny(layers: int = 2, width: int = 8, words: int = 16) -> Entries:
    """An embedding, some blocks with a norm, and a head: 2 + 8 * layers keys."""
    entries = {"embed.weight": tensor(words, width)}
    for layer in range(layers):
        for name, shape in (("attn", (width, width)), ("mlp", (2 * width, width)), ("out", (width, 2 * width))):
            entries[f"layers.{layer}.{name}.weight"] = tensor(*shape)
            entries[f"layers.{layer}.{name}.bias"] = tensor(shape[0])
        entries[f"layers.{layer}.norm.weight"] = tensor(width)
        entries[f"layers.{layer}.norm.bias"] = tensor(width)
    entries["head.weight"] = tensor(words, width)
    return entries


def renamed(entries: Entries, change: Callable[[str], str]) -> Entries:
    return {change(key): entry for key, entry in entries.items()}


def without(entries: Entries, part: str) -> Entries:
    return {key: entry for key, entry in entries.items() if part not in key}


def inventories(model: Entries, checkpoint: Entries) -> tuple[Inventory, Inventory]:
    return Inventory(model), Inventory(checkpoint)
