"""
Settings: every `CKPT_SENTRY_*` variable, in one table.

A bad value never stops a job: it becomes one sentence in `Settings.problems`, and the default is used.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import sys
from typing import TYPE_CHECKING, Any, Literal

from ckpt_sentry.dataclasses_ import dataclass, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Mode = Literal["off", "on", "observe", "strict"]
Log = Literal["auto", "console", "json", "stdlib", "off"]
Verify = Literal["sample", "full", "off"]
Align = Literal["off", "auto"]

PREFIX = "CKPT_SENTRY"
_MODES = {"": "off", "0": "off", "off": "off", "false": "off", "no": "off"} | {
    "1": "on",
    "on": "on",
    "true": "on",
    "yes": "on",
    "observe": "observe",
    "strict": "strict",
}
_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True)
class Variable:
    """
    One variable of the environment: the field that it sets, the words for people, and how its text is read.

    `read` raises `ValueError` with what the text should have been ("is not …"). `default` and `values` are text for
    people. An `internal` variable is set by a launcher for its workers, not by people.
    """

    name: str
    field: str
    values: str
    default: str
    meaning: str
    read: Callable[[str], Any]
    internal: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """
    What the environment asks for. `problems` has one sentence for each unknown variable or bad value.
    """

    mode: Mode = "off"
    min_coverage: float = 0.99
    allow_missing: tuple[str, ...] = ()
    log: Log = "auto"
    dir: str | None = None
    verify: Verify = "sample"
    align: Align = "off"
    stall_after: float = 300.0
    socket: str | None = None
    run_id: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def required(self) -> float:
        """
        The coverage, in [0, 1], under which a load is refused where the caller has not asked for a part: "strict" wants
        all.
        """
        return 1.0 if self.mode == "strict" else self.min_coverage

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """
        Read the settings from `environ`. Never raises.
        """
        fields: dict[str, Any] = {}
        problems: list[str] = []
        for variable in VARIABLES:
            text = environ.get(variable.name)
            if text is None:
                continue
            try:
                fields[variable.field] = variable.read(text.strip())
            except ValueError as error:
                problems.append(f'{variable.name}="{_cut(text)}" {error}; {variable.default} is used')
        if problems and environ.get(PREFIX) is not None and "mode" not in fields:
            # Whoever sets the switch to a word that we do not know wants the agent, not silence.
            fields["mode"] = "on"
        problems += [_unknown(name) for name in sorted(environ) if _is_ours(name) and name not in _KNOWN]
        return cls(**fields, problems=tuple(problems))


def settings() -> Settings:
    """
    The settings of this process: read from the environment at the first call, and then the same.
    """
    global _settings
    if _settings is None:
        _settings = Settings.from_env()
    return _settings


def switch_on() -> bool:
    """
    Turn the agent on for a program that asks for it in code. False where `CKPT_SENTRY=0` in the environment forbids it.
    """
    global _settings
    current = settings()
    if current.mode != "off":
        return True
    if os.environ.get(PREFIX):
        return False
    _settings = replace(current, mode="on")
    return True


def reset() -> None:
    """
    Forget the settings, so that the next `settings()` reads the environment again. For tests.
    """
    global _settings, _warned
    _settings = None
    _warned = False


def warn_problems() -> None:
    """
    Say the problems of the settings, once in this process, in one warning.

    To the logger "ckpt_sentry" if the host listens to it, else to standard error.
    """
    global _warned
    problems = settings().problems
    if _warned or not problems:
        return
    _warned = True
    warn("ckpt_sentry: " + "; ".join(problems))


def warn(text: str) -> None:
    """
    Warn people: by the logger "ckpt_sentry" if the host listens to it, else on standard error. Credentials are masked.
    """
    # Imported here: this module is loaded when the interpreter starts.
    from ckpt_sentry.masking import mask_text

    text = mask_text(text)
    logger = logging.getLogger("ckpt_sentry")
    if _heard(logger):
        logger.warning(text)
    elif sys.stderr is not None:
        try:
            sys.stderr.write(text + "\n")
        except (OSError, ValueError):
            return


@dataclass(frozen=True, slots=True)
class Origin:
    """
    The value of one variable, as text for people, and where it comes from: "environment" or "default".
    """

    name: str
    value: str
    source: str


def origins(environ: Mapping[str, str] = os.environ) -> tuple[Origin, ...]:
    """
    Every variable that people may set, with its value in force and the source of it.
    """
    found = Settings.from_env(environ)
    return tuple(
        Origin(
            variable.name,
            _text(getattr(found, variable.field)),
            "environment" if _accepted(variable, environ.get(variable.name)) else "default",
        )
        for variable in VARIABLES
        if not variable.internal
    )


def _accepted(variable: Variable, text: str | None) -> bool:
    if text is None:
        return False
    try:
        variable.read(text.strip())
    except ValueError:
        return False
    return True


def _text(value: object) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _heard(logger: logging.Logger) -> bool:
    current: logging.Logger | None = logger
    while current is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


def _is_ours(name: str) -> bool:
    return name == PREFIX or name.startswith(PREFIX + "_")


def _unknown(name: str) -> str:
    # Without the prefix, which makes all of them alike.
    stem = f"{PREFIX}_"
    known = [variable.name.removeprefix(stem) for variable in VARIABLES if not variable.internal]
    nearest = difflib.get_close_matches(name.removeprefix(stem).upper(), known, 1)
    hint = f"; did you mean {stem}{nearest[0]}?" if nearest else ""
    return f"{_cut(name)} is not a setting{hint}"


def _cut(text: str) -> str:
    plain = printable(text)
    return plain if len(plain) <= _LONGEST_VALUE else plain[: _LONGEST_VALUE - 1] + "…"


def printable(text: str) -> str:
    """
    The text with everything that could steer a terminal written as an escape.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _choice(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        word = text.lower() or words[0]
        if word not in words:
            message = f"is none of {', '.join(words)}"
            raise ValueError(message)
        return word

    return read


def _mode(text: str) -> str:
    try:
        return _MODES[text.lower()]
    except KeyError:
        message = "is none of 0, 1, observe, strict"
        raise ValueError(message) from None


def _ratio(text: str) -> float:
    message = "is no number from 0 to 1"
    try:
        number = float(text)
    except ValueError:
        raise ValueError(message) from None
    if not 0 <= number <= 1:
        raise ValueError(message)
    return number


def _seconds(text: str) -> float:
    if text.lower() in {"0", "off"}:
        return math.inf
    message = "is no number of seconds"
    try:
        number = float(text)
    except ValueError:
        raise ValueError(message) from None
    if not number > 0:
        raise ValueError(message)
    return number


def _globs(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _optional(text: str) -> str | None:
    return text or None


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "CKPT_SENTRY",
        "mode",
        "0, 1, observe, strict",
        "1",
        "unset or 0: off. 1: on. observe: on, never raises. strict: raises on every partial load",
        _mode,
    ),
    Variable(
        "CKPT_SENTRY_MIN_COVERAGE",
        "min_coverage",
        "0 to 1",
        "0.99",
        "a load that supplies less of the model than this is refused",
        _ratio,
    ),
    Variable(
        "CKPT_SENTRY_ALLOW_MISSING",
        "allow_missing",
        "globs, comma-separated",
        "nothing",
        "keys of the model that may stay unloaded, such as classifier.*",
        _globs,
    ),
    Variable(
        "CKPT_SENTRY_LOG",
        "log",
        "auto, console, json, stdlib, off",
        "auto",
        "where the lines go. auto: the terminal, where ranks are silent if a launcher speaks for them",
        _choice("auto", "console", "json", "stdlib", "off"),
    ),
    Variable(
        "CKPT_SENTRY_DIR",
        "dir",
        "a folder",
        "a folder for each run under $XDG_STATE_HOME/ckpt_sentry",
        "where the records lie",
        _optional,
    ),
    Variable(
        "CKPT_SENTRY_VERIFY",
        "verify",
        "sample, full, off",
        "sample",
        "compare values of the model with the checkpoint's after the load",
        _choice("sample", "full", "off"),
    ),
    Variable(
        "CKPT_SENTRY_ALIGN",
        "align",
        "off, auto",
        "off",
        "auto: apply the rename rule that was inferred and that all shapes confirm",
        _choice("off", "auto"),
    ),
    Variable(
        "CKPT_SENTRY_STALL_AFTER",
        "stall_after",
        "seconds, or off",
        "300",
        "a load longer than this yields a stall report",
        _seconds,
    ),
    Variable("CKPT_SENTRY_SOCKET", "socket", "a path", "none", "the launcher's socket", _optional, internal=True),
    Variable(
        "CKPT_SENTRY_RUN_ID", "run_id", "text", "none", "the run that this process is part of", _optional, internal=True
    ),
)

_UNREAD = {
    "CKPT_SENTRY_GUARD",
    "CKPT_SENTRY_BOOTSTRAP",
    "CKPT_SENTRY_OTELCOL",
    "CKPT_SENTRY_JAEGER",
}
"""Ours, but no settings: for tests, and what `ckpt-sentry run` tells its own `sitecustomize`."""

_KNOWN = {variable.name for variable in VARIABLES} | _UNREAD

_settings: Settings | None = None
_warned = False
