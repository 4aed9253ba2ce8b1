"""
Why a loader of accelerate leaves keys of a checkpoint out that belong to the model all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.report import Finding
from ckpt_sentry.model import inventories, model_state
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.core.examine import Examination
    from ckpt_sentry.integrations.accelerate.facts import Call
    from ckpt_sentry.integrations.transformers import hints as transformers_hints
else:
    transformers_hints = later("ckpt_sentry.integrations.transformers.hints")

HOOKS: Final = "load_hooks_skipped"
_SHOWN: Final = 3


def causes(call: Call, found: Examination) -> Iterator[Finding]:
    """
    Say which parts of the model would rename keys, but are not asked.
    """
    if found.inference is None and not transformers_hints.CODES & {one.code for one in found.findings}:
        yield from _skipped_hooks(call, found)


def tying(call: Call) -> str:
    """
    How a model whose configuration ties weights is loaded. With a map, a tie of tensors that have values is lost on the
    way (modeling.py:622); without one, nothing leaves the meta device.
    """
    is_meta, step = inventories.is_partly_meta(call.model), "Call model.tie_weights() before the load"
    if call.device_map is None and is_meta:
        return f"{step}, and pass device_map={{'': 'cpu'}}."
    if call.device_map is not None and not is_meta:
        return f"{step}, and pass device_map=None."
    return f"{step}."


def _skipped_hooks(call: Call, found: Examination) -> Iterator[Finding]:
    """
    Load pre-hooks, and `_load_from_state_dict` of a class, rename keys in `nn.Module.load_state_dict` alone: with a map
    the loader sets each tensor by itself (accelerate/utils/modeling.py:1991).
    """
    if call.device_map is None or not found.difference.missing or not found.difference.unexpected:
        return
    missing, unexpected = found.difference.missing, found.difference.unexpected
    names = [
        path
        for path, module in inventories.parts_of(call.model)
        if model_state.has_own_names(module)
        and all(any(key.startswith(f"{path}.") or not path for key in keys) for keys in (missing, unexpected))
    ]
    if not names:
        return
    listed = ", ".join(shown(name) or "the model itself" for name in names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    )
    text = f"Load pre-hooks that may rename these keys ({listed}) are not called by accelerate with a device_map."
    step = "Pass device_map=None: then they are called."
    yield Finding(HOOKS, "warning", text, None if inventories.is_partly_meta(call.model) else step)
