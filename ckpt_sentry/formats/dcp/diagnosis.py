"""
Why a distributed checkpoint does not load, by what is on disk: findings that name the file and the next step.

`diagnose` runs only when a load has failed or looks wrong. It reads headers, lists one folder and looks at the size of
a file at most once; where torch could not read what a file holds, some of it is read as well. It asks as the process
that failed: same user, same host.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_sentry.core.ranks import compact
from ckpt_sentry.core.report import Finding
from ckpt_sentry.formats.dcp import files as dcp_files
from ckpt_sentry.formats.dcp import neighbours
from ckpt_sentry.formats.errors import HeaderError, plural
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.patching.guard import let_through
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from ckpt_sentry.formats import safetensors, sniff
    from ckpt_sentry.formats.dcp import metadata as dcp_metadata
    from ckpt_sentry.formats.dcp import shards as dcp_shards
    from ckpt_sentry.formats.dcp.exception import (
        all_errors,
        asked_for,
        chosen_reader,
        not_unpickled,
        planning,
        suspects,
        unreadable,
    )
    from ckpt_sentry.formats.dcp.metadata import DcpMetadata
    from ckpt_sentry.formats.dcp.shards import in_short, load_instead, permission_finding
    from ckpt_sentry.formats.torch_save import unpickle
else:
    all_errors = later("ckpt_sentry.formats.dcp.exception:all_errors")
    asked_for = later("ckpt_sentry.formats.dcp.exception:asked_for")
    chosen_reader = later("ckpt_sentry.formats.dcp.exception:chosen_reader")
    not_unpickled = later("ckpt_sentry.formats.dcp.exception:not_unpickled")
    planning = later("ckpt_sentry.formats.dcp.exception:planning")
    suspects = later("ckpt_sentry.formats.dcp.exception:suspects")
    unreadable = later("ckpt_sentry.formats.dcp.exception:unreadable")
    safetensors = later("ckpt_sentry.formats.safetensors")
    in_short = later("ckpt_sentry.formats.dcp.shards:in_short")
    load_instead = later("ckpt_sentry.formats.dcp.shards:load_instead")
    permission_finding = later("ckpt_sentry.formats.dcp.shards:permission_finding")
    dcp_shards = later("ckpt_sentry.formats.dcp.shards")
    sniff = later("ckpt_sentry.formats.sniff")
    unpickle = later("ckpt_sentry.formats.torch_save.unpickle")
    DcpMetadata = later("ckpt_sentry.formats.dcp.metadata:DcpMetadata")
    dcp_metadata = later("ckpt_sentry.formats.dcp.metadata")

_SHOWN = 3
_CHECK = "check the path, and that its file system is mounted on this host"
_KNOWN_VERSIONS = frozenset({None, "1.0.0"})
_STORAGE_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.ETIMEDOUT})
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def diagnose(
    path: str | os.PathLike[str],
    *,
    error: BaseException | None = None,
    rank: int | None = None,
    reader: str | None = None,
    metadata: DcpMetadata | None = None,
) -> tuple[Finding, ...]:
    """
    Say what is wrong with the checkpoint at `path`; an empty tuple where nothing is.

    `error` is what the load raised: its traceback tells the reader and the file in hand. `reader` is the name of the
    `StorageReader` class, for a folder of Hugging Face files; `metadata` spares reading it again. Never raises OSError.
    """
    text = os.fspath(path)
    found: tuple[Finding, ...] = ()
    if text and "://" not in text:
        found = _no_folder(text)
        if not found and "HuggingFace" in (reader or chosen_reader(error) or ""):
            found = _hugging_face(text)
        elif not found and (metadata is not None or not planning(error)):
            found = _folder(text, rank, metadata, error)
    return found if any(finding.level == "error" for finding in found) else (*found, *_told_by(error, text))


def newer_unfinished(path: str) -> tuple[Finding, ...]:
    """
    Say that a newer checkpoint lies beside the one at `path` whose save has not finished: one look at their folder.
    """
    newer = None if "://" in path else neighbours.newer_unfinished(path)
    if newer is None:
        return ()
    text = f"{shown_path(newer)}, newer and in the same folder, has no .metadata: its save has not finished"
    return (Finding("newer_unfinished", "info", text),)


def _no_folder(path: str) -> tuple[Finding, ...]:
    try:
        info = os.stat(path)
    except PermissionError:
        return _permission(path)
    except NotADirectoryError:
        return _parent_is_file(path)
    except FileNotFoundError:
        return _missing(path)
    except (OSError, ValueError) as failure:
        let_through(failure)
        return (_storage_error(path, failure),)
    if not stat.S_ISDIR(info.st_mode):
        return _file(path)
    no_entry = dcp_files.denied(path)
    return () if no_entry is None else (permission_finding(no_entry),)


def rank_local(path: str, rank: int | None) -> Finding | None:
    """
    Say that a rank had to take its own metadata, or cannot, since the common one is not to be had; else None.
    """
    common = os.path.join(path, dcp_metadata.FILE_NAME)
    if os.path.isfile(common) and dcp_files.denied(common) is None:
        return None
    found = dcp_files.listing(path)
    matches = map(dcp_metadata.RANK_METADATA_NAME.match, found.files if found else ())
    ranks = sorted(int(match[1]) for match in matches if match)
    if not ranks:
        return None
    who = f"ranks {compact(ranks)} saved their own" if len(ranks) > 1 else f"rank {ranks[0]} saved its own"
    where = f"the common .metadata of {shown_path(path)} cannot be read; {who}"
    step = "load with as many ranks as saved it, or save again so that the ranks coordinate"
    if os.path.isfile(common):
        step = f"make {shown_path(common)} readable on every rank"
    if rank is None or rank in ranks:
        used = f"__{ranks[0] if rank is None else rank}.metadata"
        text = f"{where}: {used} was used, which knows the parts of that rank alone"
        return Finding("rank_local_metadata", "warning", text, step)
    # Which rank it is that has none is no fact of the checkpoint: its others say the same of themselves.
    facts = (("where", where),)
    return Finding("rank_local_metadata", "error", f"{where}, rank {rank} has none", step, facts)


def _told_by(error: BaseException | None, path: str) -> tuple[Finding, ...]:
    for one in all_errors(error):
        if not isinstance(one, OSError):
            continue
        file = one.filename if isinstance(one.filename, str) else path
        if one.errno in _FULL_ERRNOS:
            return (_disk_full(file, path),)
        if isinstance(one, PermissionError) and "://" not in file:
            return (permission_finding(dcp_files.refused(file)),)
        if one.errno in _STORAGE_ERRNOS:
            return (_storage_error(file, one),)
    return ()


def _disk_full(file: str, path: str) -> Finding:
    try:
        space = os.statvfs(path if os.path.exists(path) else dcp_files.nearest_existing(path)[0])
        free = f"; {space.f_bavail * space.f_frsize:,} bytes are free there"
    except OSError as failure:
        let_through(failure)
        free = ""
    text = f"no space is left for {shown_path(file)}{free}"
    return Finding("disk_full", "error", text, "free space or raise the quota: df -h, quota -s")


def _storage_error(path: str, failure: OSError | ValueError) -> Finding:
    reason = getattr(failure, "strerror", None) or str(failure)
    text = f"{shown_path(path)} cannot be read: {shown_path(reason)}"
    return Finding("storage_error", "error", text, f"check the storage on {os.uname().nodename}: mount, network, dmesg")


def _permission(path: str) -> tuple[Finding, ...]:
    return (permission_finding(dcp_files.refused(path)),)


def _parent_is_file(path: str) -> tuple[Finding, ...]:
    parent = dcp_files.nearest_existing(path)[0]
    text = f"{shown_path(parent)} is a file, so {shown_path(path)} cannot exist"
    return (Finding("path_is_file", "error", text, "give the folder of the checkpoint"),)


def _missing(path: str) -> tuple[Finding, ...]:
    name = shown_path(path)
    if os.path.islink(path):
        target = shown_path(os.readlink(path))
        return (Finding("path_missing", "error", f"{name} is a link to {target}, which does not exist"),)
    parent, lost, below = dcp_files.nearest_existing(path)
    what = "the nearest folder that does is" if below else "its folder exists:"
    text = f"{name} does not exist; {what} {shown_path(parent)}"
    found = dcp_files.listing(parent)
    if found is None:
        refused = dcp_files.denied(parent, folder_right="list")
        return (Finding("path_missing", "error", text), *((permission_finding(refused),) if refused else ()))
    steps = neighbours.steps_among(found.folders)
    if steps:
        text += f", with {_some(steps)}"
    if found.cut:
        text += f" (the first {dcp_files.MAX_LISTED:,} names seen)"
    return (Finding("path_missing", "error", text, _instead_of(parent, lost, below, found)),)


def _instead_of(parent: str, lost: str, below: str, found: dcp_files.Listing) -> str:
    """
    What to load in place of a path that does not exist: only what is there as a whole.
    """
    likely = neighbours.meant(lost, found.names)
    if likely is not None and _is_checkpoint(meant := os.path.join(parent, likely, below).rstrip("/")):
        return f"did you mean {shown_path(meant)}?"
    steps = () if below else neighbours.steps_among(found.folders)
    newest = neighbours.first_whole(parent, steps)
    if newest is None:
        return _CHECK
    which = "the newest there" if newest == steps[0] else "the newest there that is whole"
    return f"load {shown_path(os.path.join(parent, newest))}, {which}"


def _is_checkpoint(path: str) -> bool:
    """
    Whether there is a whole distributed checkpoint, or files in the format of Hugging Face.
    """
    if neighbours.is_whole(path):
        return True
    found = dcp_files.listing(path)
    return found is not None and any(name.endswith(".safetensors") for name in found.files)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown_path(name) for name in names[:_SHOWN]) + more


def _file(path: str) -> tuple[Finding, ...]:
    name = shown_path(path)
    try:
        facts = sniff.sniff(path)
    except PermissionError:
        return _permission(path)
    except (OSError, ValueError) as failure:
        let_through(failure)
        return (_storage_error(path, failure),)
    match facts.kind:
        case "torch_zip" | "torch_legacy":
            code, step = "torch_save_file", "load it with torch.load, or convert it with torch_save_to_dcp of "
            step += "torch.distributed.checkpoint.format_utils"
        case "safetensors":
            code, step = "safetensors_file", "load it with safetensors.torch.load_file"
        case "dcp_shard":
            code, step = "path_is_file", f"give the folder: {shown_path(os.path.dirname(dcp_files.absolute(path)))}"
        case "lfs_pointer" | "html_page":
            code, step = facts.kind, "git lfs pull" if facts.kind == "lfs_pointer" else "download it again"
        case _:
            code, step = "path_is_file", "give the folder of the checkpoint, the one that holds .metadata"
    what = "a file" if facts.kind == "unknown" and not facts.detail else facts.words
    return (Finding(code, "error", f"{name} is {what}, not the folder of a DCP checkpoint", step),)


def _hugging_face(path: str) -> tuple[Finding, ...]:
    found = dcp_files.listing(path)
    if found is None:
        return ()
    if files := sorted(name for name in found.files if name.endswith(".safetensors")):
        return _unread(path, files)
    name = shown_path(path)
    if dcp_metadata.FILE_NAME in found.files:
        text = f"{name} is a DCP checkpoint without safetensors files"
        return (Finding("dcp_checkpoint", "error", text, "give FileSystemReader instead of HuggingFaceStorageReader"),)
    return (Finding("no_checkpoint_files", "error", f"{name} holds no .safetensors file{_contents(found)}", _CHECK),)


def _unread(path: str, files: Sequence[str]) -> tuple[Finding, ...]:
    """
    Which safetensors file the library would refuse, by its header: the first, and how many more.
    """
    refused = []
    give_up_at = time.monotonic() + dcp_files.MAX_SECONDS
    for name in files[: dcp_files.MAX_STATS]:
        if time.monotonic() > give_up_at:
            break
        file = os.path.join(path, name)
        try:
            safetensors.read(file)
        except PermissionError:
            refused.append(permission_finding(dcp_files.refused(file)))
        except OSError as failure:
            let_through(failure)
            refused.append(_storage_error(file, failure))
        except HeaderError as failure:
            if failure.level == "error":
                refused.append(_damaged(file, failure))
    if len(refused) <= 1:
        return tuple(refused)
    first, more = refused[0], plural(len(refused) - 1, "more file")
    return (Finding(first.code, "error", f"{first.text}; and {more}", first.next),)


def _damaged(file: str, failure: HeaderError) -> Finding:
    found = [one for one in sniff.findings(file) if one.code in ("lfs_pointer", "html_page", "empty_file")]
    if found:
        return found[0]
    code = "shard_truncated" if failure.code == "truncated_file" else failure.code
    return Finding(code, "error", os.path.join(shown_path(os.path.dirname(file)), failure.text), failure.next)


def _contents(found: dcp_files.Listing) -> str:
    if not found.names:
        return ": it is empty"
    return f"; it holds {_some(sorted(found.names))}"


def _folder(
    path: str, rank: int | None, metadata: DcpMetadata | None, error: BaseException | None
) -> tuple[Finding, ...]:
    found = dcp_files.listing(path)
    problems: list[Finding] = []
    if metadata is None:
        local = rank_local(path, rank)
        own = rank if local is not None and local.level == "warning" else None
        metadata, failure = _read(path, own)
        if local is not None:
            problems.append(local)
        if failure == "missing" and local is None:
            return _no_metadata(path, found)
        if isinstance(failure, Finding):
            problems.append(failure)
        if local is not None and own is not None:
            common = dcp_files.denied(os.path.join(path, dcp_metadata.FILE_NAME))
            problems += [permission_finding(common)] if common else []
    if metadata is None:
        return tuple(problems)
    if (lacking := not_unpickled(error)) is not None and not problems:
        return (_other_classes(path, metadata, lacking),)
    shards = dcp_shards.findings(path, metadata, found, suspects(error))
    if not shards and unreadable(error):
        shards = dcp_shards.damaged(path, metadata, asked_for(error))
    return (*problems, *_contradictions(path, metadata), *shards)


def _other_classes(path: str, metadata: DcpMetadata, failure: Exception) -> Finding:
    """
    Say that the metadata is whole, and made of what is not to be had here.
    """
    file = shown_path(os.path.join(path, dcp_metadata.FILE_NAME))
    reason = shown_path(str(failure))
    text = f"{file} cannot be read here: {reason}"
    if metadata.unknown:
        text += f"; it holds {_some(sorted(metadata.unknown))}"
    step = "install what it was saved with, in the same version, and load again"
    return Finding("metadata_unreadable", "error", text, step)


def _read(path: str, rank: int | None) -> tuple[DcpMetadata | None, Finding | str | None]:
    file = os.path.join(path, dcp_metadata.FILE_NAME if rank is None else f"__{rank}{dcp_metadata.FILE_NAME}")
    try:
        return dcp_metadata.read(path, rank=rank), None
    except FileNotFoundError:
        return None, "missing"
    except PermissionError:
        return None, permission_finding(dcp_files.refused(file))
    except OSError as failure:
        let_through(failure)
        return None, _storage_error(file, failure)
    except unpickle.UnreadablePickle as failure:
        size = os.path.getsize(file) if os.path.isfile(file) else 0
        text = f"{shown_path(file)} {failure.reason} ({size:,} bytes)"
        return None, Finding("metadata_unreadable", "error", text, load_instead(path))


def _no_metadata(path: str, found: dcp_files.Listing | None) -> tuple[Finding, ...]:
    name = shown_path(path)
    if found is None:
        return (Finding("metadata_missing", "error", f"{name} has no .metadata", load_instead(path)),)
    shards = [file for file in found.files if dcp_metadata.SHARD_NAME.match(file)]
    if shards or f"{dcp_metadata.FILE_NAME}.tmp" in found.files:
        cut = " or more" if found.cut else ""
        files = "1 shard is" if len(shards) == 1 else f"{len(shards)}{cut} shards are"
        text = f"{name} has no .metadata, so its save never finished: {files} there ({in_short(shards)})"
        return (Finding("metadata_missing", "error", text, load_instead(path)),)
    safetensors = sorted(file for file in found.files if file.endswith(".safetensors"))
    if safetensors:
        text = f"{name} holds safetensors files ({in_short(safetensors)}), no DCP checkpoint"
        step = "give storage_reader=HuggingFaceStorageReader(path), or load them with safetensors"
        return (Finding("safetensors_file", "error", text, step),)
    below = neighbours.finished_below(path, found.folders)
    if below:
        text = f"{name} is no checkpoint, but holds some: {_some(below)}"
        best = neighbours.first_whole(path, below)
        step = f"load {shown_path(os.path.join(path, best))}" if best else load_instead(path)
        return (Finding("no_checkpoint_files", "error", text, step),)
    text = f"{name} holds neither .metadata nor shards{_contents(found)}"
    return (Finding("no_checkpoint_files", "error", text, load_instead(path)),)


def _contradictions(path: str, metadata: DcpMetadata) -> list[Finding]:
    problems = []
    file = shown_path(os.path.join(path, dcp_metadata.FILE_NAME))
    if metadata.version not in _KNOWN_VERSIONS:
        text = f"{file} is of version {shown_path(metadata.version or '')}, known is 1.0.0"
        problems.append(Finding("unknown_version", "warning", text, "load it with the torch that saved it"))
    lost = metadata.not_stored() if metadata.storage else ()
    if lost:
        count = f"{len(lost)} of {len(metadata.entries)} keys"
        text = f"{file} names {count} that no file holds: {in_short(lost)}; a writer of the save failed"
        problems.append(Finding("index_incomplete", "error", text, load_instead(path)))
    return problems
