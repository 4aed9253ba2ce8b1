"""
What is watched: the registry of the integrations, by the modules of the host that they wait for.

An integration observes and hands facts on; it decides nothing. One that is a folder has its seams here; one that is a
single file is found by its name, that of the package it waits for (see `base`). This module is imported when the
interpreter starts: it holds text, and reads one folder.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

SEAMS: tuple[tuple[str, str], ...] = (
    ("torch.distributed.checkpoint.utils", "ckpt_sentry.integrations.dcp.seams:instrument_utils"),
    ("torch.distributed.checkpoint.default_planner", "ckpt_sentry.integrations.dcp.planning:instrument"),
    ("torch.distributed.checkpoint.filesystem", "ckpt_sentry.integrations.dcp.seams:instrument_filesystem"),
    ("torch.distributed.checkpoint.hf_storage", "ckpt_sentry.integrations.dcp.seams:instrument_hf_storage"),
    ("torch.distributed.checkpoint.state_dict_loader", "ckpt_sentry.integrations.dcp.seams:instrument_loader"),
    ("torch.distributed.checkpoint.format_utils", "ckpt_sentry.integrations.dcp.seams:instrument_format_utils"),
    ("torch.serialization", "ckpt_sentry.integrations.torch_module.torch_load:instrument_torch"),
    ("safetensors.torch", "ckpt_sentry.integrations.torch_module.torch_load:instrument_safetensors"),
    ("safetensors.torch", "ckpt_sentry.integrations.torch_module.seams:instrument_safetensors"),
    ("torch", "ckpt_sentry.integrations.torch_module.seams:prepare"),
    ("torch", "ckpt_sentry.integrations:add_third_parties"),
    ("torch.nn.modules.module", "ckpt_sentry.integrations.torch_module.seams:instrument"),
    ("torch.distributed.checkpoint.state_dict", "ckpt_sentry.integrations.torch_module.seams:instrument_state_dict"),
    ("accelerate.utils.modeling", "ckpt_sentry.integrations.accelerate.seams:instrument_modeling"),
    ("accelerate.big_modeling", "ckpt_sentry.integrations.accelerate.seams:instrument_big_modeling"),
    ("accelerate.utils.fsdp_utils", "ckpt_sentry.integrations.accelerate.fsdp:instrument"),
    ("accelerate.checkpointing", "ckpt_sentry.integrations.accelerate.state:instrument"),
    ("accelerate.accelerator", "ckpt_sentry.integrations.accelerate.state:instrument_accelerator"),
    ("transformers.modeling_utils", "ckpt_sentry.integrations.transformers.seams:instrument"),
    ("transformers.modeling_utils", "ckpt_sentry.integrations.transformers.seams:instrument_shards"),
    ("transformers.trainer_utils", "ckpt_sentry.integrations.transformers.seams:instrument_shards"),
    ("torch.distributed.launcher.api", "ckpt_sentry.integrations.launchers.torchrun:instrument"),
    (
        "torch.distributed.elastic.multiprocessing.api",
        "ckpt_sentry.integrations.launchers.torchrun:instrument_processes",
    ),
    ("torch.distributed.distributed_c10d", "ckpt_sentry.integrations.launchers.ranks:instrument_group"),
    ("torch.multiprocessing.spawn", "ckpt_sentry.integrations.launchers.ranks:instrument_spawn"),
)
"""(host module to wait for, "module:function" of this package that is then called with the host module)."""

GROUP = "ckpt_sentry.integrations"
"""The group of the entry points by which other distributions add integrations."""

_SHARED = frozenset({"__init__", "base", "trials"})
"""The files here that are no integrations."""


def seams() -> tuple[tuple[str, str], ...]:
    """
    All seams: those of the folders, and one for each single file.
    """
    return (*SEAMS, *((name, f"{__name__}.{name}:INTEGRATION.instrument") for name in single_files()))


def single_files() -> list[str]:
    """
    The names of the integrations that are a single file; sorted. None where the package lies in an archive.
    """
    try:
        files = os.listdir(os.path.dirname(__file__))
    except OSError:
        return []
    names = {file[:-3] for file in files if file.endswith(".py")}
    return sorted(names - _SHARED)


def add_third_parties(_torch: ModuleType) -> None:
    """
    Await the packages for which other distributions have integrations. Called once torch has been imported, which has
    just read entry points itself (torch/__init__.py, `_import_device_backends`).
    """
    from importlib.metadata import entry_points

    from ckpt_sentry.patching import ledger

    for point in sorted(entry_points(group=GROUP)):
        ledger.wait_for(point.name, f"{point.value}.instrument")
