from __future__ import annotations

import dataclasses
import sys
import time
from typing import NoReturn

import pytest

from ckpt_sentry.session.exceptions import LONGEST_MESSAGE, attach, describe


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    key: str


class GuardedError(Exception):
    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise RuntimeError(name)


@pytest.mark.parametrize("kind", [ValueError, FrozenError, GuardedError])
def test_the_report_is_attached_whatever_the_class_allows(kind: type[Exception]) -> None:
    error, report = kind("x"), object()
    attach(error, "a note", report)

    assert error.__dict__["ckpt_sentry"] is report
    if sys.version_info >= (3, 11) and isinstance(error, ValueError):
        assert error.__notes__ == ["a note"]


def test_a_text_of_any_length_is_described_at_once() -> None:
    error = ValueError("s3://AKIA:hunter2@bucket 'token': dict_keys([ " * 500_000)
    began = time.process_time()
    described = describe(error, "plan")

    assert time.process_time() - began < 1
    assert len(described.message) == LONGEST_MESSAGE
    assert "hunter2" not in described.message
