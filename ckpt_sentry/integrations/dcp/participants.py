"""
Which ranks make a DCP load together.

The n-th load of one rank is the n-th of another where both make it, and there alone: a load with `no_dist=True` or on a
group of some ranks is counted apart, or one of them more on one rank would pair every later load with another's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch.distributed as dist

from ckpt_sentry import identity
from ckpt_sentry.core.ranks import compact
from ckpt_sentry.integrations.dcp import facts as dcp_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

_GROUP, _NO_DIST = 2, 4
"""Places of these arguments in `load_state_dict` and `_load_state_dict`; the others take them by name alone."""


class Together(NamedTuple):
    """
    What tells a load from those of all ranks, and the ranks that make it, as `loads.begin` takes both.
    """

    kind: str = ""
    members: str | None = None


ALL: Final = Together()


def together(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Together:
    """
    Who makes the load that has these arguments.

    Loads that ranks make each for itself are one where they read the same path, and have nothing to do with each other
    where they do not.
    """
    who = identity.identity()
    if who.world_size == 1:
        return ALL
    if not dist.is_available() or not dist.is_initialized() or _argument(args, kwargs, "no_dist", _NO_DIST):
        return Together(f"alone {dcp_facts.path_of(args, kwargs) or ''}", str(who.rank))
    group = _argument(args, kwargs, "process_group", _GROUP)
    if group is None:
        return ALL
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return ALL
    return Together(f"group {getattr(group, 'group_name', '')} {compact(ranks)}", compact(ranks))


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, place: int) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
