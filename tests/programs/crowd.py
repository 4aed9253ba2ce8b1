"""
A stranger of the same user: `crowd.py COUNT SOCKET LAUNCHER` connects so many times and does nothing until that process
has ended.

Every other connection greets as a worker does. It says how many were made once they stand. Its own limit of open files
is raised, nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys


def main(count: int, path: str, launcher: int) -> None:
    """
    Come, and stay.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    end = os.pidfd_open(launcher)
    idle = []
    for place in range(count):
        idle.append(socket.socket(socket.AF_UNIX))
        idle[-1].connect(path)
        with contextlib.suppress(OSError):  # it may be let go at once
            idle[-1].send(b'{"pid": %d}\n' % os.getpid() if place % 2 else b"")
    print(f"a crowd of {len(idle)}", flush=True)
    watch = select.poll()
    watch.register(end, select.POLLIN)
    watch.poll()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
