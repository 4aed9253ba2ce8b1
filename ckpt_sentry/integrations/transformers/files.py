"""
What lies beside the files that `from_pretrained` has chosen, and what their index says of them.

In a folder it takes the first of `model.safetensors`, its index, `pytorch_model.bin` and its index that is there, each
with the variant in its name (transformers 5.24.0, `_get_resolved_checkpoint_files`). Of an index it takes the names of
the shards, and never compares its keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ckpt_sentry.formats import folder
from ckpt_sentry.formats import index as index_
from ckpt_sentry.formats.errors import HeaderError
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from ckpt_sentry.core.report import Finding
    from ckpt_sentry.formats.index import Index
    from ckpt_sentry.formats.state_file import StateFile

_ORDER: Final = (folder.SAFETENSORS, f"{folder.SAFETENSORS}.index.json", folder.BIN, f"{folder.BIN}.index.json")


def findings(files: Sequence[StateFile], variant: str | None, *, is_local: bool) -> Iterator[Finding]:
    """
    Say what the chosen files do not hold although their index says so, and what lies beside them. What lies in the
    hub's cache is the publisher's choice: only a folder of the user's own is looked at (`is_local`).
    """
    if not files:
        return
    where = os.path.dirname(files[0].path)
    names = [_with_variant(name, variant) for name in _ORDER]
    index = _index_of(where, [name for name in names if name.endswith(".json")], files)
    if index is not None:
        yield from index_.findings(index, index_.examine(index, files))
    chosen = os.path.basename(files[0].path if index is None else index.path)
    if not is_local or chosen not in names or (index is None and len(files) > 1):
        return
    # What stands before the chosen one was passed over because the caller wanted it so.
    others = [os.path.join(where, name) for name in names[names.index(chosen) + 1 :]]
    there = [path for path in others if os.path.isfile(path)]
    yield from folder.ignored("transformers", os.path.join(where, chosen), files, there, _way)


def _way(other: str) -> str | None:
    return "pass use_safetensors=False" if os.path.basename(other).startswith("pytorch_model") else None


def _with_variant(name: str, variant: str | None) -> str:
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.{variant}{dot}{ending}" if variant else name


def _index_of(where: str, names: Sequence[str], files: Sequence[StateFile]) -> Index | None:
    """
    The index that names just these files.
    """
    chosen = {os.path.basename(file.path) for file in files}
    for name in names:
        try:
            index = index_.read(os.path.join(where, name))
        except (OSError, HeaderError) as failure:
            let_through(failure)
            continue
        if chosen and set(index.files) == chosen:
            return index
    return None
