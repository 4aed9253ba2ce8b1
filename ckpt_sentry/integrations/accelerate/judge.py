"""
What to make of a load by accelerate: refuse it, let it raise by itself before anything is written, or prove it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from ckpt_sentry import config
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.report import Finding, Proof
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.integrations.accelerate import device_map
from ckpt_sentry.integrations.accelerate import facts as accelerate_facts
from ckpt_sentry.integrations.accelerate import proof as accelerate_proof
from ckpt_sentry.integrations.accelerate.facts import Call
from ckpt_sentry.patching.later import later
from ckpt_sentry.session.conclude import disproof, raised, refusal

if TYPE_CHECKING:
    from ckpt_sentry.core.findings import counted
    from ckpt_sentry.core.findings import keys as count_keys
    from ckpt_sentry.core.fold import key_list
    from ckpt_sentry.core.report import LoadError
    from ckpt_sentry.errors import LowCoverageError
    from ckpt_sentry.render import refusals
    from ckpt_sentry.session.loads import Load
else:
    counted = later("ckpt_sentry.core.findings:counted")
    count_keys = later("ckpt_sentry.core.findings:keys")
    key_list = later("ckpt_sentry.core.fold:key_list")
    refusals = later("ckpt_sentry.render.refusals")

_SHOWN: Final = 3
_ABOUT_META: Final = ("meta tensor", "meta device", "Default process group has not been initialized")


def before(load: Load) -> Callable[[], Any] | None:
    """
    Judge a load before it begins. Returns the check of accelerate's own that ends it now rather than half-way, if any.

    :raises LowCoverageError: too little of the model would be loaded.
    """
    call = load.state(Call)
    if call is None:
        return None
    accelerate_facts.look(load, call)
    if call.choice is None or not call.choice.loadable or call.examination is None:
        return None
    if (early := _early(call)) is not None:
        return early
    if call.map_facts is not None and call.map_facts.bad.get(None):
        return None
    _align(load, call)
    if accelerate_facts.may_rename(call):
        accelerate_facts.remember(call)
        return None
    missing = call.examination.difference.missing
    refused = refusal(call.entry_point, load.facts, call.wanted, missing, asked="whole", is_before=True)
    if refused is not None:
        raise refused
    return None


def _early(call: Call) -> Callable[[], Any] | None:
    """
    Accelerate's check of a map that gives no device to keys of the model, where the load is certain to end on it, with
    a part of the model written: what is under the minimum is refused (docs/policy.md), in accelerate's own words.
    """
    facts, settings = call.map_facts, config.settings()
    if facts is None or not facts.uncovered or facts.bad or settings.mode == "observe" or not _will_raise(call):
        return None
    if device_map.DISK in call.device_map.values() and call.arguments.get("offload_folder") is None:
        return None  # it raises for that, before it reads anything
    return functools.partial(_of("accelerate.big_modeling", "check_device_map"), call.model, call.device_map)


def _will_raise(call: Call) -> bool:
    """
    Whether a key without a device ends the load: in `dispatch_model` any of the model's, else one that is loaded.
    """
    if call.dispatches:
        return True
    keys = call.offered.entries
    loaded = keys if call.arguments.get("strict") else [key for key in keys if key in call.wanted.entries]
    return bool(device_map.uncovered(call.device_map, loaded))


def _of(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(sys.modules[module], name)
    return function


def _align(load: Load, call: Call) -> None:
    """
    Apply the rename rule where the settings ask for it, the rule is certain, and it brings the coverage that is wanted.
    """
    examination = call.examination
    settings = config.settings()
    if examination is None or examination.inference is None or settings.align != "auto" or settings.mode == "observe":
        return
    inference, minimum = examination.inference, settings.min_coverage
    if inference.ambiguous or inference.rename.coverage < minimum or load.facts.coverage is None:
        return
    if load.facts.coverage.judged >= minimum:
        return
    call.aligned = examination
    accelerate_facts.add_supplied(call, {name: key for key, name in inference.mapping.items()})
    accelerate_facts.compare(load, call)
    rename = inference.rename
    text = f"{count_keys(rename.count)} {'was' if rename.count == 1 else 'were'} aligned: {rename.rule}."
    load.facts = replace(load.facts, rename=rename).with_findings([Finding("renamed_keys", "info", text)])


def after(load: Load) -> None:
    """
    Judge a load that has returned.

    :raises LowCoverageError: the values are not the checkpoint's, or, judged only now, too few of them came in.
    """
    call = load.state(Call)
    if call is None:
        return
    load.enter("verify")
    found = accelerate_proof.prove(load, call) if config.settings().verify != "off" else None
    load.facts = load.facts.with_findings(_placement(call))
    differing = 0 if found is None else found.differing.count
    if config.settings().mode == "strict":
        differing += any(one.code == "quantized_state_dropped" for one in load.facts.findings)
    error = disproof(call.entry_point, load.facts, differing)
    if error is None and call.is_deferred:
        missing = () if call.examination is None else call.examination.difference.missing
        error = refusal(call.entry_point, load.facts, call.wanted, missing, asked="whole")
    if error is not None:
        raise error


def explain(load: Load, _error: BaseException, described: LoadError) -> Iterable[Finding]:
    """
    Say why a loader raised, where what is known already does not say it, and what it had written by then.
    """
    call = load.state(Call)
    if call is None:
        return
    if call.choice is None:
        accelerate_facts.look(load, call)
    # torch names neither the tensor, nor that a model without values is why it looks for a process group.
    if any(word in described.message for word in _ABOUT_META) and (left := _left_on_meta(call)) is not None:
        yield left
    elif not any(finding.level == "error" for finding in load.facts.findings):
        yield raised(described)
    yield from _overwritten(load, call)


def _overwritten(load: Load, call: Call) -> Iterable[Finding]:
    """
    Say which files were loaded whole when a load failed.
    """
    done = [os.path.basename(path) for path in (call.opened if load.phase == "dispatch" else call.opened[:-1])]
    if done:
        names = ", ".join(map(shown, done[:_SHOWN])) + (", …" if len(done) > _SHOWN else "")
        text = f"{counted(len(done), 'file')} had been loaded before it failed: {names}. "
        text += "The model holds their values beside its old ones."
        step = "Load again from a whole checkpoint, or build the model anew."
        yield Finding("partly_overwritten", "warning", text, step)


def _placement(call: Call) -> Iterable[Finding]:
    """
    Where the parts of the model are after a load that returned.
    """
    resolved = getattr(call.model, "hf_device_map", None) if call.dispatches else call.device_map
    if call.device_map is None or not isinstance(resolved, Mapping):
        return
    if (placed := device_map.placed(call.device_map, resolved)) is not None:
        yield placed
    if (left := _left_on_meta(call)) is not None:
        yield left
    devices = {name: value.device.type for name, value in call.model.named_parameters()}
    if (elsewhere := device_map.elsewhere(resolved, devices, _is_same)) is not None:
        yield elsewhere


def _is_same(kind: str, asked: Any) -> bool:
    # What is offloaded (to disk, or to the CPU beside a GPU) is on the meta device between two forward passes.
    if asked is None or kind == "meta":
        return True
    if isinstance(asked, int):
        return kind != "cpu"
    return asked != device_map.DISK and bool(torch.device(asked).type == kind)


def _left_on_meta(call: Call) -> Finding | None:
    """
    Say which tensors have no values anywhere, neither in the model nor where they are offloaded to.
    """
    names = accelerate_proof.without_values(call)
    if not names:
        return None
    folded = key_list(names)
    keys = ", ".join(folded.keys[:_SHOWN]) + (", …" if len(folded.keys) > _SHOWN else "")
    step: str | None = (
        "The checkpoint has to hold them, or give a value to each: "
        "accelerate.utils.set_module_tensor_to_device(model, name, device, value=…)."
    )
    if call.examination is not None and call.examination.rename is not None:
        step = None  # it does hold them, under other names
    if call.device_map is None:
        step = "Pass device_map={'': 'cpu'}, or 'auto': without a map nothing leaves the meta device."
    what = refusals.tensors(folded.count, "is", "are")
    text = f"{what} left on the meta device, without values: {keys}."
    return Finding("meta_left", "error" if call.device_map is None else "warning", text, step)


def stale_dispatch(load: Load, stale: list[str], checked: int, folder: str) -> LowCoverageError | None:
    """
    Put into the load's facts that a dispatched model takes other values from its folder; the error, if it is to raise.
    """
    folded = key_list(stale)
    keys = ", ".join(folded.keys[:_SHOWN]) + (", …" if len(folded.keys) > _SHOWN else "")
    what = refusals.tensors(folded.count, "now comes", "now come")
    text = f"{what} from {shown_path(folder)} with values of another load: {keys}."
    step = "Pass an empty offload_dir: dispatch_model writes nothing where an index.json is there already."
    finding = Finding("stale_offload_folder", "error", text, step)
    load.facts = replace(load.facts, proof=Proof(checked, folded)).with_findings([finding])
    return disproof("dispatch_model", load.facts, folded.count)
