"""
What of a planner or reader is torch's own: such code is known to do nothing to a plan but what it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ckpt_sentry.integrations.dcp.step import Step

_TORCHS: Final = "torch.distributed.checkpoint."
_OURS: Final = __name__.partition(".")[0] + "."
_STOCK: Final = frozenset(
    _TORCHS + name
    for name in ("default_planner", "planner", "filesystem", "_fsspec_filesystem", "hf_storage", "quantized_hf_storage")
)
"""Where torch has the planners and readers that load by name what the metadata says, and nothing else."""
_PLANNER: Final = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_bytes",
    "resolve_tensor",
    "lookup_tensor",
    "transform_tensor",
    "commit_tensor",
)
_READER: Final = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


def is_torchs(thing: Any, method: str) -> bool:
    """
    Whether a planner, reader or module has this function from torch, or does not have it.
    """
    module = _module_of(getattr(thing, method, None))
    return module is None or module.startswith((_TORCHS, _OURS))


def is_stock(planner: Any, reader: Any) -> bool:
    """
    Whether planner and reader are torch's usual ones in all that they do: then names, shapes and the plan tell what is
    loaded. A planner that is None is torch's default.
    """
    return (planner is None or _all_stock(planner, _PLANNER)) and _all_stock(reader, _READER)


def shows_plan(reader: Any) -> bool:
    """
    Whether this agent sees the plan that the reader reads: its `read_data` is one of those that are patched.
    """
    return (_module_of(getattr(reader, "read_data", None)) or "").startswith(_OURS)


def reader_of(path: str) -> Any:
    """
    The reader that `dcp.load` takes for a path or URL (torch 2.13.0, _storage_utils.py).
    """
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    return _storage_setup(None, path, reader=True)


def path_of(reader: Any) -> Any:
    """
    The path or URL that a reader reads, or that `StorageMeta` tells, as it has it; None where it has none.
    """
    path = getattr(reader, "checkpoint_id", None)
    return path if path is not None else getattr(reader, "path", None)


def changes_plans(step: Step) -> bool:
    """
    Whether what a rank has planned may be changed on the way to what it reads.
    """
    planner = step.planner
    is_planners = is_torchs(planner, "create_global_plan") and is_torchs(planner, "finish_plan")
    return not (is_planners and is_torchs(step.reader, "prepare_global_plan"))


def _all_stock(thing: Any, methods: tuple[str, ...]) -> bool:
    for method in methods:
        module = _module_of(getattr(thing, method, None))
        if not (module is None or module in _STOCK or module.startswith(_OURS)):
            return False
    return True


def _module_of(function: Any) -> str | None:
    """
    The module whose code this is; None for None. By its globals: `functools.wraps` gives a function another's name.
    """
    if function is None:
        return None
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__"))
