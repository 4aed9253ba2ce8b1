from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.integrations.accelerate.facts import arguments_of, read_call
from ckpt_sentry.model import model_state
from tests.integrations.nets import before_load

ANY = Entry((1,), "float32")


def loader(model, checkpoint, device_map=None, **options):
    raise NotImplementedError


def test_a_call_is_read_by_the_names_of_its_parameters(tmp_path):
    call = read_call(loader, (nn.Identity(), tmp_path), {"device_map": "auto"})

    assert (call.entry_point, call.path, call.device_map) == ("loader", str(tmp_path), "auto")


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3, 4), {}), ((1, None), {})])
def test_a_call_that_does_not_fit_is_left_alone(args, kwargs):
    assert read_call(loader, args, kwargs) is None


def test_arguments_that_do_not_fit():
    assert arguments_of(loader, (1,), {}) is None


def test_wrappers_are_left_out_of_names_where_the_model_has_them():
    inner = nn.Sequential(nn.Linear(1, 1))
    compiled = torch.compile(inner, backend="eager")
    names = list(model_state.inventory(compiled).entries)

    assert model_state.bare_names(compiled, names) == {"0.weight": "_orig_mod.0.weight", "0.bias": "_orig_mod.0.bias"}
    assert model_state.bare_names(inner, ["_orig_mod.0.weight"]) == {}


def test_activation_checkpointing_leaves_no_trace_in_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.ModuleDict({"layer": checkpoint_wrapper(nn.Linear(1, 1))})

    assert set(model_state.inventory(model).entries) == set(model.state_dict())


@pytest.mark.parametrize("register", [before_load, nn.Module.register_load_state_dict_post_hook])
def test_load_hooks_are_seen(register):
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    assert not model_state.has_load_hooks(model)

    register(model[0], lambda *_: None)

    assert model_state.has_load_hooks(model)


def test_a_class_with_a_loader_of_its_own_is_seen():
    class Own(nn.Linear):
        def _load_from_state_dict(self, *args):
            super()._load_from_state_dict(*args)

    assert model_state.has_load_hooks(nn.Sequential(Own(1, 1)))


class Declaring(nn.Module):
    _keys_to_ignore_on_load_missing = (r"\.table$", "(")
    _keys_to_ignore_on_load_unexpected = (r"^old\.",)

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.tables = nn.ParameterDict({"table": torch.zeros(1), "other": torch.zeros(1)})


def test_what_may_be_missing_by_the_models_word_is_not_wanted():
    model = Declaring()
    full = model_state.inventory(model)

    assert set(full.entries) - set(model_state.without_needless(model, full, {}).entries) == {
        "norm.num_batches_tracked",
        "tables.table",
    }
    assert "tables.table" in model_state.without_needless(model, full, {"tables.table": ANY}).entries
    assert model_state.ignores_unexpected(model)("old.weight")
    assert not model_state.ignores_unexpected(model)("cold.old.weight")


def test_an_adapters_own_keys_are_all_that_is_wanted():
    model = nn.ModuleDict({"base": nn.Linear(1, 1), "lora_A": nn.Linear(1, 1)})
    full = model_state.inventory(model)

    adapter = {"lora_A.weight": ANY}
    assert set(model_state.without_needless(model, full, adapter).entries) == {"lora_A.weight", "lora_A.bias"}
    assert model_state.without_needless(model, full, adapter | {"base.bias": ANY}) is full


def test_ties_survive_the_loss_of_their_owner():
    model = nn.ModuleDict({"table": nn.Linear(1, 1), "head": nn.Linear(1, 1), "tail": nn.Linear(1, 1)})
    model["head"].weight = model["tail"].weight = model["table"].weight
    model._keys_to_ignore_on_load_missing = ["table"]

    left = model_state.without_needless(model, model_state.inventory(model), {})

    assert left.ties == {"tail.weight": "head.weight"}
