"""
Bring the keys of a state dict into line with a model: by the rule that is inferred, or by one that is given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.examine import Examination, examine
from ckpt_sentry.core.findings import keys as count_keys
from ckpt_sentry.core.findings import percent
from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.inventory import Entry, Inventory
from ckpt_sentry.core.report import Coverage
from ckpt_sentry.core.rule import Rule
from ckpt_sentry.dataclasses_ import dataclass, field

_NAME_ONLY = Entry(None, None)
_SHOWN_BYTES = 200


@dataclass(frozen=True, slots=True, eq=False)
class Unified(Mapping[str, Any]):
    """
    What `unify_keys` did. It is a mapping, the new state dict, and goes wherever a state dict is only read:
    `model.load_state_dict(unify_keys(state_dict, model))`. What writes into it, or saves it, takes `state_dict`.

    `state_dict` holds the same tensors under other keys; `rule` is what was done, in words (None: no key had to
    change), `count` the number of keys renamed, `coverage` what the new dict gives (None where no model was given).
    """

    state_dict: dict[str, Any] = field(repr=False)
    rule: str | None
    count: int
    coverage: Coverage | None

    def __getitem__(self, key: str) -> Any:
        return self.state_dict[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state_dict)

    def __len__(self) -> int:
        return len(self.state_dict)

    @property
    def _metadata(self) -> Any:
        """
        The versions of the modules, which `nn.Module.load_state_dict` looks for in what it is given (module.py:2586).
        """
        return getattr(self.state_dict, "_metadata", None)


def unify_keys(
    state_dict: Mapping[str, Any],
    model_or_keys: Any = None,
    *,
    strip_prefix: str | None = None,
    add_prefix: str | None = None,
) -> Unified:
    """
    Rename the keys of a state dict so that they are those of the model. The tensors are not copied.

    Without `strip_prefix` and `add_prefix` the rule is inferred from both key sets; shapes have to confirm it where
    both sides have any. Keys that need no change stay as they are, and so do those that no rule explains.

    Args:
        model_or_keys: the module, its state dict, or the names alone. Not needed where a prefix is given.
        strip_prefix: taken off each key that begins with it, such as "module.".
        add_prefix: put before each key, after that.

    Raises:
        ValueError: keys are missing and no rule explains it, several rules do as well, the state dict lies one level
            down, or two keys would become one.
    """
    if strip_prefix is not None or add_prefix is not None:
        mapping = _prefixed(state_dict, strip_prefix or "", add_prefix or "")
        words = Rule(remove=strip_prefix or "", add=add_prefix or "").words() or None
        result = _renamed(state_dict, mapping)
        if model_or_keys is None:
            return Unified(result, words, len(mapping), None)
        model = inventory_of(model_or_keys)
        return Unified(result, words, len(mapping), _compare(model, result).coverage)
    if model_or_keys is None:
        raise ValueError("unify_keys needs a model (or its keys) to infer a rule from, or a prefix")
    model = inventory_of(model_or_keys)
    found = _compare(model, state_dict)
    if not found.difference.missing or not found.difference.unexpected:
        return Unified(_renamed(state_dict, {}), None, 0, found.coverage)
    inference = found.inference
    if inference is None:
        raise ValueError(_unexplained(state_dict, found))
    if inference.ambiguous:
        raise ValueError(
            f"more than one rule fits: {inference.rename.rule} would map {count_keys(inference.rename.count)}, and so "
            "would another; give strip_prefix= or add_prefix=, or rename the keys yourself"
        )
    result = _renamed(state_dict, inference.mapping)
    coverage = _compare(model, result).coverage
    return Unified(result, inference.rename.rule, len(inference.mapping), coverage)


def align(state_dict: Mapping[str, Any], examination: Examination, minimum: float) -> Unified | None:
    """
    Apply the rule that an examination has found, for `CKPT_SENTRY_ALIGN=auto`; None where it is not beyond doubt.

    It has to be the only one, confirmed by all shapes, and to bring the coverage to `minimum`, in [0, 1].
    """
    inference = examination.inference
    if inference is None or inference.ambiguous or inference.rename.coverage < minimum:
        return None
    coverage = Coverage(inference.rename.coverage, inference.rename.coverage)
    return Unified(_renamed(state_dict, inference.mapping), inference.rename.rule, len(inference.mapping), coverage)


def needed(model: Any, wanted: Inventory, held: Inventory) -> Inventory:
    """
    What has to be there by the word of the module itself, where it is at hand (see `model_state.without_needless`).
    """
    if not callable(getattr(model, "named_modules", None)):
        return wanted
    from ckpt_sentry.model import model_state

    return model_state.without_needless(model, wanted, held.entries)


def inventory_of(model_or_keys: Any) -> Inventory:
    """
    The inventory of a module, of a mapping of names to tensors, or of names alone.

    Raises:
        TypeError: it is one text.
    """
    if isinstance(model_or_keys, Inventory):
        return model_or_keys
    if callable(getattr(model_or_keys, "named_modules", None)):
        from ckpt_sentry.model.inventories import model_inventory

        return model_inventory(model_or_keys)
    if isinstance(model_or_keys, Mapping):
        return Inventory({str(key): _entry(value) for key, value in model_or_keys.items()})
    if isinstance(model_or_keys, str):
        raise TypeError("one text is no set of keys: a module, a mapping or several names are wanted")
    return Inventory(dict.fromkeys(map(str, model_or_keys), _NAME_ONLY))


def comparable(model: Inventory, checkpoint: Inventory) -> tuple[Inventory, Inventory]:
    """
    Both sides; by names alone where one of them has nothing else, for no shape could confirm or contradict anything.
    """
    if _has_shapes(model) and _has_shapes(checkpoint):
        return model, checkpoint
    return Inventory(dict.fromkeys(model.entries, _NAME_ONLY), model.ties), Inventory(
        dict.fromkeys(checkpoint.entries, _NAME_ONLY)
    )


def _has_shapes(inventory: Inventory) -> bool:
    return not inventory.entries or any(entry.shape is not None for entry in inventory.entries.values())


def _compare(model: Inventory, state_dict: Mapping[str, Any]) -> Examination:
    return examine(*comparable(model, inventory_of(state_dict)))


def _entry(value: Any) -> Entry:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return _NAME_ONLY
    return Entry(tuple(shape), str(dtype).removeprefix("torch."))


def _prefixed(state_dict: Mapping[str, Any], strip: str, add: str) -> dict[str, str]:
    mapping = {key: add + key.removeprefix(strip) for key in state_dict}
    return {key: target for key, target in mapping.items() if key != target}


def _renamed(state_dict: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """
    The same values under other keys, in the same order, with the versions of the modules (`_metadata`) moved along.
    """
    result: OrderedDict[str, Any] = OrderedDict()
    for key, value in state_dict.items():
        target = mapping.get(key, key)
        if target in result:
            raise ValueError(f"two keys of the state dict would become {shown(target)}")
        result[target] = value
    metadata = getattr(state_dict, "_metadata", None)
    if isinstance(metadata, Mapping):
        paths = _moved_modules(mapping)
        moved = OrderedDict((paths.get(path, path), versions) for path, versions in metadata.items())
        result._metadata = moved  # type: ignore[attr-defined]
    return result


def _moved_modules(mapping: Mapping[str, str]) -> dict[str, str]:
    """
    Old to new paths of the modules that hold the renamed keys, and of those around them.
    """
    paths: dict[str, str] = {}
    for key, target in mapping.items():
        old, new = key.rpartition(".")[0], target.rpartition(".")[0]
        while old not in paths:
            paths[old] = new
            (old, _, last), (new, _, same) = old.rpartition("."), new.rpartition(".")
            if last != same:
                break
    return paths


def _unexplained(state_dict: Mapping[str, Any], found: Examination) -> str:
    under = [str(key) for key in found.difference.unexpected if isinstance(state_dict.get(key), Mapping)]
    if under:
        names = ", ".join(f"{name!r}" for name in map(shown, under[:3]))
        return f"the state dict lies one level down: pass what is under {names}"
    missing = ", ".join(key_list(found.difference.missing, _SHOWN_BYTES).keys)
    unexpected = ", ".join(key_list(found.difference.unexpected, _SHOWN_BYTES).keys)
    return (
        f"no rule leads from the state dict to the model ({percent(found.coverage.keys)} of its keys are there): "
        f"missing are {missing}; unexpected are {unexpected}"
    )
