"""
accelerate under FSDP: `load_fsdp_model` and `load_fsdp_optimizer` (accelerate/utils/fsdp_utils.py:194, 361).

Sharded checkpoints go through torch.distributed.checkpoint, which is observed there and adds its facts to this load. A
whole state dict is one file: it is judged by its header, on the ranks that read it. What is missing from it nobody else
says, since `set_model_state_dict` fills the gaps from the model (torch/distributed/checkpoint/state_dict.py:618).
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from ckpt_sentry import config
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.patching import ledger
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.patching.wrapping_importlib_bootstrap import judging
from ckpt_sentry.session import loads
from ckpt_sentry.session.conclude import end, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from ckpt_sentry.core.examine import examine
    from ckpt_sentry.errors import LowCoverageError
    from ckpt_sentry.formats import state_file
    from ckpt_sentry.formats.step import find_step
    from ckpt_sentry.integrations.accelerate import (
        facts as accelerate_facts,
    )
    from ckpt_sentry.integrations.dcp import errors as dcp_errors
    from ckpt_sentry.masking import mask
    from ckpt_sentry.model import model_state
    from ckpt_sentry.model.inventories import checkpoint_summary, model_summary
    from ckpt_sentry.session.loads import Load
else:
    examine = later("ckpt_sentry.core.examine:examine")
    state_file = later("ckpt_sentry.formats.state_file")
    accelerate_facts = later("ckpt_sentry.integrations.accelerate.facts")
    dcp_errors = later("ckpt_sentry.integrations.dcp.errors")
    model_state = later("ckpt_sentry.model.model_state")
    checkpoint_summary = later("ckpt_sentry.model.inventories:checkpoint_summary")
    model_summary = later("ckpt_sentry.model.inventories:model_summary")
    find_step = later("ckpt_sentry.formats.step:find_step")
    mask = later("ckpt_sentry.masking:mask")

TARGET = "accelerate"
_MODEL, _OPTIMIZER = "load_fsdp_model", "load_fsdp_optimizer"


@dataclass(slots=True)
class _Fsdp:
    """
    The arguments of a call by their names, and the refusal that is to come once all ranks are through.
    """

    arguments: Mapping[str, Any]
    refusal: LowCoverageError | None = None


def instrument(module: ModuleType) -> None:
    """
    Patch `accelerate.utils.fsdp_utils`.
    """
    ledger.patch(module, _MODEL, _LOADER, target=TARGET)
    ledger.patch(module, _OPTIMIZER, _LOADER, target=TARGET)


@contained("accelerate_fsdp.begin")
def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Load | None:
    if loads.current() is not None:
        return None
    arguments = accelerate_facts.arguments_of(original, args, kwargs)
    if arguments is None:
        return None
    path = os.fsdecode(arguments["input_dir"])

    def observe(load: Load) -> None:
        load.facts = load.facts.at_step(find_step(path))
        load.keep(_Fsdp(arguments))

    return loads.begin("accelerate", original.__name__, path, kind=original.__name__, observe=observe)


@contained("accelerate_fsdp.before")
def _before(load: Load) -> None:
    state = load.state(_Fsdp)
    if load.entry_point != _MODEL or state is None:
        return
    arguments = state.arguments
    path = _whole_file(arguments)
    if path is None:
        return
    found = state_file.read(path)
    load.facts = replace(load.facts, format=found.format, bytes_read=found.bytes).with_findings(found.findings)
    if not found.readable or model_state.is_sharded(arguments["model"]):
        return
    settings = config.settings()
    wanted = model_state.inventory(arguments["model"])
    wanted = model_state.without_needless(arguments["model"], wanted, found.inventory.entries)
    examination = examine(wanted, found.inventory, allow_missing=settings.allow_missing, minimum=settings.required)
    load.facts = replace(
        load.facts, model=model_summary(wanted), checkpoint=checkpoint_summary(found.inventory)
    ).examined(examination)
    # The others are on their way to a broadcast from this rank: they must not wait for ever.
    is_alone = load.identity.world_size == 1
    missing = examination.difference.missing
    state.refusal = refusal(load.entry_point, load.facts, wanted, missing, asked="whole", is_before=is_alone)
    if is_alone and state.refusal is not None:
        raise state.refusal


def _whole_file(arguments: Mapping[str, Any]) -> str | None:
    """
    The file with the whole state dict (fsdp_utils.py:243), where there is one and this rank reads it.
    """
    plugin, accelerator = arguments["fsdp_plugin"], arguments["accelerator"]
    if getattr(plugin.state_dict_type, "name", "") != "FULL_STATE_DICT" or arguments.get("adapter_only"):
        return None
    if accelerator.is_fsdp2 and not accelerator.is_main_process:
        return None
    index = arguments.get("model_index", 0)
    name = "pytorch_model_fsdp.bin" if index == 0 else f"pytorch_model_fsdp_{index}.bin"
    path = os.path.join(os.fsdecode(arguments["input_dir"]), name)
    return path if os.path.isfile(path) else None


@contained("accelerate_fsdp.after")
def _after(load: Load, _result: Any) -> None:
    state = load.state(_Fsdp)
    if state is not None and state.refusal is not None:
        raise state.refusal


@contained("accelerate_fsdp.end")
def _end(load: Load, error: BaseException | None) -> None:
    end(load, error, functools.partial(dcp_errors.explain, load))


_LOADER = judging(_begin, _before, _after, _end)
