"""
A module that is given its own tensors: nothing comes from outside then, and the load is whole all the same.

That is right where they were filled in place before (`dcp.load(model.state_dict())`), and a mistake where a file was
read and filtered by names none of which fits. The file tells: it has the module's keys under other names, and the
module does not hold its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from ckpt_sentry import config
from ckpt_sentry.core.coverage import coverage
from ckpt_sentry.core.examine import Examination, examine
from ckpt_sentry.core.findings import keys as count_keys
from ckpt_sentry.core.findings import renaming, verb
from ckpt_sentry.core.inventory import Inventory
from ckpt_sentry.core.report import Facts, Finding
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.formats import state_file
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.integrations.torch_module import judge as module_judge
from ckpt_sentry.model import model_state, proof, provenance
from ckpt_sentry.model.proof import Claim, Holder

if TYPE_CHECKING:
    import torch

    from ckpt_sentry.formats.elements import Slot

_SURE: Final = frozenset({"prefix", "wrapper"})
_REMEDY: Final = (
    "Rename its keys before they are filtered: "
    f"model.load_state_dict({module_judge.RENAMED}), with what was read as state_dict."
)


class _Unused(NamedTuple):
    path: str
    held: Inventory
    found: Examination


def judged(facts: Facts, module: torch.nn.Module, own: int, keys: int) -> Facts:
    """
    The facts of a whole load of which `own` of the `keys` tensors were the module's own.
    """
    if own < keys:
        text = f"{own:,} of {count_keys(keys)} {verb(own, 'is', 'are')} the module's own tensors, loaded into itself."
        return facts.with_findings([Finding("own_tensors", "info", text)])
    text = f"All that was loaded are the module's own tensors ({count_keys(keys)}): nothing came from outside."
    unused = _unused(module)
    if unused is None:
        return facts.with_findings([Finding("own_tensors", "info", text)])
    found, wanted = unused.found, model_state.inventory(module)
    read = f"Nothing of {shown_path(unused.path)}, which was read before, is in the module"
    finding = Finding("own_tensors", "warning", f"{read}: all that was loaded are the module's own tensors.")
    renamed = tuple(one for one in renaming(found.findings, _REMEDY) if one.code == "renamed_keys")
    return replace(
        facts,
        path=unused.path,
        coverage=coverage(wanted, ()),
        utilisation=0.0,
        rename=found.rename,
        findings=(finding, *renamed, *facts.findings),
    )


def _unused(module: torch.nn.Module) -> _Unused | None:
    """
    The last file that was read and not loaded, if it has the module's keys under other names and none of its values is
    in the module.
    """
    if config.settings().verify == "off":
        return None
    wanted = model_state.inventory(module)
    for path in provenance.unclaimed():
        file = state_file.read(path)
        if not file.readable:
            continue
        held, slots = (file.inventory, file.slots) if file.nested is None else (file.nested, file.nested_slots)
        found = examine(wanted, held)
        inference = found.inference
        if inference is None or found.matched or inference.ambiguous or inference.kind not in _SURE:
            continue
        if _is_absent(module, inference.mapping, slots):
            return _Unused(path, held, found)
    return None


def _is_absent(module: torch.nn.Module, mapping: Mapping[str, str], slots: Mapping[str, Slot]) -> bool:
    """
    Whether values were compared and all of them differ.
    """
    claims = [Claim(target, (slots[key],)) for key, target in mapping.items() if key in slots]
    outcome = proof.prove(Holder(module), claims, "sample")
    return bool(outcome.checked) and len(outcome.differing) == len(outcome.checked)
