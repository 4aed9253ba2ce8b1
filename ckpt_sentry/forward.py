"""
From a launcher to the collector of the whole job: its own records are the spool.

A thread sends each line of the records file to the collector, again and again until it is acknowledged; nothing has to
be kept in memory, and a collector that is away for a while is caught up with. How far it has come stands beside the
records (`….sent`), so that a launcher of the same run that is started again sends what its predecessor could not.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry import config, names
from ckpt_sentry.checkpoints.regular import own
from ckpt_sentry.collector.records import MAX_LINE
from ckpt_sentry.guard import contained, log
from ckpt_sentry.telemetry import otlp_json
from ckpt_sentry.telemetry.channel import Channel

if TYPE_CHECKING:
    from typing_extensions import Self

    from ckpt_sentry.collector.records import Records

SUFFIX: Final = ".sent"
LOOK_SECONDS: Final = 0.2
RETRY_SECONDS: Final = 2.0
POST_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 3.0
"""How long the end of a job waits for the collector to have everything."""

_LONGEST_MARK: Final = 32
_FINAL: Final = (HTTPStatus.OK, HTTPStatus.BAD_REQUEST)
"""Answers after which the same request will never be taken: understood and refused, or not understood."""


class Spool:
    """
    A records file, and how many of its bytes the collector has acknowledged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = path.with_name(path.name + SUFFIX)
        self.offset = self._marked()

    def next(self) -> tuple[bytes, int] | None:
        """
        The first line that has not been acknowledged and where it ends; None where there is no whole one.
        """
        with contextlib.suppress(OSError), open(self.path, "rb", opener=own) as file:
            file.seek(self.offset)
            line = file.readline(MAX_LINE + 1)
            if line.endswith(b"\n"):
                return line, self.offset + len(line)
        return None

    def acknowledge(self, offset: int) -> None:
        """
        Everything up to there has arrived.
        """
        self.offset = offset
        with contextlib.suppress(OSError), open(self._mark, "w", encoding="ascii", opener=own) as file:
            file.write(str(offset))

    def _marked(self) -> int:
        try:
            with open(self._mark, encoding="ascii", opener=own) as file:
                return int(file.read(_LONGEST_MARK))
        except (OSError, ValueError):
            return 0


class Forwarder:
    """
    Sends what the records hold, and what is added to them, to the collector at `address` until `close`.
    """

    def __init__(self, records: Records, address: str, token: str | None) -> None:
        self._channel = Channel(address, token, reach="anywhere")
        self._address = address
        own = Spool(records.path)
        self._spools = [*_left_behind(records.path), own]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{names.SCOPE}-forwarder", daemon=True)
        self._thread.start()

    @classmethod
    @contained("forward.start")
    def to_collector(cls, records: Records) -> Self | None:
        """
        The forwarder that the settings ask for, if they do.
        """
        settings = config.settings()
        if settings.collector is None:
            return None
        return cls(records, settings.collector, read_token(settings.token_file))

    def close(self) -> None:
        """
        Send what is left, for a few seconds; what was not taken stays in the records, and that is logged.
        """
        self._closing.set()
        self._thread.join(CLOSE_SECONDS + POST_SECONDS)
        if any(spool.next() for spool in self._spools):
            log("forward.close", OSError(f"the collector at {self._address} has not taken everything; it stays here"))
        self._channel.close()

    @contained("forward.run")
    def _run(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            if not self._send_all():
                self._closing.wait(RETRY_SECONDS)
        self._send_all()

    def _send_all(self) -> bool:
        """
        Send until there is nothing left, or the collector does not take it: then False.
        """
        for spool in self._spools:
            while (found := spool.next()) is not None:
                line, end = found
                if not self._send(line):
                    return False
                spool.acknowledge(end)
        return True

    def _send(self, line: bytes) -> bool:
        """
        Whether the collector has this line, or will never take it.
        """
        request = _ours(line)
        if request is None:
            return True
        seconds = CLOSE_SECONDS if self._closing.is_set() else POST_SECONDS
        return self._channel.post(request, seconds) or self._channel.status in _FINAL


def _ours(line: bytes) -> dict[str, Any] | None:
    """
    The events of a line of records as a request; None where there are none.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    events, _ = otlp_json.decode(request) if isinstance(request, dict) else ([], 0)
    return otlp_json.encode(tuple(events)) if events else None


def _left_behind(path: Path) -> list[Spool]:
    """
    Records of the same run and node by launchers that are gone, not all of which the collector has.
    """
    stem = path.stem.rpartition("-")[0]
    found = []
    for other in sorted(path.parent.glob("*" + path.suffix)) if path.parent.is_dir() else ():
        name, _, pid = other.stem.rpartition("-")
        if other != path and name == stem and pid.isdigit() and not _lives(int(pid)):
            spool = Spool(other)
            if spool.next() is not None:
                found.append(spool)
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def read_token(path: str | None) -> str | None:
    """
    The token in a file, without the white space around it. Raises OSError.
    """
    return None if path is None else Path(path).expanduser().read_text(encoding="utf-8").strip() or None
