"""
The data files of a distributed checkpoint against its metadata, in words: gone, empty, cut off, damaged, not readable.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from ckpt_sentry.core.fold import key_list
from ckpt_sentry.core.ranks import compact
from ckpt_sentry.core.report import Finding
from ckpt_sentry.formats.dcp import contents as dcp_contents
from ckpt_sentry.formats.dcp import files as dcp_files
from ckpt_sentry.formats.dcp import neighbours
from ckpt_sentry.formats.dcp.metadata import SHARD_NAME, DcpMetadata, by_number
from ckpt_sentry.formats.paths import shown_path

_SHOWN_BYTES = 200
_LONGEST_RANKS = 60


def findings(
    path: str, metadata: DcpMetadata, found: dcp_files.Listing | None, first: Iterable[str] = ()
) -> tuple[Finding, ...]:
    """
    Compare the files in the folder `path` with what the metadata needs, the suspects `first` before the others.
    """
    shards = dcp_files.examine(path, dcp_files.needed_sizes(metadata), found, first)
    empty = tuple(one.file for one in shards.short if one.size == 0)
    cut = tuple(one for one in shards.short if one.size)
    problems = []
    if shards.missing:
        which = _of_files(path, shards.missing, shards.files, "missing")
        problems.append(_problem("shard_missing", which, _lost(metadata, set(shards.missing)), path))
    if empty:
        which = _of_files(path, empty, shards.files, "empty (0 bytes)")
        problems.append(_problem("shard_empty", which, _lost(metadata, set(empty)), path))
    if cut:
        problems.append(_truncated(path, cut, shards, metadata))
    problems += _denied(shards.denied)
    seen = shards.checked + len(shards.missing)
    if problems and seen < shards.files:
        text = f"the sizes of {shards.checked} of {shards.files} files of {shown_path(path)} were looked at"
        problems.append(Finding("shards_not_checked", "info", text))
    return tuple(problems)


def damaged(path: str, metadata: DcpMetadata, first: Iterable[dcp_contents.Part] = ()) -> tuple[Finding, ...]:
    """
    Compare the contents of the files in the folder `path` with what was saved, the parts in `first` before the others.
    """
    seen = dcp_contents.damage(path, metadata, first)
    if not seen.parts:
        return ()
    files = tuple(sorted({metadata.storage[part].file for part in seen.parts}, key=by_number))
    which = _of_files(path, files, len(metadata.files), "damaged")
    if seen.whole:
        keys = {key for key, _ in seen.parts}
        lost = f"{_count(keys, metadata)}, no longer hold what was saved: {in_short(keys)}"
        return (_problem("shard_damaged", which, lost, path),)
    # Which parts were seen differs from rank to rank; which files they are in seldom does.
    unseen = f"not all of the {len(metadata.storage):,} parts in the files of {shown_path(path)} were looked at"
    return (
        _problem("shard_damaged", which, _lost(metadata, set(files)), path),
        Finding("shards_not_checked", "info", unseen),
    )


def _problem(code: str, which: str, lost: str, path: str) -> Finding:
    """
    A finding on files: which, who wrote them, and what lies in them. That is the same whichever rank looks.
    """
    facts = (("which", which), ("lost", lost))
    return Finding(code, "error", f"{which}; {lost}", _repair(path), facts)


def in_short(names: Collection[str]) -> str:
    """
    The first few keys or file names, folded (`__{0-3}_0.distcp`), and how many more there are.
    """
    listed = key_list(names, _SHOWN_BYTES)
    more = f" and {listed.omitted} more" if listed.omitted else ""
    return ", ".join(listed.keys) + more


def load_instead(path: str) -> str:
    """
    The next step for a checkpoint that cannot be had: another one beside it, where there is one.
    """
    other = neighbours.earlier(path)
    return f"load {shown_path(other)}, or save again" if other else "load another checkpoint, or save again"


def _repair(path: str) -> str:
    return f"copy it again from where it was saved; else {load_instead(path)}"


def _of_files(path: str, files: tuple[str, ...], total: int, state: str) -> str:
    matches = map(SHARD_NAME.search, files)
    writer = _writer({int(match[1]) for match in matches if match})
    if len(files) == 1:
        return f"{shown_path(os.path.join(path, files[0]))} is {state}, 1 of {total} files{writer}"
    return f"{len(files)} of {total} files of {shown_path(path)} are {state}: {in_short(files)}{writer}"


def _writer(ranks: Collection[int]) -> str:
    if not ranks:
        return ""
    compacted = compact(ranks)
    if len(compacted) > _LONGEST_RANKS:
        return f", written by {len(ranks)} ranks"
    return f", written by rank{'s' if len(ranks) > 1 else ''} {compacted}"


def _lost(metadata: DcpMetadata, files: set[str]) -> str:
    keys = {key for (key, _), stored in metadata.storage.items() if stored.file in files}
    return f"held {_count(keys, metadata)}: {in_short(keys)}"


def _count(keys: Collection[str], metadata: DcpMetadata) -> str:
    return f"{len(keys)} of {len(metadata.entries)} keys, whole or in part"


def _truncated(
    path: str, cut: tuple[dcp_files.ShardSize, ...], shards: dcp_files.Shards, metadata: DcpMetadata
) -> Finding:
    sizes = {one.file: one.size for one in cut}
    keys = {
        key
        for (key, _), stored in metadata.storage.items()
        if stored.file in sizes and stored.offset + stored.length > sizes[stored.file]
    }
    worst = cut[0]
    if len(cut) == 1:
        which = f"{shown_path(os.path.join(path, worst.file))} is cut off"
        which += f": {worst.size:,} of at least {worst.needed:,} bytes"
    else:
        names = in_short([one.file for one in cut])
        which = f"{len(cut)} of {shards.files} files of {shown_path(path)} are cut off: {names}"
        which += f" ({shown_path(worst.file)}: {worst.size:,} of at least {worst.needed:,} bytes)"
    lost = f"{_count(keys, metadata)}, lie beyond: {in_short(keys)}"
    return _problem("shard_truncated", which, lost, path)


def _denied(denied: tuple[dcp_files.Denied, ...]) -> list[Finding]:
    if not denied:
        return []
    first = permission_finding(denied[0])
    if len(denied) == 1:
        return [first]
    return [Finding(first.code, first.level, f"{first.text}; and {len(denied) - 1} more files", first.next)]


def permission_finding(denied: dcp_files.Denied) -> Finding:
    """
    Say who may not do what with which file.
    """
    name = shown_path(denied.path)
    verb = {"read": "read", "list": "listed", "enter": "entered"}[denied.right]
    who = f"user {os.geteuid()} on {os.uname().nodename}"
    owner = "" if denied.mode is None else f": mode {denied.mode:04o}, owner {denied.owner}:{denied.group}"
    right = "a+r" if denied.right == "read" else "a+rx"
    text = f"{name} may not be {verb} by {who}{owner}"
    return Finding("permission_denied", "error", text, f"as its owner: chmod {right} {name}; or run as that user")
