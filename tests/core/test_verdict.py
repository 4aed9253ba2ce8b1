"""One word for a load."""

from __future__ import annotations

import pytest

from ckpt_sentry.core.report import Coverage, Finding, KeyList, LoadError, Proof
from ckpt_sentry.core.verdict import verdict

WRONG = Proof(3, KeyList(1, ("a",)))


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({}, "ok"),
        ({"coverage": Coverage(1.0, 1.0)}, "ok"),
        ({"coverage": Coverage(1.0, 1.0), "proof": Proof(3)}, "ok"),
        ({"coverage": Coverage(1.0, 0.99)}, "partial"),
        ({"coverage": Coverage(0.5, 1.0)}, "partial"),
        ({"coverage": Coverage(0.1, 0.0)}, "partial"),
        ({"coverage": Coverage(0.0, 0.0)}, "no_op"),
        ({"coverage": Coverage(0.0, 1.0)}, "no_op"),
        ({"coverage": Coverage(1.0, 1.0), "proof": WRONG}, "wrong_values"),
        ({"coverage": Coverage(0.5, 0.5), "proof": WRONG}, "wrong_values"),
        ({"findings": (Finding("non_finite_values", "warning", ""),)}, "wrong_values"),
        ({"findings": (Finding("unexpected_keys", "info", ""),)}, "ok"),
        ({"error": LoadError("E", ""), "coverage": Coverage(0.0, 0.0), "proof": WRONG}, "failed"),
    ],
)
def test_verdict(facts, word):
    assert verdict(**facts) == word
