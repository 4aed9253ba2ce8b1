"""Optimizer states that do not fit, in the names that torch itself gives them."""

from __future__ import annotations

import pytest

from ckpt_sentry.core.diff import diff
from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.core.optimizer import Diagnosis, diagnose

torch = pytest.importorskip("torch")
state_dicts = pytest.importorskip("torch.distributed.checkpoint.state_dict")
nested_dict = pytest.importorskip("torch.distributed.checkpoint._nested_dict")


def saved(name, *, flat, bias=True, **settings):
    """What DCP stores for a small model and its optimizer, under its own names."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=bias) for _ in range(2))
    optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    options = state_dicts.StateDictOptions(flatten_optimizer_state_dict=flat)
    state = state_dicts.get_optimizer_state_dict(model, optimizer, options=options)
    values, _ = nested_dict.flatten_state_dict({"model": model.state_dict(), "optim": state})
    return {key: Entry(tuple(value.shape) if hasattr(value, "shape") else None, None) for key, value in values.items()}


def diagnosed(model, checkpoint):
    return diagnose(model, checkpoint, diff(model, checkpoint))


@pytest.mark.parametrize("flat", [True, False])
def test_flat_against_nested(flat):
    found = diagnosed(saved("AdamW", flat=not flat), saved("AdamW", flat=flat))
    (finding,) = found.findings
    assert (finding.code, finding.level) == ("flat_optimizer", "error")
    assert "optim.param_groups.0.lr" in finding.text
    assert "optim.param_groups.0.weight.lr" in finding.text
    assert f"flatten_optimizer_state_dict={flat}" in finding.next


def test_all_keys_of_the_optimizer_are_explained():
    model, checkpoint = saved("AdamW", flat=False), saved("AdamW", flat=True)
    checkpoint["model.extra"] = Entry((1,), None)
    found = diagnose(model, checkpoint, diff(model, checkpoint))
    assert found.explained == model.keys() ^ checkpoint.keys() - {"model.extra"}


@pytest.mark.parametrize("flat", [True, False])
def test_another_class(flat):
    found = diagnosed(saved("AdamW", flat=flat), saved("SGD", flat=flat, momentum=0.9))
    (finding,) = found.findings
    assert finding.code == "optimizer_class_changed"
    assert finding.text == (
        "The optimizer was SGD when the checkpoint was saved and is AdamW or Adam now "
        "(dampening, momentum, momentum_buffer against amsgrad, betas, decoupled_weight_decay)."
    )


def test_both_at_once():
    found = diagnosed(saved("SGD", flat=False), saved("AdamW", flat=True))
    assert [finding.code for finding in found.findings] == ["flat_optimizer", "optimizer_class_changed"]


CLASSES = ["SGD", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_is_known_by_its_names(name):
    other = "SGD" if name != "SGD" else "Rprop"
    (finding,) = diagnosed(saved(other, flat=True), saved(name, flat=True)).findings
    assert f"was {name}" in finding.text
    assert f"is {other} now" in finding.text


@pytest.mark.parametrize("flat", [True, False])
def test_adam_and_adamw_have_the_same_names(flat):
    assert diagnosed(saved("AdamW", flat=flat), saved("Adam", flat=flat)) == Diagnosis()


def test_more_parameters_are_no_other_optimizer():
    assert diagnosed(saved("AdamW", flat=True), saved("AdamW", flat=True, bias=False)) == Diagnosis()


def test_the_state_alone_tells_the_class():
    model = {f"state.{i}.{slot}": Entry((2,), None) for i in range(2) for slot in ("exp_avg", "exp_avg_sq", "step")}
    checkpoint = {f"state.{i}.momentum_buffer": Entry((2,), None) for i in range(2)}
    (finding,) = diagnosed(model, checkpoint).findings
    assert finding.code == "optimizer_class_changed"


def test_models_without_an_optimizer():
    model = {"train_state.step": Entry((), None), "a.weight": Entry((2,), None)}
    assert diagnosed(model, {"b.weight": Entry((2,), None)}) == Diagnosis()
