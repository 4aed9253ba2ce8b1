"""
`ckpt-sentry collect`: one receiver for the launchers of a job's nodes.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

import click

from ckpt_sentry import config
from ckpt_sentry.collector import records
from ckpt_sentry.collector.answers import Rejection
from ckpt_sentry.collector.receiver import Receiver, Request
from ckpt_sentry.forward import read_token
from ckpt_sentry.guard import contained
from ckpt_sentry.render.cells import visible
from ckpt_sentry.run_speaker import Speaker
from ckpt_sentry.telemetry.channel import is_loopback, split_address

TICK_SECONDS = 0.5
RUN_ID = "collector"
"""Names the collector's own file of records; the events in it have their runs."""


@click.command("collect", short_help="Receive the reports of a job's nodes, and show them as one.")
@click.option("--listen", default="127.0.0.1:4318", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--token-file", metavar="FILE", help="A file with the token that senders must know.")
@click.option("--dir", "folder", metavar="DIR", help="Where the records lie; CKPT_SENTRY_DIR by default.")
def command(*, listen: str, token_file: str | None, folder: str | None) -> None:
    """Receive what the launchers of several nodes know, print one report for each load of the whole job, and store it.

    \b
    here        ckpt-sentry collect --listen 0.0.0.0:4318 --token-file token
    each node   CKPT_SENTRY_COLLECTOR=here:4318 CKPT_SENTRY_TOKEN_FILE=token torchrun …

    Anyone who can reach an address other than loopback could send to it, so a token is asked for there. The traffic is
    not encrypted: use a private network, or the OpenTelemetry Collector with TLS. SIGTERM and SIGINT end it.
    """
    try:
        host, port = _place(listen)
        token = read_token(token_file)
    except (ValueError, OSError) as error:
        _fail(str(error))
    if token is None and not is_loopback(host):
        _fail(f"{visible(host)} can be reached from other machines: give a token (--token-file)")
    collector = Collector(folder or config.settings().dir)
    receiver = Receiver(collector.take, host=host, port=port, token=token)
    try:
        receiver.start()
    except OSError as error:
        _fail(f"cannot listen on {visible(listen)}: {error.strerror or error}")
    click.echo(f"ckpt-sentry collect: listening on {receiver.address}, records in {collector.path}", err=True)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    while not over.wait(TICK_SECONDS):
        collector.tick()
    receiver.close()
    collector.close()


class Collector:
    """
    What stands behind the receiver: records that outlive it, and a speaker for all nodes.

    After a restart it knows what its records hold; loads that were complete are not said again.
    """

    def __init__(self, folder: str | None) -> None:
        where = records.place(folder, RUN_ID)
        # One file for all lives of the collector in this folder: no pid in its name.
        own = records.Records(where, run_id=RUN_ID, node=socket.gethostname(), pid=0)
        self.path = own.path
        self._speaker = Speaker(own, None, source=None)
        self._remember(own.path)

    def take(self, request: Request) -> Rejection | None:
        """
        The receiver's sink. What it returns for is on disk.
        """
        refused = self._speaker.receive(request.signal, request.body)
        return Rejection(refused, "not in the form of the events of ckpt_sentry") if refused else None

    @contained("collect.tick")
    def tick(self) -> None:
        """
        Say what is ready.
        """
        self._speaker.tick()

    @contained("collect.close")
    def close(self) -> None:
        """
        Say what is left.
        """
        self._speaker.settle()

    def _remember(self, path: Path) -> None:
        if not path.exists():
            return
        for sourced in records.Reading((path,), None):
            for event in sourced.events:
                self._speaker.remember(event)


def _place(listen: str) -> tuple[str, int]:
    """
    Host and port to listen on; port 0 is any free one. Raises ValueError.
    """
    if listen.endswith(":0"):
        return split_address(f"{listen[:-1]}1")[0], 0
    return split_address(listen)


def _fail(message: str) -> NoReturn:
    click.echo(f"ckpt-sentry collect: {message}", err=True)
    sys.exit(2)
