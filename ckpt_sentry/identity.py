"""
Which process this is: rank, world, node, run and the ids of a load, from the environment and the process group alone.

Nothing here talks to another process. All ranks of a load come to the same ids because they hash the same facts: the
run, its attempt, the operation and how many times this process has called it. Nothing here raises on what it reads
either: a source with a bad value (`RANK=abc`, a rank beyond the world) is passed over for the next one.

Import this module before the process forks: a child that finds the facts of its parent unchanged is then known to be
no rank of its own (a DataLoader worker) and gets loads of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_sentry.core.report import Identity
from ckpt_sentry.dataclasses_ import dataclass, field

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "identity",
    "is_forked_child",
    "load_id",
    "new_run_id",
    "next_ordinal",
    "root_span_id",
    "run_id",
    "salt",
    "traceparent",
]

_RESERVED_STEPS = 0xFFFFFFF0
"""SLURM numbers its own steps (batch script, interactive shell, extern) from here up (slurm/slurm.h: SLURM_*_STEP)."""

_LOOPBACK = frozenset({"", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0"})  # noqa: S104 -- compared, not bound

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


class _Placement(NamedTuple):
    """
    Where a process stands among its ranks.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int


class _Variables(NamedTuple):
    """
    How one launcher calls rank, world size, local rank and local world size; the first valid name of each counts.
    """

    rank: str
    world: tuple[str, ...]
    local_rank: str
    local_world: tuple[str, ...]


_TORCHRUN = _Variables("RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",))
_SLURM = _Variables("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_LOCALID", ())
_OPEN_MPI = _Variables(
    "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)
)
_MPICH = _Variables("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",))


class _Known(NamedTuple):
    """
    Who this process is, and what told that.
    """

    told: tuple[object, ...]
    environ: Mapping[Any, Any]
    identity: Identity


@dataclass(slots=True)
class _Process:
    """
    What this process remembers: its calls so far and what it inherited, if it is a forked child.
    """

    lone_run_id: str | None = None
    ordinals: dict[str, int] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    forked: bool = False
    inherited: tuple[_Placement | None, _Placement | None] = (None, None)
    """The parent's place by its launcher and by its process group, at the fork."""
    known: _Known | None = None
    """What it is, as long as all that tells that stays as it was."""


_process = _Process()


def identity(environ: Mapping[str, str] | None = None) -> Identity:
    """
    This process, as of now.

    Cheap enough to ask at each load, and it should be asked then: a process group may come later. Where the launcher
    and the process group differ, the larger world counts (`srun` tasks that each spawn four workers), so that no two
    ranks answer to the same number.
    """
    if environ is None:
        told = _grouped_place(), socket.gethostname(), os.getpid(), _process.forked
        known = _process.known
        if known is None or known.told != told or known.environ != _variables():
            known = _process.known = _Known(told, dict(_variables()), _identity(os.environ))
        return known.identity
    return _identity(environ)


def _variables() -> Mapping[Any, Any]:
    """
    The environment as `os.environ` holds it: to look a variable up there takes as long as to compare all of these.
    """
    found: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
    return found


