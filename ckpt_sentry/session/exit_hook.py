"""
The last words of a worker: an exception that ends its process is told to the launcher, whatever raised it.

The exception is taken from `sys.last_value`, where the interpreter leaves what nobody has caught (Python's
`PyErr_PrintEx`), when the process ends. So `sys.excepthook` stays the host's. A host whose own hook ends the process
on the spot (`os._exit`, `MPI_Abort`) keeps us from saying more than its exit code.

torchrun prints a table of failures from files that its workers may write (`TORCHELASTIC_ERROR_FILE`,
torch/distributed/elastic/multiprocessing/errors/error_handler.py). Where the program has written none, ours goes in
there; but not where the process only lost another: torchrun takes the earliest file for the root cause.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Final

from ckpt_sentry import config, identity
from ckpt_sentry.core.report import LoadError, LoadReport
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.patching.later import later
from ckpt_sentry.transport import connection
from ckpt_sentry.transport.events import RankEnded

if TYPE_CHECKING:
    from ckpt_sentry.core import frames
    from ckpt_sentry.core.peers import is_loss
    from ckpt_sentry.masking import mask_text
    from ckpt_sentry.render.note import sentence
    from ckpt_sentry.transport.events import Event
else:
    frames = later("ckpt_sentry.core.frames")
    is_loss = later("ckpt_sentry.core.peers:is_loss")
    mask_text = later("ckpt_sentry.masking:mask_text")
    sentence = later("ckpt_sentry.render.note:sentence")

SECONDS: Final = 0.5
LONGEST: Final = 2_000
LONGEST_TEXT: Final = 20_000
_INTERRUPTS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)

_listening_pid = 0


def listen() -> None:
    """
    Report at the end of this process, if there is a launcher that listens. May be called again.
    """
    global _listening_pid  # noqa: PLW0603 - once for the process
    if config.settings().socket is None or _listening_pid == os.getpid():
        return
    _listening_pid = os.getpid()
    atexit.register(_at_exit)


@contained("exit_hook.at_exit")
def _at_exit() -> None:
    # A forked child inherits the registration, and an exception of its parent's may lie there as well.
    if _listening_pid == os.getpid():
        exc = getattr(sys, "last_value", None)
        if isinstance(exc, BaseException) and identity.identity().world_size > 1:
            report(exc)


@contained("exit_hook.report")
def report(exc: BaseException) -> None:
    """
    Tell the launcher that this process ends by an exception. Takes at most `SECONDS`; an interrupt is not told.
    """
    if isinstance(exc, _INTERRUPTS):
        return
    report = getattr(exc, "ckpt_sentry", None)
    report = report if isinstance(report, LoadReport) else None
    error = (report.error if report else None) or _described(exc)
    if not is_loss(error):
        _fill_error_file(error, sentence(report) if report else "".join(traceback.format_exception(exc)))
    send(RankEnded(identity=identity.identity(), at=time.time(), how="raised", error=error))


def send(event: Event) -> None:
    """
    Bring one event to the launcher, if there is one.
    """
    connection.send_once(event, SECONDS)


def _described(exc: BaseException) -> LoadError:
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(exc)
    except Exception:
        text = ""
    return LoadError(name, mask_text(text[: 32 * LONGEST])[:LONGEST], where=frames.innermost(exc.__traceback__))


def _printed(text: str) -> str:
    """
    Text that torchrun prints as it is: without credentials, and without what could steer a terminal.
    """
    return "\n".join(map(config.printable, mask_text(text).split("\n")))


def _fill_error_file(error: LoadError, text: str) -> None:
    """
    Say in torchrun's own table why this process ends, unless the program has said something there itself.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": _printed(text[-LONGEST_TEXT:]), "timestamp": str(int(time.time()))}
    what = _printed(f"{error.type}: {error.message}"[:LONGEST])
    data = json.dumps({"message": {"message": what, "extraInfo": extra}})
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError:  # it is there already, or its folder is not ours to write in
        return
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(data)
