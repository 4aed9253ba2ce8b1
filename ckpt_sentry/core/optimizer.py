"""
Optimizer states that do not fit: flat against nested, by number against by name, or of another class.

The two forms are those of `torch.distributed.checkpoint.state_dict` (`flatten_optimizer_state_dict`), as DCP flattens
them: nested `optim.param_groups.0.lr`, flat `optim.param_groups.layers.0.weight.lr`. The state has the same names in
both, `optim.state.layers.0.weight.exp_avg`; `Optimizer.state_dict` counts the parameters, `optim.state.0.exp_avg`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

from ckpt_sentry.core.diff import Diff
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import dataclass, field

_GROUP = re.compile(r"(?:(?P<root>.*)\.)?param_groups\.(?P<of>.+)\.(?P<option>[^.]+)")
_STATE = re.compile(r"(?:(?P<root>.*?)\.)?state\.(?P<of>.+)\.(?P<slot>[^.]+)")

_BY_MARK: Final = (
    # What only one class of torch.optim (2.13) has, options and slots alike; the first that fits decides.
    ("Muon", {"ns_steps", "ns_coefficients"}),
    ("NAdam", {"momentum_decay", "mu_product"}),
    ("Adamax", {"exp_inf"}),
    ("Adagrad", {"initial_accumulator_value", "lr_decay", "sum"}),
    ("Adadelta", {"rho", "acc_delta"}),
    ("Adafactor", {"beta2_decay", "row_var", "col_var"}),
    ("RMSprop", {"centered", "square_avg"}),
    ("Rprop", {"etas", "step_sizes", "step_size"}),
    ("ASGD", {"lambd", "t0", "ax"}),
    ("LBFGS", {"history_size", "tolerance_grad"}),
    # Adam and AdamW have the same names since AdamW is an Adam with decoupled_weight_decay.
    ("AdamW or Adam", {"amsgrad", "max_exp_avg_sq"}),
    ("SGD", {"dampening"}),
)
_BY_SLOT: Final = (("AdamW or Adam", "exp_avg_sq"), ("SGD", "momentum_buffer"), ("Lion", "exp_avg"))
_EVERY_OPTION: Final = frozenset({"lr", "weight_decay", "foreach", "maximize", "differentiable", "fused", "capturable"})

GET: Final = "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
"""It names parameters, and makes a state where there is none yet (`_init_optim_state`)."""

_Form = Literal["flat", "nested"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """
    What is wrong with optimizer states, and the keys that this explains: no rename is to be sought among them.
    """

    findings: tuple[Finding, ...] = ()
    explained: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Optimizer:
    """
    What the keys of one side tell about the optimizer under one root.
    """

    options: set[str] = field(default_factory=set)
    slots: set[str] = field(default_factory=set)
    forms: dict[_Form, str] = field(default_factory=dict)
    names: dict[bool, str] = field(default_factory=dict)
    """A key of the state that names its parameter (True), and one that counts it (False), as far as there are any."""

    @property
    def is_by_name(self) -> bool | None:
        return next(iter(self.names)) if len(self.names) == 1 else None

    @property
    def form(self) -> _Form | None:
        return next(iter(self.forms)) if len(self.forms) == 1 else None

    @property
    def kind(self) -> str | None:
        names = self.options | self.slots
        for kind, marks in _BY_MARK:
            if names & marks:
                return kind
        if {"betas", "decoupled_weight_decay"} <= names:
            return "RAdam"
        return next((kind for kind, slot in _BY_SLOT if slot in self.slots), None)


def diagnose(model: Iterable[str], checkpoint: Iterable[str], difference: Diff) -> Diagnosis:
    """
    Compare the optimizers of both sides, where keys of an optimizer are among the missing or unexpected ones.
    """
    touched = [key for key in (*difference.missing, *difference.unexpected) if is_optimizers(key)]
    if not touched:
        return Diagnosis()
    wanted, saved = _read(model), _read(checkpoint)
    findings: list[Finding] = []
    roots: set[str] = set()
    for root in sorted(wanted.keys() & saved.keys()):
        by_names = tuple(_compare_names(wanted[root], saved[root]))
        found = [*(by_names or _compare_form(wanted[root], saved[root])), *_compare_class(wanted[root], saved[root])]
        if found:
            roots.add(root)
            findings += found
    return Diagnosis(tuple(dict.fromkeys(findings)), frozenset(key for key in touched if _root(key) in roots))


def is_optimizers(key: str) -> bool:
    """
    Whether a key, or a fold of keys, belongs to an optimizer.
    """
    return "param_groups." in key or "state." in key


def state_of(key: str) -> tuple[str, str] | None:
    """
    The root of an optimizer and the parameter, of which a key is a part of the state; None where it is none.
    """
    match = _STATE.fullmatch(key) if "state." in key else None
    return None if match is None else (match["root"] or "", match["of"])


def _root(key: str) -> str | None:
    match = _GROUP.fullmatch(key) or _STATE.fullmatch(key)
    return None if match is None else match["root"] or ""


def _read(keys: Iterable[str]) -> dict[str, _Optimizer]:
    found: dict[str, _Optimizer] = {}
    for key in keys:
        if not is_optimizers(key):
            continue
        if group := _GROUP.fullmatch(key):
            optimizer = found.setdefault(group["root"] or "", _Optimizer())
            optimizer.options.add(group["option"])
            optimizer.forms.setdefault("nested" if group["of"].isdecimal() else "flat", key)
        elif state := _STATE.fullmatch(key):
            optimizer = found.setdefault(state["root"] or "", _Optimizer())
            optimizer.slots.add(state["slot"])
            optimizer.names.setdefault(not state["of"].isdecimal(), key)
    return found


def _compare_names(wanted: _Optimizer, saved: _Optimizer) -> Iterable[Finding]:
    if wanted.is_by_name is None or saved.is_by_name is None or wanted.is_by_name == saved.is_by_name:
        return
    if saved.is_by_name and saved.form == "flat":
        return  # what `_compare_form` says leads to names as well
    here, there = shown(wanted.names[wanted.is_by_name]), shown(saved.names[saved.is_by_name])
    if saved.is_by_name:
        text = f"by the names of parameters ({there}), the program asks by their numbers ({here})."
        step = f"Take the state dict by {GET}(model, optimizer), as when the checkpoint was saved."
    else:
        text = f"by the numbers of parameters ({there}), the program asks by their names ({here})."
        step = (
            "Ask for optimizer.state_dict(), as when the checkpoint was saved, once "
            f"{GET}(model, optimizer) has made its state."
        )
    yield Finding("optimizer_names_differ", "error", f"The optimizer state in the checkpoint goes {text}", step)


def _compare_form(wanted: _Optimizer, saved: _Optimizer) -> Iterable[Finding]:
    if wanted.form is None or saved.form is None or wanted.form == saved.form:
        return
    yield Finding(
        "flat_optimizer",
        "error",
        f"The optimizer state in the checkpoint is {saved.form} ({shown(saved.forms[saved.form])}), "
        f"the program asks for the {wanted.form} form ({shown(wanted.forms[wanted.form])}).",
        "Pass options=StateDictOptions(flatten_optimizer_state_dict="
        f"{saved.form == 'flat'}) to get_optimizer_state_dict, as when the checkpoint was saved.",
    )


def _compare_class(wanted: _Optimizer, saved: _Optimizer) -> Iterable[Finding]:
    if wanted.kind is None or saved.kind is None or wanted.kind == saved.kind:
        return
    yield Finding(
        "optimizer_class_changed",
        "error",
        f"The optimizer was {saved.kind} when the checkpoint was saved and is {wanted.kind} now"
        f"{_signs(saved, wanted)}.",
        f"Load with {saved.kind} as at save time, or leave the optimizer out of the load and start it anew.",
    )


def _signs(saved: _Optimizer, wanted: _Optimizer) -> str:
    before = sorted((saved.options | saved.slots) - (wanted.options | wanted.slots) - _EVERY_OPTION)[:3]
    now = sorted((wanted.options | wanted.slots) - (saved.options | saved.slots) - _EVERY_OPTION)[:3]
    if not before or not now:
        return ""
    return f" ({', '.join(map(shown, before))} against {', '.join(map(shown, now))})"
