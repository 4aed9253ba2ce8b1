"""
Which ranks make a DCP load together.

The n-th load of one rank is the n-th of another where both make it, and there alone: a load with `no_dist=True` or on a
group of some ranks is counted apart, or one of them more on one rank would pair every later load with another's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt_sentry import identity
from ckpt_sentry.audit.ranks import compact
from ckpt_sentry.targets import dcp_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

_GROUP, _NO_DIST = 2, 4
"""Places of these arguments in `load_state_dict` and `_load_state_dict`; the others take them by name alone."""


def kind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """
    What tells this load from those of all ranks: "" for one of these, as `loads.begin` takes it.

    Loads that ranks make each for itself are one where they read from the same folder: so that a rank that picked
    another step there is seen.
    """
    if identity.identity().world_size == 1:
        return ""
    if not dist.is_available() or not dist.is_initialized() or _argument(args, kwargs, "no_dist", _NO_DIST):
        path = dcp_facts.raw_path(args, kwargs)
        return "alone" if path is None else f"alone in {os.path.dirname(path.rstrip('/'))}"
    group = _argument(args, kwargs, "process_group", _GROUP)
    if group is None:
        return ""
    ranks = dist.get_process_group_ranks(group)
    return "" if len(ranks) == dist.get_world_size() else f"ranks {compact(ranks)}"


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, place: int) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
