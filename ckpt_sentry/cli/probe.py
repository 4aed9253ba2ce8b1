"""
What `ckpt-sentry status --probe` does: every host library imported, every patch applied, and tiny loads made through
them, in a process of its own. What the agent then reports of these loads shows what it sees here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

from ckpt_sentry import config, integrations
from ckpt_sentry.collector import records
from ckpt_sentry.core.report import LoadReport
from ckpt_sentry.integrations import trials
from ckpt_sentry.patching import ledger
from ckpt_sentry.transport.events import LoadFinished

State = Literal["compared", "not compared", "failed", "absent"]

_MARK: Final = "ckpt_sentry.probe "
"""Before the line that the process of the probe has to say: the libraries print as well."""
_SECONDS: Final = 600


class Trial(NamedTuple):
    """
    What came of one tiny load. "compared": the agent has reported what it had to; "not compared": it has not, `detail`
    says what it reported; "failed": the load itself did not end as it should; "absent": its library is not there.
    """

    load: str
    state: State
    detail: str


class Probe(NamedTuple):
    """
    What became of each patch, which of the applied ones the tiny loads came through, and what came of these.
    """

    patches: tuple[ledger.PatchStatus, ...]
    passed: frozenset[str]
    trials: tuple[Trial, ...]


def probe() -> Probe:
    """
    Make the probe in a process of its own, whose settings are the defaults.

    Raises:
        RuntimeError: it did not come to its end; the text is what it said last.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith((config.PREFIX, "OTEL_"))}
    with tempfile.TemporaryDirectory(prefix="ckpt-sentry-probe-") as folder:
        own = {f"{config.PREFIX}_DIR": str(Path(folder, "records")), f"{config.PREFIX}_LOG": "off"}
        done = subprocess.run(  # noqa: S603 - this very package
            [sys.executable, "-m", __name__, folder],
            env=kept | own | {config.PREFIX: "observe"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    said = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if said is None:
        raise RuntimeError((done.stderr or done.stdout).strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    found = json.loads(said.removeprefix(_MARK))
    return Probe(
        tuple(ledger.PatchStatus(*row) for row in found["patches"]),
        frozenset(found["passed"]),
        tuple(Trial(*row) for row in found["trials"]),
    )


def main(folder: Path) -> None:
    """
    The process of the probe.
    """
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        patches = _applied()
        with _watched() as passed:
            made = [_tried(name, make, folder) for name, make in trials.TRIALS.items()]
    print(_MARK + json.dumps({"patches": patches, "passed": sorted(passed), "trials": made}), flush=True)  # noqa: T201


def _applied() -> list[ledger.PatchStatus]:
    """
    The patches after an import of every host module. A module that cannot be imported is "absent".
    """
    ledger.install(integrations.seams())
    missing: dict[str, str] = {}
    for module in dict.fromkeys(module for module, _ in integrations.seams()):
        try:
            importlib.import_module(module)
        except Exception as error:
            missing[module] = f"{type(error).__name__}: {error}"
    return [
        status._replace(state=ledger.ABSENT, detail=missing[status.attribute])
        if status.attribute in missing
        else status
        for status in ledger.status()
    ]


@contextlib.contextmanager
def _watched() -> Iterator[set[str]]:
    """
    The names of the patches that are called meanwhile. Each wrapper has its original as a variable of that name.
    """
    names = {id(_plain(patch.original)): patch.name for patch in ledger.applied()}
    codes = {code for patch in ledger.applied() if (code := getattr(_plain(patch.replacement), "__code__", None))}
    passed: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            name = names.get(id(frame.f_locals.get("original")))
            if name is not None:
                passed.add(name)

    sys.setprofile(called)
    try:
        yield passed
    finally:
        sys.setprofile(None)


def _plain(function: Any) -> Any:
    return getattr(function, "__func__", function)


def _tried(name: str, make: trials.Make, folder: Path) -> Trial:
    """
    Make one load, or some, in a folder of its own.
    """
    own = folder / name.replace("(", "_").replace("=", "_").rstrip(")")
    own.mkdir()
    try:
        wrong = next((wrong for missing, keys in make(own) if (wrong := _wrong(missing, keys))), "")
    except ModuleNotFoundError as error:
        return Trial(name, "absent", str(error))
    except BaseException as error:
        return Trial(name, "failed", f"{type(error).__name__}: {error}".splitlines()[0])
    return Trial(name, "not compared" if wrong else "compared", wrong)


def _reported() -> LoadReport | None:
    """
    The report of the last load.
    """
    source = Path(os.environ[f"{config.PREFIX}_DIR"])
    events = [event for sourced in records.read(source) for event in sourced.events] if source.exists() else []
    return next((event.report for event in reversed(events) if isinstance(event, LoadFinished)), None)


def _wrong(missing: tuple[str, ...], keys: float) -> str:
    """
    In what the last report differs from what it should hold.
    """
    report = _reported()
    if report is None:
        return "nothing was reported"
    if report.missing.keys != missing:
        return f"missing keys: {', '.join(report.missing.keys) or 'none'}; there are: {', '.join(missing) or 'none'}"
    if report.coverage is None or round(report.coverage.keys, 2) != keys:
        return "coverage: " + ("not known" if report.coverage is None else f"{report.coverage.keys:.0%} of keys")
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
