"""
Plans that change after a rank has made its own: by `create_global_plan` or `finish_plan` of a planner, or by
`prepare_global_plan` of a reader.

torch hands what the first and last have made of it to the step that reads, as `central_plan`, and reads what
`finish_plan` returns (torch 2.13.0, state_dict_loader.py, `read_data`). Torch's own planners and readers change
nothing there: of them the plan is not looked at again.
"""

from __future__ import annotations

import functools
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


def watch_finish(planner: Any, saw: Callable[[Any], None]) -> Callable[[], None] | None:
    """
    Show `saw` the plan that a `finish_plan` returns that is not torch's.

    Returns what ends the watching and leaves the planner as it was; None where there is nothing to watch.
    """
    if is_torchs(planner, "finish_plan"):
        return None
    own = getattr(planner, "__dict__", None)
    if own is None:
        return None
    given = {name: own[name] for name in ("finish_plan",) if name in own}
    original = planner.finish_plan

    @functools.wraps(original)
    def finish_plan(*args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        saw(plan)
        return plan

    @contained("dcp.finish_plan")
    def leave() -> None:
        if own.get("finish_plan") is finish_plan:
            del own["finish_plan"]
            own.update(given)

    own["finish_plan"] = finish_plan
    return leave


def is_torchs(thing: Any, method: str) -> bool:
    """
    Whether a planner or reader has this method from torch, or does not have it.
    """
    own = getattr(thing, method, None)
    return own is None or getattr(own, "__module__", "").startswith("torch.distributed.checkpoint.")
