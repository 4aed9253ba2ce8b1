"""
Plans that change after a rank has made its own: by `create_global_plan` or `finish_plan` of a planner, or by
`prepare_global_plan` of a reader.

torch hands what the first and last have made of it to the step that reads, as `central_plan`, and reads what
`finish_plan` returns (torch 2.13.0, state_dict_loader.py, `read_data`). Torch's own planners and readers change
nothing there: of them the plan is not looked at again.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from ckpt_sentry.guard import contained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def replanned(cells: Mapping[str, Any]) -> Any:
    """
    The plan that this rank got back, where a planner or reader that is not torch's may have changed it; else None.

    Args:
        cells: the variables of the step that reads.
    """
    planner, reader = cells.get("planner"), cells.get("storage_reader")
    if is_torchs(planner, "create_global_plan") and is_torchs(reader, "prepare_global_plan"):
        return None
    return cells.get("central_plan")


class _Finish:
    """
    The `finish_plan` of one planner, which shows what it returns to whoever watches in that thread.
    """

    def __init__(self, planner: Any) -> None:
        functools.update_wrapper(self, planner.finish_plan)
        self.original = planner.finish_plan
        self.given = {name: own for name, own in vars(planner).items() if name == "finish_plan"}
        """What to leave behind in the planner's `__dict__`, in place of this."""
        self.watchers: dict[int, Callable[[Any], None]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.original(*args, **kwargs)
        if (saw := self.watchers.get(threading.get_ident())) is not None:
            saw(plan)
        return plan


def watch_finish(planner: Any, saw: Callable[[Any], None]) -> Callable[[], None] | None:
    """
    Show `saw` the plan that a `finish_plan` which is not torch's returns in this thread.

    Returns what ends the watching and leaves the planner as it was; None where there is nothing to watch.
    """
    own = getattr(planner, "__dict__", None)
    if own is None or is_torchs(planner, "finish_plan"):
        return None
    thread, known = threading.get_ident(), own.get("finish_plan")
    watched = known if isinstance(known, _Finish) else _Finish(planner)

    @contained("dcp.finish_plan")
    def leave() -> None:
        watched.watchers.pop(thread, None)
        if not watched.watchers and own.get("finish_plan") is watched:
            del own["finish_plan"]
            own.update(watched.given)

    watched.watchers[thread] = saw
    own["finish_plan"] = watched
    return leave


def is_torchs(thing: Any, method: str) -> bool:
    """
    Whether a planner or reader has this method from torch, or does not have it.
    """
    own = getattr(thing, method, None)
    return own is None or str(getattr(own, "__module__", "")).startswith("torch.distributed.checkpoint.")
