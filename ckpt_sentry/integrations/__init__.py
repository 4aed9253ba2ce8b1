"""
What is watched: one folder for each framework, and the registry of their seams.

An integration observes and hands facts on; it decides nothing. This module is imported when the interpreter starts: it
holds text alone.
"""

from __future__ import annotations

SEAMS: tuple[tuple[str, str], ...] = (
    ("torch.distributed.checkpoint.utils", "ckpt_sentry.integrations.dcp.seams:instrument_utils"),
    ("torch.distributed.checkpoint.utils", "ckpt_sentry.integrations.dcp.local:instrument"),
    ("torch.distributed.checkpoint.default_planner", "ckpt_sentry.integrations.dcp.planning:instrument"),
    ("torch.distributed.checkpoint.filesystem", "ckpt_sentry.integrations.dcp.seams:instrument_filesystem"),
    ("torch.distributed.checkpoint.hf_storage", "ckpt_sentry.integrations.dcp.seams:instrument_hf_storage"),
    ("torch.distributed.checkpoint.state_dict_loader", "ckpt_sentry.integrations.dcp.seams:instrument_loader"),
    ("torch.distributed.checkpoint.format_utils", "ckpt_sentry.integrations.dcp.seams:instrument_format_utils"),
    ("torch.serialization", "ckpt_sentry.integrations.torch_module.torch_load:instrument_torch"),
    ("safetensors.torch", "ckpt_sentry.integrations.torch_module.torch_load:instrument_safetensors"),
    ("safetensors.torch", "ckpt_sentry.integrations.torch_module.seams:instrument_safetensors"),
    ("torch", "ckpt_sentry.integrations.torch_module.seams:prepare"),
    ("torch.nn.modules.module", "ckpt_sentry.integrations.torch_module.seams:instrument"),
    ("torch.distributed.checkpoint.state_dict", "ckpt_sentry.integrations.torch_module.seams:instrument_state_dict"),
    ("accelerate.utils.modeling", "ckpt_sentry.integrations.accelerate.seams:instrument_modeling"),
    ("accelerate.big_modeling", "ckpt_sentry.integrations.accelerate.seams:instrument_big_modeling"),
    ("accelerate.utils.fsdp_utils", "ckpt_sentry.integrations.accelerate.fsdp:instrument"),
    ("accelerate.checkpointing", "ckpt_sentry.integrations.accelerate.state:instrument"),
    ("accelerate.accelerator", "ckpt_sentry.integrations.accelerate.state:instrument_accelerator"),
    ("transformers.modeling_utils", "ckpt_sentry.integrations.transformers.seams:instrument"),
    ("transformers.modeling_utils", "ckpt_sentry.integrations.transformers.shards:instrument"),
    ("transformers.trainer_utils", "ckpt_sentry.integrations.transformers.shards:instrument"),
    ("torch.distributed.launcher.api", "ckpt_sentry.integrations.launchers.torchrun:instrument"),
    (
        "torch.distributed.elastic.multiprocessing.api",
        "ckpt_sentry.integrations.launchers.torchrun:instrument_processes",
    ),
    ("torch.distributed.distributed_c10d", "ckpt_sentry.integrations.launchers.ranks:instrument_group"),
    ("torch.multiprocessing.spawn", "ckpt_sentry.integrations.launchers.ranks:instrument_spawn"),
)
"""(host module to wait for, "module:function" of this package that is then called with the host module)."""
