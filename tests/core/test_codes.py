"""
The catalogue, the page that is made of it, and the codes in the source hold together.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ckpt_sentry.core import codes
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.inventory import Entry, Inventory

PACKAGE = Path(codes.__file__).parents[1]
PAGE = PACKAGE.parent / "docs" / "findings.md"


def makes_a_finding(function: ast.expr) -> bool:
    return getattr(function, "id", "").endswith("Finding") or getattr(function, "attr", "") == "finding"


def said() -> set[str]:
    """
    Every code that stands as a literal where a finding is made.
    """
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and makes_a_finding(node.func):
                found |= {
                    one.value
                    for one in ast.walk(node.args[0])
                    if isinstance(one, ast.Constant) and re.fullmatch(r"[a-z]+(_[a-z]+)+", str(one.value))
                }
    return found


def test_every_code_that_is_said_stands_in_the_catalogue() -> None:
    assert said() - codes.BY_NAME.keys() == set()


def test_every_code_of_the_catalogue_stands_in_the_source() -> None:
    source = "".join(file.read_text() for file in PACKAGE.rglob("*.py") if file.name != "codes.py")
    stems = {name.rpartition("_")[0] for name in codes.BY_NAME if name.endswith(("_missing", "_extra"))}
    assert [name for name in codes.BY_NAME if f'"{name}"' not in source and name.rpartition("_")[0] not in stems] == []


def test_codes_are_named_once_and_explain_known_ones() -> None:
    names = [code.name for code in codes.CATALOGUE]
    assert len(names) == len(set(names))
    assert set().union(*(code.explains for code in codes.CATALOGUE)) <= set(names)


def test_causes_stand_before_what_they_explain() -> None:
    for code in codes.CATALOGUE:
        assert all(codes.PLACE[code.name] < codes.PLACE[other] for other in code.explains - {"no_overlap"})


def test_meanings_are_sentences() -> None:
    for code in codes.CATALOGUE:
        assert code.meaning[0].isupper(), code.name
        assert code.meaning.endswith((".", "?")), code.name


def test_the_page_is_that_of_the_catalogue() -> None:
    assert PAGE.read_text() == codes.as_markdown(), "python -m ckpt_sentry.core.codes > docs/findings.md"


def test_a_sentence_in_its_three_lengths() -> None:
    found = codes.finding("missing_keys", "warning", count=3, listed="a{0-2}", allowed=2)
    assert found.text == "3 keys missing from the checkpoint: a{0-2}. 2 of them may be."
    assert codes.sentence(found.code, found.text, found.facts) == (
        found.text,
        "3 keys missing from the checkpoint: a{0-2}",
        "3 keys missing from the checkpoint, 2 of which may be",
    )
    assert codes.fact(found.facts, "allowed") == "2"
    assert codes.fact(found.facts, "no such") is None


def test_facts_of_another_version_leave_the_text_as_it_is() -> None:
    for facts in ((), (("number", "3"),), (("count", "many"), ("listed", "a"))):
        assert codes.sentence("missing_keys", "So it is.", facts) == ("So it is.",) * 3
    assert codes.sentence("of_tomorrow", "So it is.", (("count", "1"),)) == ("So it is.",) * 3


def test_a_finding_is_made_of_all_its_facts_or_not_at_all() -> None:
    with pytest.raises(KeyError):
        codes.finding("unexpected_keys", "info", listed="a")


WEIGHT, OTHER, OBJECT = Entry((4, 4), "float32"), Entry((5, 4), "float16"), Entry(None, None)


@pytest.mark.parametrize(
    ("model", "saved", "said"),
    [
        (
            {"a": WEIGHT, "b": WEIGHT, "c": OBJECT, "d": WEIGHT},
            {"b": OTHER, "c": WEIGHT, "d": Entry((4, 4), "float16")},
            {"missing_keys", "shape_mismatch", "type_mismatch", "dtype_cast", "low_coverage"},
        ),
        ({"a": WEIGHT, "b": WEIGHT}, {"m.a": WEIGHT, "m.b": WEIGHT}, {"renamed_keys", "no_overlap", "unexpected_keys"}),
        ({"a": WEIGHT}, {}, {"no_overlap"}),
    ],
)
def test_sentences_on_keys_are_made_of_facts(model: dict[str, Entry], saved: dict[str, Entry], said: set[str]) -> None:
    found = examine(Inventory(model), Inventory(saved), minimum=0.99).findings
    assert {one.code for one in found} >= said
    for one in found:
        assert codes.sentence(one.code, "", one.facts).text == one.text, one.code


def test_what_codes_are_to_each_other() -> None:
    assert {"renamed_keys", "flat_optimizer", "optimizer_names_differ", "optimizer_class_changed"} == codes.OTHER_NAMES
    assert codes.of_verdict("diverged") == {"paths_differ", "steps_differ"}
    for code in codes.CATALOGUE:
        assert code.always_explains <= code.explains, code.name
        assert code.because_of <= codes.BY_NAME.keys(), code.name
