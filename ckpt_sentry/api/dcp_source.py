"""
The checkpoint that a path, a reader or metadata of DCP leads to: its headers, or why they cannot be read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass
from ckpt_sentry.formats.dcp import diagnosis as dcp
from ckpt_sentry.formats.dcp import metadata as dcp_metadata
from ckpt_sentry.formats.dcp.metadata import DcpMetadata
from ckpt_sentry.formats.dcp.peek import peek_step
from ckpt_sentry.formats.step import Step, find_step
from ckpt_sentry.formats.torch_save.unpickle import UnreadablePickle
from ckpt_sentry.integrations.dcp import stock
from ckpt_sentry.patching.guard import let_through

if TYPE_CHECKING:
    from ckpt_sentry.core.inventory import Entry

_TORCHS_FOLDERS = "torch.distributed.checkpoint.filesystem"
"""The module of torch's own reader, which reads the files of a folder and nothing else."""


@dataclass(frozen=True, slots=True)
class Source:
    """
    The checkpoint that a call names: its headers, or why they cannot be read; `folder` is where its files surely are.
    """

    path: str | None
    metadata: DcpMetadata | None
    step: Step | None = None
    findings: tuple[Finding, ...] = ()
    folder: str | None = None

    @property
    def step_value(self) -> int | None:
        return None if self.step is None else self.step.value


def source_of(given: Any) -> Source:
    """
    What a path, a reader or metadata of DCP leads to.
    """
    if isinstance(given, DcpMetadata):
        return Source(given.saved_path, given, None if given.saved_path is None else find_step(given.saved_path))
    if hasattr(given, "state_dict_metadata"):
        return _of_torch(given, _path_of(getattr(given, "storage_meta", None)))
    if callable(getattr(given, "read_metadata", None)):
        is_folder = type(given).__module__ == _TORCHS_FOLDERS and hasattr(given, "path")
        return _of_folder(os.fspath(given.path)) if is_folder else _of_reader(given, _path_of(given))
    path = os.fspath(given)
    return _of_url(path) if isinstance(path, str) and "://" in path else _of_folder(path)


def _path_of(told: Any) -> str | None:
    path = stock.path_of(told)
    return None if path is None else os.fspath(path)


def _of_folder(path: str) -> Source:
    try:
        metadata = dcp_metadata.read(path)
    except (OSError, UnreadablePickle):
        return Source(path, None, find_step(path), dcp.diagnose(path))
    return Source(path, metadata, find_step(path) or peek_step(path, metadata), folder=path)


def _of_url(path: str) -> Source:
    return _of_reader(stock.reader_of(path), path)


def _of_reader(reader: Any, path: str | None) -> Source:
    try:
        return _of_torch(reader.read_metadata(), path)
    except Exception as failure:
        let_through(failure)
        text = f"the metadata cannot be read: {type(failure).__name__}: {failure}"
        step = None if path is None else find_step(path)
        return Source(path, None, step, (Finding("metadata_unreadable", "error", text),))


def _of_torch(metadata: Any, path: str | None) -> Source:
    from ckpt_sentry.integrations.dcp.entries import checkpoint_entry

    seen: dict[tuple[Any, Any], Entry] = {}
    entries = {key: checkpoint_entry(value, seen) for key, value in metadata.state_dict_metadata.items()}
    return Source(path, DcpMetadata(entries, saved_path=path), None if path is None else find_step(path))
