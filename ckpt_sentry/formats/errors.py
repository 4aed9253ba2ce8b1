"""
What can be wrong with a file that is read here: one exception that carries a finding's code.
"""

from __future__ import annotations

from ckpt_sentry.core.report import Finding, Level


def plural(count: int, noun: str) -> str:
    """
    Write a count and its noun: "1 key", "1,200 keys".
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class HeaderError(ValueError):
    """
    A file's header cannot be read, or says something that no loader accepts.

    `code` is a finding code, `text` a sentence that names the file, `next` what to do about it. `level` is "info" where
    a loader may read the file all the same.
    """

    def __init__(self, code: str, text: str, next_step: str | None = None, *, level: Level = "error") -> None:
        super().__init__(text)
        self.code = code
        self.level: Level = level
        self.text = text
        self.next = next_step

    def finding(self) -> Finding:
        """
        Return the same as a finding.
        """
        return Finding(self.code, self.level, self.text, self.next)
