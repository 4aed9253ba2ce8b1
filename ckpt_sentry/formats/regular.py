"""
Opening files, whatever lies there instead: regular files alone, and never waiting.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_AT_ONCE: Final = getattr(os, "O_NONBLOCK", 0)
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)


def regular(path: str, flags: int) -> int:
    """
    An `opener` for `open` that takes regular files alone: to open a named pipe would wait for ever.

    Links are followed: a checkpoint may well be made of them. Raises IsADirectoryError for a folder and OSError
    (EINVAL) for anything else, like a pipe, socket or device.
    """
    descriptor = os.open(path, flags | _AT_ONCE)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    raise OSError(number, os.strerror(number), path)


def own(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """
    Open a file that the agent writes itself, in a folder where others may write too: a regular one, and no link.

    Raises OSError.
    """
    try:
        descriptor = os.open(path, flags | _AT_ONCE | _NO_LINK, mode)
    except OSError as error:
        # What `open` says of a link and of a pipe that nobody reads (open(2)).
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _no_file(path) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _no_file(path)


def _no_file(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, f"what lies at {os.path.basename(path)} is no regular file", os.fspath(path))
