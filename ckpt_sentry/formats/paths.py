"""
Paths as a report prints them.
"""

from __future__ import annotations

import re
from typing import Final

from ckpt_sentry.core.escape import shown

_FOLD_SYNTAX: Final = re.compile(r"\\([{},])")


def shown_path(path: str) -> str:
    """
    A path as a report may print it: credentials masked, control characters escaped, cut at 300 characters.
    """
    return _FOLD_SYNTAX.sub(r"\1", shown(path))
