"""
Opening files that a checkpoint should hold, whatever lies there instead.
"""

from __future__ import annotations

import errno
import os
import stat


def regular(path: str, flags: int) -> int:
    """
    An `opener` for `open` that takes regular files alone: to open a named pipe would wait for ever.

    Raises IsADirectoryError for a folder and OSError (EINVAL) for anything else, like a pipe, socket or device.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    raise OSError(number, os.strerror(number), path)
