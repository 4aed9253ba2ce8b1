"""
How the agent gets into a process, and the once-guard over the four ways.

The gate comes first: nothing but this module is loaded where `CKPT_SENTRY` is unset or off. What is loaded beyond it
only waits for the host's imports: no thread, no exporter, no logger.
"""

from __future__ import annotations

import os

SITE = "site"
"""`ckpt_sentry.pth` or `ckpt_sentry.start` in site-packages."""
RUN = "run"
"""The `sitecustomize` that `ckpt-sentry run` puts first on PYTHONPATH."""
CODE = "install()"
"""A call in the program."""
OPENTELEMETRY = "opentelemetry-instrument"
"""The entry point."""

_OFF = frozenset({"", "0", "off", "false", "no"})

_ways: list[str] = []


def start() -> None:
    """
    Start as `site` asks for it: by the line of the `.pth` file or, from Python 3.15, by the `.start` file.

    In a virtual environment `site` comes here twice.
    """
    start_by(SITE)


def start_by(way: str) -> None:
    """
    Start unless `CKPT_SENTRY` is unset or off, and remember the way. Never raises, whatever is broken.
    """
    if os.environ.get("CKPT_SENTRY", "").strip().lower() in _OFF:
        return
    _begin(way)


def install() -> None:
    """
    Switch the agent on in this process, also where the functions that load are imported already.

    `CKPT_SENTRY=0` in the environment keeps it off. Calling it again does nothing. Never raises.
    """
    install_by(CODE)


def install_by(way: str) -> None:
    """
    `install`, in the name of the given way.
    """
    try:
        from ckpt_sentry import config

        wanted = config.switch_on()
    except Exception as error:
        _complain(error)
    else:
        if wanted:
            _begin(way)


def uninstall() -> None:
    """
    Give the host back every function that was replaced. Calling it again does nothing.
    """
    from ckpt_sentry.patching import ledger

    _ways.clear()
    ledger.uninstall()


def ways() -> tuple[str, ...]:
    """
    The ways by which this process got the agent; the first one did the work.
    """
    return tuple(_ways)


def _begin(way: str) -> None:
    if way in _ways:
        return
    _ways.append(way)
    try:
        from ckpt_sentry import integrations
        from ckpt_sentry.patching import ledger

        ledger.install(integrations.seams())
    except Exception as error:
        _complain(error)


def _complain(error: Exception) -> None:
    """
    One line to standard error, if there is one: the interpreter has to come up all the same.
    """
    try:
        os.write(2, f"ckpt_sentry: not started: {type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return
