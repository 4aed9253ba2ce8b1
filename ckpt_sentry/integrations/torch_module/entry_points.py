"""
The functions that fill a module: their names and parameters, and the calls by which they take other keys.

Imported while torch is but half there: it holds text alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class EntryPoint(NamedTuple):
    """
    A function that fills a module: its name for people, and the names of its parameters in their order.
    """

    name: str
    parameters: tuple[str, ...]
    fills_gaps: bool
    """Whether it takes the module's own values for what the dict lacks, so that torch's lists do not tell."""
    remedy: str
    """The call by which renamed keys are loaded, into `{model}`; `{more}` are its further arguments."""
    loosely: str = "load_state_dict(…, strict=False)"
    """The call that takes a part."""


MODULE: Final = EntryPoint(
    "Module.load_state_dict",
    ("self", "state_dict", "strict", "assign"),
    fills_gaps=False,
    remedy="{model}.load_state_dict(ckpt_sentry.unify_keys(state_dict, {model}){more})",
)
FILE: Final = EntryPoint(
    "safetensors.torch.load_model",
    ("model", "filename", "strict"),
    fills_gaps=False,
    remedy="{model}.load_state_dict(ckpt_sentry.unify_keys(safetensors.torch.load_file(filename), {model}){more})",
    loosely="load_model(…, strict=False)",
)
MODEL: Final = EntryPoint(
    "set_model_state_dict",
    ("model", "model_state_dict"),
    fills_gaps=True,
    remedy="set_model_state_dict({model}, ckpt_sentry.unify_keys(model_state_dict, {model}).state_dict{more})",
    loosely="set_model_state_dict(…, options=StateDictOptions(strict=False))",
)
