"""
What the exception of a failed load tells of files: errors in its chain, the reader, and the file that was in hand.

Read from the traceback's frames at once; no frame is kept. The names are those of torch 2.13,
`torch/distributed/checkpoint/filesystem.py` (`read_data`) and `state_dict_loader.py` (`local_step`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import FrameType, TracebackType

_MAX_CHAIN = 20
_PLANNING = frozenset({"create_local_plan", "set_up_planner", "create_default_local_load_plan"})
_TORCH_LOAD = os.path.join("torch", "serialization.py")


def all_errors(error: BaseException | None) -> Iterator[BaseException]:
    """
    The error, its causes and what it was raised in, outermost first.
    """
    for _ in range(_MAX_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def planning(error: BaseException | None) -> bool:
    """
    Whether the planner raised: the metadata had been read by then, and no shard had been opened.
    """
    return any(frame.f_code.co_name in _PLANNING for frame in _frames(error))


def not_unpickled(error: BaseException | None) -> Exception | None:
    """
    What kept torch from making objects of the metadata: a module or class that is not here. Torch raises another error
    for it from 2.10 on, and keeps this one in a variable (`global_metadata_exc` in `local_step`).
    """
    kept = [frame.f_locals.get("global_metadata_exc") for frame in _frames(error)]
    for one in (*kept, *all_errors(error)):
        if isinstance(one, ImportError) or (isinstance(one, AttributeError) and "get attribute" in str(one)):
            return one
    return None


def chosen_reader(error: BaseException | None) -> str | None:
    """
    The name of the class of the storage reader, as the load's frames have it.
    """
    for frame in _frames(error):
        reader = frame.f_locals.get("storage_reader")
        if reader is not None:
            return type(reader).__name__
    return None


def suspects(error: BaseException | None) -> tuple[str, ...]:
    """
    The names (without folder) of the files that were being read.
    """
    found = [frame.f_locals.get("new_path") for frame in _frames(error) if frame.f_code.co_name == "read_data"]
    found += [one.filename for one in all_errors(error) if isinstance(one, OSError)]
    names = [os.path.basename(os.fsdecode(path)) for path in found if isinstance(path, str | bytes | os.PathLike)]
    return tuple(dict.fromkeys(filter(None, names)))


def unreadable(error: BaseException | None) -> bool:
    """
    Whether `torch.load` raised for what the reader gave it of a file.
    """
    codes = [frame.f_code for frame in _frames(error)]
    is_read = any(code.co_name == "read_data" for code in codes)
    return is_read and any(code.co_name == "load" and code.co_filename.endswith(_TORCH_LOAD) for code in codes)


def asked_for(error: BaseException | None) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    """
    The parts that this rank was to read, by key and place in the tensor: the one in hand first.
    """
    for frame in _frames(error):
        if frame.f_code.co_name == "read_data":
            items = getattr(frame.f_locals.get("plan"), "items", None)
            found = [frame.f_locals.get("req"), *(items if isinstance(items, list) else ())]
            return tuple(dict.fromkeys(filter(None, map(_part, found))))
    return ()


def _part(item: object) -> tuple[str, tuple[int, ...] | None] | None:
    index = getattr(item, "storage_index", None)
    key, offset = getattr(index, "fqn", None), getattr(index, "offset", None)
    if not isinstance(key, str):
        return None
    return key, tuple(offset) if isinstance(offset, list | tuple) else None


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    traceback: TracebackType | None = None if error is None else error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
