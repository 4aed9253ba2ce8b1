"""
Telling a rank's own failure from the noise that it makes on the others.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.core import codes, ranks
from ckpt_sentry.core.report import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_sentry.core.report import LoadError

_LOSS_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "timeout caused pair closure",
    "wait timeout",
    "Watchdog caught collective operation timeout",
    "remote process exited",
    "Socket Timeout",
    "store is down",
)
"""How gloo, NCCL and the store say that another process is gone or silent."""

_PLACE = re.compile(r"\A\s*\[[^\]\s]+\.(?:cc|cpp|h|hpp):[0-9]+\]\s*")
"""The line of source with which gloo begins a text: it says nothing of the job."""

_LOSS_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")


REFUSAL: Final = "ckpt_sentry.errors.LowCoverageError"
"""The qualified name of what the agent raises."""


def is_loss(error: LoadError) -> bool:
    """
    Whether an exception says only that another rank has gone away or does not answer.
    """
    return error.type.rsplit(".", 1)[-1] in _LOSS_TYPES and any(text in error.message for text in _LOSS_TEXTS)


def failed_finding(failures: Mapping[int, Any]) -> Finding:
    """
    Other ranks of the group raised, and DCP passed their exceptions on. Keys are ranks of the process group.
    """
    return codes.finding("peer_failed", "error", ranks=ranks.compact(failures))


def lost_finding(error: LoadError) -> Finding:
    """
    The connection to another rank broke, or it did not answer in time.
    """
    first_line = next(iter(_PLACE.sub("", error.message).strip().splitlines()), error.type)
    said = first_line.partition(". ")[0][:200]
    # How a network library words it that a peer has gone differs from rank to rank.
    text = f"another rank went away or did not answer: {said}"
    return Finding("peer_failed", "error", text, facts=(("lost", "another rank"),))


def is_refusal(error: LoadError) -> bool:
    """
    Whether the agent itself raised this, as its settings told it to: the load has not failed, it was refused.
    """
    return error.type == REFUSAL
