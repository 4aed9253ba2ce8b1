"""
One call of a function that fills a module: what was given, and what torch said.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ckpt_sentry.dataclasses_ import dataclass, field
from ckpt_sentry.model import model_state
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token

    from torch import nn

    from ckpt_sentry.core.report import Finding
    from ckpt_sentry.integrations.torch_module import judge as module_judge
    from ckpt_sentry.integrations.torch_module.entry_points import EntryPoint
    from ckpt_sentry.integrations.torch_module.judge import Lists, Offer
else:
    module_judge = later("ckpt_sentry.integrations.torch_module.judge")


@dataclass(slots=True)
class Call:
    """
    One call, and how it ended: torch's lists. Never the exception, whose traceback leads back here.
    """

    entry: EntryPoint
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module
    state_dict: Any
    is_strict: bool
    is_assigning: bool
    token: Token[bool]
    observer: Callable[[Call], object] | None
    offer: Offer | None = None
    """What the dict held before the call, where it is known to change the dict."""
    broadcasts: bool = False
    """Whether the first rank alone has the dict, and judges."""
    is_listening: bool = False
    """Whether this is one of the others."""
    own: int = 0
    """How many tensors of the dict are the module's own."""
    began: float = field(default_factory=time.perf_counter)
    lists: Lists | None = None
    aligned: Finding | None = None
    """What `CKPT_SENTRY_ALIGN=auto` has done to the keys."""

    @property
    def module_class(self) -> str:
        kind = type(self.module)
        return f"{kind.__module__}.{kind.__qualname__}"

    @property
    def meta_words(self) -> module_judge.MetaWords:
        """
        How it is said that tensors have no values after this call.
        """
        return module_judge.ASSIGNED if self.is_assigning else module_judge.COPIED

    def remedy(self, *, loosely: bool = False) -> str:
        """
        The call by which keys under other names are loaded: as strictly as this one, or `loosely` where keys are left.
        """
        given, is_loose = self._options is not None, loosely or not self.is_strict
        if not self.entry.fills_gaps:
            return self.entry.remedy.format(model="model", more=", strict=False" if is_loose else "")
        more = ", options=options" if given else ""
        if loosely and self.is_strict:
            more = f", options={'dataclasses.replace(options, ' if given else 'StateDictOptions('}strict=False)"
        # It takes names without those of wrappers.
        child = model_state.wrapped_child(self.module)
        return self.entry.remedy.format(model=f"model.{child}" if child else "model", more=more)

    @property
    def _options(self) -> Any:
        return self.kwargs.get("options")
