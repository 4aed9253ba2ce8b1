from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpt_sentry import Unified, unify_keys
from ckpt_sentry.core.examine import examine
from ckpt_sentry.core.report import Coverage
from ckpt_sentry.model.unify import align, inventory_of
from tests.integrations.nets import Net, equal, renamed, values

WHOLE = Coverage(1.0, 1.0)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "base_model.model."])
def test_a_prefix_is_inferred_and_stripped(prefix: str) -> None:
    before = renamed(prefix)
    done = unify_keys(before, Net())
    assert (done.rule, done.count, done.coverage) == (f'strip the prefix "{prefix}"', 10, WHOLE)
    assert list(done.state_dict) == list(values())
    assert all(done.state_dict[key] is before[prefix + key] for key in done.state_dict)
    assert list(before) == [prefix + key for key in values()]
    Net().load_state_dict(done.state_dict)


@pytest.mark.parametrize(
    "model", [Net(), values(), list(values()), dict.fromkeys(values())], ids=["module", "dict", "list", "names"]
)
def test_the_model_may_be_given_in_any_form(model: object) -> None:
    done = unify_keys(renamed("module."), model)
    assert (list(done.state_dict), done.coverage) == (list(values()), WHOLE)


def test_names_alone_of_a_state_dict_do_as_well() -> None:
    assert unify_keys(dict.fromkeys(renamed("module.")), Net()).count == 10


def test_a_missing_prefix_is_added() -> None:
    done = unify_keys(values(), renamed("model."))
    assert (done.rule, list(done.state_dict)) == ('add the prefix "model."', list(renamed("model.")))


def test_other_names_of_components_are_swapped() -> None:
    given = {
        key.replace("norm.weight", "norm.gamma").replace("norm.bias", "norm.beta"): v for key, v in values().items()
    }
    done = unify_keys(given, Net())
    assert (done.count, done.coverage, set(done.state_dict)) == (4, WHOLE, set(values()))


@pytest.mark.parametrize("extra", [{}, {"ema.head.weight": torch.zeros(1)}], ids=["exact", "more"])
def test_nothing_to_do_is_no_error(extra: dict[str, torch.Tensor]) -> None:
    before = {**values(), **extra}
    done = unify_keys(before, Net())
    assert (done.rule, done.count, done.coverage, list(done.state_dict)) == (None, 0, WHOLE, list(before))
    assert done.state_dict is not before


def test_a_gap_without_anything_to_fill_it_is_no_error() -> None:
    before = {key: value for key, value in values().items() if "head" not in key}
    assert unify_keys(before, Net()).coverage.keys == 0.9


def test_a_state_dict_one_level_down_is_said() -> None:
    with pytest.raises(ValueError, match="one level down: pass what is under 'state_dict'"):
        unify_keys({"state_dict": values(), "epoch": 3}, Net())


def test_keys_that_no_rule_explains_are_said() -> None:
    with pytest.raises(ValueError, match=r"no rule leads .* \(0 % of its keys are there\).*unexpected are other"):
        unify_keys({"other": torch.zeros(2)}, Net())


def test_an_ambiguous_rule_is_not_applied() -> None:
    two = {f"{side}.{part}.weight": torch.zeros(2, 2) for side in ("left", "right") for part in ("a", "b", "c")}
    with pytest.raises(ValueError, match=r"more than one rule fits|no rule leads"):
        unify_keys(two, {f"{part}.weight": torch.zeros(2, 2) for part in ("a", "b", "c")})


def test_given_prefixes_need_no_model() -> None:
    done = unify_keys(renamed("a."), strip_prefix="a.", add_prefix="b.")
    assert (done.rule, done.count, done.coverage) == ('the prefix "a." becomes "b."', 10, None)
    assert list(done.state_dict) == list(renamed("b."))


def test_given_prefixes_are_judged_where_there_is_a_model() -> None:
    assert unify_keys(renamed("a."), Net(), strip_prefix="a.").coverage == WHOLE
    assert unify_keys(renamed("a."), Net(), strip_prefix="b.").coverage == Coverage(0.0, 0.0)


def test_keys_without_the_prefix_stay() -> None:
    assert list(unify_keys({"a.x": 1, "y": 2}, strip_prefix="a.").state_dict) == ["x", "y"]


def test_two_keys_never_become_one() -> None:
    with pytest.raises(ValueError, match="two keys of the state dict would become x"):
        unify_keys({"a.x": 1, "x": 2}, strip_prefix="a.")


def test_versions_of_modules_move_along() -> None:
    wrapped = torch.nn.ModuleDict({"module": Net(counter=True)}).state_dict()
    moved = unify_keys(wrapped, Net(counter=True)).state_dict
    assert moved._metadata["bn"] == {"version": 2}


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a model"):
        unify_keys(values())
    with pytest.raises(TypeError, match="one text is no set of keys"):
        unify_keys(values(), "embed.weight")


def test_align_wants_the_minimum() -> None:
    part = {f"module.{key}": value for key, value in values().items() if "head" not in key}
    found = examine(inventory_of(Net()), inventory_of(part))
    assert align(part, found, 0.99) is None
    done = align(part, found, 0.5)
    assert isinstance(done, Unified)
    assert (done.count, "embed.weight" in done.state_dict) == (9, True)


@given(
    keys=st.lists(st.from_regex(r"[a-z]{1,4}(\.[a-z0-9]{1,3}){0,3}", fullmatch=True), unique=True, max_size=20),
    strip=st.sampled_from(["", "a.", "module."]),
    add=st.sampled_from(["", "b.", "model."]),
)
def test_given_prefixes_keep_every_value(keys: list[str], strip: str, add: str) -> None:
    before = OrderedDict((strip + key, number) for number, key in enumerate(keys))
    after = unify_keys(before, strip_prefix=strip, add_prefix=add).state_dict
    assert list(after.items()) == [(add + key, number) for number, key in enumerate(keys)]


def test_what_comes_out_is_the_state_dict_itself() -> None:
    before, model = renamed("module."), Net()
    done = unify_keys(before, model)
    assert isinstance(done, Mapping)
    assert (len(done), list(done), done["head.weight"]) == (10, list(values()), before["module.head.weight"])
    assert model.load_state_dict(done) == ([], [])
    assert equal(model, values())
    gathered = {"epoch": torch.tensor(3)}
    gathered.update(done)
    assert [*gathered] == ["epoch", *values()]
    assert dict(done) == done.state_dict


def test_the_versions_of_modules_reach_the_load() -> None:
    saved = Net(counter=True).state_dict()
    wrapped = OrderedDict((f"module.{key}", value) for key, value in saved.items())
    assert unify_keys(wrapped, Net(counter=True))._metadata is None
    wrapped._metadata = OrderedDict((f"module.{path}", version) for path, version in saved._metadata.items())
    assert unify_keys(wrapped, Net(counter=True))._metadata["bn"] == {"version": 2}


def test_versions_of_modules_move_along_with_what_is_around_them() -> None:
    class Versioned(nn.Module):
        _version = 2

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    wrapped, plain = nn.ModuleDict({"module": nn.ModuleDict({"part": Versioned()})}), nn.ModuleDict()
    plain["part"] = Versioned()
    for done in (unify_keys(wrapped.state_dict(), plain), unify_keys(wrapped.state_dict(), strip_prefix="module.")):
        assert {path: held["version"] for path, held in done.state_dict._metadata.items()} == {
            "": 1,
            "part": 2,
            "part.inner": 1,
        }
    added = unify_keys(plain.state_dict(), add_prefix="module.").state_dict._metadata
    assert added["module.part"] == {"version": 2}
