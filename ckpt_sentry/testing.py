"""
For the tests of programs that load checkpoints: what a failure has to say.

```
with pytest.raises(dcp.CheckpointException) as raised:
    load(model)
check_error_text(raised.value)
```
"""

from __future__ import annotations

import re
from typing import Any

from ckpt_sentry.api.dcp import DCPLoadError
from ckpt_sentry.core.report import LoadReport

_OPAQUE = (
    ("a generator", re.compile(r"<(?:async_)?generator")),
    ("a dict view", re.compile(r"\bo?dict_(?:keys|values|items)\(")),
    ("an address", re.compile(r"\b(?:object )?at 0x[0-9a-fA-F]+")),
)


def check_error_text(error: BaseException) -> None:
    """
    Demand that the text of an error says what happened: no generator, dict view or address in it, and, where it comes
    from a checkpoint load, the rank, the step and the path, and both shapes of every mismatch.

    The text is that of the error and of its notes (PEP 678; on Python 3.10 that of the attached report).

    :raises AssertionError: with everything that the text lacks.
    """
    faults = faults_of(error)
    if faults:
        raise AssertionError(f"{type(error).__name__}: {'; '.join(faults)}\n{text_of(error)}")


def text_of(error: BaseException) -> str:
    """
    What a person reads of an error: its text and its notes.
    """
    notes = getattr(error, "__notes__", None)
    report = getattr(error, "ckpt_sentry", None)
    if notes is None and isinstance(report, LoadReport):
        from ckpt_sentry.render.note import note

        notes = [note(report)]
    return "\n".join([str(error), *(notes or ())])


def faults_of(error: BaseException) -> list[str]:
    """
    What the text of an error lacks, or has too much of; see `check_error_text`.
    """
    text = text_of(error)
    faults = [f"it shows {what}" for what, pattern in _OPAQUE if pattern.search(text)]
    report: Any = getattr(error, "ckpt_sentry", None)
    if isinstance(error, DCPLoadError):
        faults += _place(text, error.rank, error.checkpoint_step, error.path)
        for one in error.shape_conflicts:
            faults += _shapes(text, one.key, one.expected, one.actual)
    elif isinstance(report, LoadReport):
        faults += _place(text, report.identity.rank, report.step, report.path)
        for item in report.mismatched:
            faults += _shapes(text, item.keys, item.model_shape, item.checkpoint_shape)
    else:
        faults.append("no report is attached: the load was not watched")
    return faults


def _place(text: str, rank: int, step: int | None, path: str | None) -> list[str]:
    wanted = {
        f"rank {rank}": f"rank {rank}",
        "the step": f"step {'unknown' if step is None else step}",
        "the path": path or "no path",
    }
    return [f"it does not say {what}" for what, words in wanted.items() if words not in text]


def _shapes(text: str, keys: str, *shapes: tuple[int, ...]) -> list[str]:
    # A list that was cut says how many it leaves out.
    if re.search(r"and [\d,]+ more", text):
        return []
    return [f"it does not say the shape {list(shape)} of {keys}" for shape in shapes if str(list(shape)) not in text]
