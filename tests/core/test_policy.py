from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.core.policy import MOST_GLOBS, Policy, allowing
from ckpt_sentry.core.report import Coverage

KEYS = st.lists(
    st.lists(st.sampled_from(["a", "b", "0", "1", "w[x]"]), min_size=1, max_size=4).map(".".join), unique=True
)


@pytest.mark.parametrize(
    ("mode", "judged", "tolerated", "reason"),
    [
        ("on", 1.0, False, None),
        ("on", 0.99, False, None),
        ("on", 0.98, False, "too_little"),
        ("on", 0.98, True, None),
        ("on", 0.0, False, "nothing"),
        ("on", 0.0, True, None),
        ("observe", 0.0, False, None),
        ("off", 0.0, False, None),
        ("strict", 0.995, False, "partial"),
        ("strict", 0.995, True, "partial"),
        ("strict", 0.0, True, "nothing"),
        ("strict", 1.0, False, None),
    ],
)
def test_when_a_coverage_is_refused(mode, judged, tolerated, reason):
    assert Policy(mode=mode, tolerated=tolerated).refusal(Coverage(judged, 1.0)) == reason


def test_nothing_is_refused_that_could_not_be_counted():
    assert Policy(mode="strict").refusal(None) is None


@pytest.mark.parametrize(("mode", "reason"), [("on", "wrong_values"), ("strict", "wrong_values"), ("observe", None)])
def test_when_values_are_refused(mode, reason):
    assert Policy(mode=mode).disproof(1) == reason
    assert Policy(mode=mode).disproof(0) is None


@pytest.mark.parametrize(
    ("missing", "kept", "globs"),
    [
        (["score.weight", "score.bias"], ["body.weight"], ("score.*",)),
        (["head.0.w", "head.1.w"], ["body.0.w"], ("head.*",)),
        (["layers.0.norm.w", "layers.1.norm.w"], ["layers.0.mlp.w", "layers.1.mlp.w"], ("layers.*.norm.*",)),
        (["layers.0.norm.w"], ["layers.0.mlp.w", "layers.1.norm.w"], ("layers.0.norm.*",)),
        (["layers.1.w"], ["layers.0.w"], ("layers.1.*",)),
        (["gate"], ["body.w"], ("gate",)),
        (["a[0]"], ["a0"], ("a[[]0]",)),
        (["a.w"], [], ()),
        ([], ["a.w"], ()),
        (["a.w", "b.w", "c.w", "d.w", "e.w"], ["f.w"], ()),
    ],
)
def test_the_setting_that_allows_a_gap(missing, kept, globs):
    assert allowing(missing, [*missing, *kept]) == globs


@given(KEYS, st.data())
def test_a_setting_allows_the_gap_and_nothing_else(keys, data):
    missing = data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
    globs = allowing(missing, keys)

    assert len(globs) <= MOST_GLOBS
    if globs:
        matched = {key for key in keys if any(fnmatch.fnmatchcase(key, glob) for glob in globs)}
        assert matched == set(missing)