def _identity(environ: Mapping[str, str]) -> Identity:
    place = _own_place(environ) or _Placement(0, 1, 0, 1)
    return Identity(
        run_id=run_id(environ),
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world,
        local_world_size=place.local_world,
        node=socket.gethostname(),
        pid=os.getpid(),
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def run_id(environ: Mapping[str, str] | None = None) -> str:
    """
    The name of the run: the same on all its ranks, fit for a file name, at most 64 characters.

    In this order: CKPT_SENTRY_RUN_ID; torchelastic's run id (unless it is the default, "none"); SLURM job and step;
    the MPI job's id; the parent of `multiprocessing` workers; MASTER_ADDR and MASTER_PORT, hashed; a fresh name for a
    process on its own. A requeued SLURM job adds ".r1", ".r2", …

    Names can collide where a launcher's own do: a `--rdzv-id` used again, or ranks started by hand that use the same
    MASTER_ADDR and MASTER_PORT day after day, make a later run look like the earlier one. Set CKPT_SENTRY_RUN_ID then.
    """
    environ = os.environ if environ is None else environ
    if given := environ.get("CKPT_SENTRY_RUN_ID", "").strip():
        return _file_name(given)
    name = _launcher_run_id(environ)
    if name is None:
        return _lone_run_id()
    restarts = _number(environ, "SLURM_RESTART_COUNT")
    return _file_name(f"{name}.r{restarts}" if restarts else name)


def new_run_id(program: str | None = None, seed: str | None = None) -> str:
    """
    A readable name for a run: `<program>-<6 hexadecimal digits>`.

    The same `seed` gives the same digits (launchers of one run on several nodes); without one they are random.
    """
    digits = os.urandom(3).hex() if seed is None else _digest(3, "run", seed)
    return f"{_file_name(program or _program())[:40]}-{digits}"


def load_id(run_id: str, attempt: int, operation: str, ordinal: int, salt: str = "") -> str:
    """
    The id of one load on all its ranks, which is also its trace id: 32 hexadecimal digits, not all zero.
    """
    return _digest(16, "load", run_id, str(attempt), operation, str(ordinal), salt)


def root_span_id(load_id: str) -> str:
    """
    The id of the span above the spans of all ranks: 16 hexadecimal digits, not all zero.
    """
    return _digest(8, "root", load_id)


def next_ordinal(operation: str) -> int:
    """
    How many times this process has called the operation before, this call counted; from 0, safe in threads.
    """
    with _process.lock:
        ordinal = _process.ordinals.get(operation, 0)
        _process.ordinals[operation] = ordinal + 1
        return ordinal


def is_forked_child() -> bool:
    """
    Whether this process was forked from one that had this module.
    """
    return _process.forked


def salt(environ: Mapping[str, str] | None = None) -> str:
    """
    What keeps the loads of a forked child apart from its parent's: "" unless it is one that is no rank of its own.
    """
    environ = os.environ if environ is None else environ
    return str(os.getpid()) if _process.forked and _own_place(environ) is None else ""


def traceparent(environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """
    The trace id and span id of TRACEPARENT, or None where it is unset or invalid (W3C Trace Context, level 1, 3.2).
    """
    environ = os.environ if environ is None else environ
    match = _TRACEPARENT.fullmatch(environ.get("TRACEPARENT", "").strip())
    if match is None:
        return None
    version, trace_id, span_id, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    return (trace_id, span_id) if int(trace_id, 16) and int(span_id, 16) else None


def _own_place(environ: Mapping[str, str]) -> _Placement | None:
    """
    The place of this very process, or None where it has none: on its own, or forked from the one that has it.
    """
    launched, grouped = _launched_place(environ), _grouped_place()
    if _process.forked:
        launched = launched if launched != _process.inherited[0] else None
        grouped = grouped if grouped != _process.inherited[1] else None
    if launched is None or grouped is None:
        return launched or grouped
    return grouped if grouped.world > launched.world else launched


def _launched_place(environ: Mapping[str, str]) -> _Placement | None:
    """
    The place that a launcher gave in the environment.
    """
    for variables in (_TORCHRUN, _SLURM, _OPEN_MPI, _MPICH):
        if variables is _SLURM and not _is_slurm_task(environ):
            continue
        if (place := _place(environ, variables)) is not None:
            return place
    return None


def _place(environ: Mapping[str, str], variables: _Variables) -> _Placement | None:
    """
    The place under one launcher's names, or None where rank and world size are not both there and sound.
    """
    rank = _number(environ, variables.rank)
    world = next((size for name in variables.world if (size := _number(environ, name))), None)
    if rank is None or world is None or rank >= world:
        return None
    local_world = next((size for name in variables.local_world if (size := _number(environ, name))), world)
    local_world = min(local_world, world)
    local_rank = _number(environ, variables.local_rank)
    if local_rank is None or local_rank >= local_world:
        local_rank = rank % local_world
    return _Placement(rank, world, local_rank, local_world)


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """
    Whether `srun` started this process. The batch script looks like task 0 of the job, but none of its steps.
    """
    step = _slurm_step(environ)
    if step is not None:
        return step < _RESERVED_STEPS
    return environ.get("ENVIRONMENT") != "BATCH" or (_number(environ, "SLURM_PROCID") or 0) > 0


def _slurm_step(environ: Mapping[str, str]) -> int | None:
    step = _number(environ, "SLURM_STEP_ID")
    return _number(environ, "SLURM_STEPID") if step is None else step


def _grouped_place() -> _Placement | None:
    """
    The place in the default process group, if torch is there and has one.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized():
            return None
        rank, world = int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:
        # A build without distributed, or an import that is still under way.
        return None
    return _Placement(rank, world, rank, world) if 0 <= rank < world else None


def _launcher_run_id(environ: Mapping[str, str]) -> str | None:
    """
    The run's name by whatever started its ranks, or None for a process on its own.
    """
    elastic = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if elastic and elastic != "none":
        return elastic
    if (job := environ.get("SLURM_JOB_ID", "").strip()) and _place(environ, _SLURM) and _is_slurm_task(environ):
        return f"slurm-{job}.{_slurm_step(environ) or 0}"
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
        if job := environ.get(name, "").strip():
            return f"mpi-{_digest(4, job)}"
    place = _own_place(environ) or next(filter(None, _process.inherited), None)
    if place is None or place.world == 1:
        return None
    address, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    if address in _LOOPBACK and (parent := _spawning_parent()) is not None:
        return f"{_program()}-{_digest(3, socket.gethostname(), str(parent), _start_time(parent))}"
    return f"{_program()}-{_digest(3, address, port)}" if address or port else None


def _spawning_parent() -> int | None:
    """
    The process whose `multiprocessing` started this one, or None.
    """
    process = sys.modules.get("multiprocessing.process")
    parent = process.parent_process() if process is not None else None
    return None if parent is None else parent.pid


def _start_time(pid: int) -> str:
    """
    When a process started, in the kernel's ticks since boot, so that a process id used again is another process; ""
    where there is no /proc (proc(5): field 22 of /proc/PID/stat; the name in field 2 may hold anything).
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _lone_run_id() -> str:
    with _process.lock:
        if _process.lone_run_id is None:
            _process.lone_run_id = new_run_id()
        return _process.lone_run_id


def _program() -> str:
    """
    What a person would call this program: the script's or the package's name.
    """
    path = Path((getattr(sys, "argv", None) or [""])[0])
    name = path.parent.name if path.stem == "__main__" else path.stem
    return "python" if name in {"", "-c", "-"} else name


def _file_name(text: str) -> str:
    """
    The text if it can be a file's name as it is; else what of it can, and a digest that keeps different texts apart.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip(".-") or "run"
    return safe if safe == text and len(safe) <= 64 else f"{safe[:55]}-{_digest(4, text)}"  # noqa: PLR2004


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """
    A variable's value as a number from 0 up, else None.
    """
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None  # noqa: PLR2004


def _digest(size: int, *parts: str) -> str:
    """
    A digest of `size` bytes in hexadecimal digits, not all zero: neither a trace nor a span may have that id.
    """
    text = "\x00".join(parts).encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=size).digest()
    return (digest if any(digest) else bytes(size - 1) + b"\x01").hex()


def _after_fork_in_child() -> None:
    """
    The child starts its own count and remembers which place is its parent's; the lock may have been held at the fork.
    """
    _process.lock = threading.RLock()
    _process.known = None
    _process.ordinals.clear()
    _process.forked = True
    _process.inherited = (_launched_place(os.environ), _grouped_place())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
