"""
Which lines of a stack are the program's own, and which belong to a library.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

_INSTALLED: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]")
_OWN: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD: Final = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def is_library(file: str) -> bool:
    """
    Whether a file is installed, frozen or generated rather than the program's own. By its name alone.
    """
    if file.startswith("<") and file != "<stdin>":
        return True
    return file.startswith((_OWN, _STANDARD)) or _INSTALLED.search(file) is not None


def innermost(traceback: TracebackType | None) -> str | None:
    """
    The innermost line of the program's own in a traceback, as "train.py:44"; None where there is none.
    """
    found = None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not is_library(file):
            found = f"{os.path.basename(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
