from __future__ import annotations

import contextlib
import gc
import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations, weight_norm

from ckpt_sentry import LowCoverageError, integrations, unify_keys
from ckpt_sentry.core.report import Coverage, ModelSummary
from ckpt_sentry.integrations.torch_module import calls
from ckpt_sentry.integrations.torch_module import report as module_report
from ckpt_sentry.patching import ledger
from ckpt_sentry.session import loads
from tests.agents import Agent, codes, hooked
from tests.integrations.nets import Net, before_load, equal, renamed, values

ORIGINALS = {"load_state_dict": nn.Module.load_state_dict}
"""In a dict, where no search for other names of it comes."""


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked():
        yield


def without(part: str, **options: bool) -> dict[str, torch.Tensor]:
    return {key: value for key, value in values(**options).items() if part not in key}


def test_a_good_load_is_recorded_and_not_printed(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    result = model.load_state_dict(values())
    assert result == ([], [])
    assert equal(model, values())
    report = agent.last()
    assert (report.framework, report.entry_point, report.verdict) == ("torch", "Module.load_state_dict", "ok")
    assert (report.coverage, report.findings, report.model.keys) == (Coverage(1.0, 1.0), (), 10)
    assert capfd.readouterr() == ("", "")


def test_the_same_kind_of_good_load_is_recorded_once(agent: Agent) -> None:
    for _ in range(5):
        Net().load_state_dict(values())
    Net(tied=True).load_state_dict(values(tied=True))
    nn.Linear(2, 2).load_state_dict(nn.Linear(2, 2).state_dict())
    assert [report.model.keys for report in agent.reports()] == [10, 2]


def test_kinds_of_good_loads_are_bounded(agent: Agent) -> None:
    for width in range(1, module_report.MOST_KINDS + 10):
        model = nn.ModuleDict({f"layer{width}": nn.Linear(1, 1)})
        model.load_state_dict(model.state_dict())
    assert len(module_report._kinds.good) == module_report.MOST_KINDS
    # The records keep the first ones whole, and the newest; the others are counted.
    assert 1 < len(agent.reports()) < module_report.MOST_KINDS


@pytest.mark.usefixtures("agent")
def test_an_uninstalled_agent_gives_the_method_back() -> None:
    original = ORIGINALS["load_state_dict"]
    assert nn.Module.load_state_dict is not original
    assert inspect.signature(nn.Module.load_state_dict) == inspect.signature(original)
    ledger.uninstall()
    assert nn.Module.load_state_dict is original
    ledger.install(integrations.seams())


def test_a_strict_error_is_the_same_and_carries_the_rename(agent: Agent) -> None:
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict") as caught:
        Net().load_state_dict(renamed("module."))
    report = caught.value.ckpt_sentry
    assert type(caught.value) is RuntimeError
    assert report == agent.last()
    assert (report.verdict, report.missing.count, report.unexpected.count) == ("failed", 10, 10)
    assert (report.rename.rule, report.rename.coverage) == ('strip the prefix "module."', 1.0)
    assert codes(report, "error") == ["renamed_keys", "no_overlap", "missing_keys", "unexpected_keys"]
    if hasattr(caught.value, "__notes__"):
        assert 'strip the prefix "module."' in caught.value.__notes__[0]


def test_the_same_failure_is_recorded_once_and_noted_each_time(agent: Agent) -> None:
    seen = []
    for _ in range(3):
        with pytest.raises(RuntimeError) as caught:
            Net().load_state_dict(without("head"))
        seen.append(caught.value.ckpt_sentry)
    assert len(agent.reports()) == 1
    assert seen == [agent.last()] * 3


@pytest.mark.usefixtures("agent")
def test_a_tied_name_that_torch_calls_missing_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        Net(tied=True).load_state_dict(without("head", tied=True))
    report = caught.value.ckpt_sentry
    assert codes(report) == ["tied_keys_missing"]
    assert "1 key is only another name of what the checkpoint has: head.weight" in report.findings[0].text
    with pytest.raises(RuntimeError) as caught:
        Net().load_state_dict(without("head", tied=True))
    assert codes(caught.value.ckpt_sentry) == ["missing_keys"]


@pytest.mark.usefixtures("agent")
def test_another_shape_is_said_also_of_a_loose_load() -> None:
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        Net().load_state_dict({**values(), "head.weight": torch.zeros(20, 8)}, strict=False)
    (mismatch,) = caught.value.ckpt_sentry.mismatched
    assert (mismatch.keys, mismatch.model_shape, mismatch.checkpoint_shape) == ("head.weight", (16, 8), (20, 8))


def test_a_loose_load_of_nothing_returns_and_is_said(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = model.load_state_dict(renamed("module."), strict=False)
    assert (len(result.missing_keys), len(result.unexpected_keys)) == (10, 10)
    assert equal(model, before)
    report = agent.last()
    assert (report.verdict, report.coverage) == ("no_op", Coverage(0.0, 0.0))
    assert codes(report) == ["renamed_keys", "no_overlap", "missing_keys"]
    assert "Module.load_state_dict loaded nothing into the model" in capfd.readouterr().err


def test_an_empty_dict_is_said(agent: Agent) -> None:
    Net().load_state_dict({}, strict=False)
    assert (agent.last().verdict, codes(agent.last())) == ("no_op", ["no_overlap", "missing_keys"])


def test_a_nested_state_dict_is_found(agent: Agent) -> None:
    Net().load_state_dict({"state_dict": values(), "epoch": 3}, strict=False)
    report = agent.last()
    assert (report.verdict, codes(report, "error")) == ("no_op", ["nested_state_dict"])
    assert report.findings[0].text.endswith("under 'state_dict': 10 of them are keys of this model.")


def only(*parts: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in values().items() if key.startswith(parts)}


def test_a_state_dict_two_levels_down_is_found(agent: Agent) -> None:
    given = {"app": {"optim": {}, "model": values()}}
    Net().load_state_dict(given, strict=False)
    (nested, *_) = agent.last().findings
    assert (nested.code, nested.next) == ("nested_state_dict", "Pass state_dict['app']['model'] on.")
    assert nested.text.startswith("The state dict (10 keys) is 2 levels down, under state_dict['app']['model']: 10 of")
    Net().load_state_dict(given["app"]["model"])


def normed() -> nn.Module:
    return nn.Sequential(*[nn.Module() for _ in range(3)], nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("given", "found", "keys"),
    [
        ({f"module.{key}": value for key, value in normed().state_dict().items()}, "renamed_keys", 7),
        ({}, "no_overlap", 6),
    ],
    ids=["prefix", "empty"],
)
def test_counters_of_batches_are_not_loaded(
    agent: Agent, given: dict[str, torch.Tensor], found: str, keys: int
) -> None:
    normed().load_state_dict(given, strict=False)
    report = agent.last()
    assert (report.verdict, report.coverage, codes(report)[0]) == ("no_op", Coverage(0.0, 0.0), found)
    assert (report.checkpoint.keys, report.model.keys) == (len(given), keys)


def test_counters_of_batches_may_be_missing(agent: Agent) -> None:
    old = {key: value for key, value in normed().state_dict().items() if not key.endswith("num_batches_tracked")}
    normed().load_state_dict(old)
    normed().load_state_dict({**old, "more": torch.ones(1)}, strict=False)
    assert [(report.verdict, report.coverage.keys) for report in agent.reports()] == [("ok", 1.0), ("ok", 1.0)]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_the_two_forms_of_weight_norm_are_one_rename(agent: Agent) -> None:
    new = nn.Sequential(*[parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(3)])
    old = nn.Sequential(*[weight_norm(nn.Linear(3, 3)) for _ in range(3)])
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        old.load_state_dict(new.state_dict())
    (finding, *rest) = [one for one in caught.value.ckpt_sentry.findings if one.next]
    assert finding.next == "Rename its keys: model.load_state_dict(ckpt_sentry.unify_keys(state_dict, model))."
    assert rest == []
    old.load_state_dict(unify_keys(new.state_dict(), old))
    assert torch.equal(old(torch.ones(3)), new(torch.ones(3)))
    assert agent.last().verdict == "ok"


class Tuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(3, 3)
        self.lora_A = nn.Linear(3, 1, bias=False)


@pytest.mark.usefixtures("agent")
def test_the_advice_to_rename_is_for_a_call_that_passes() -> None:
    given = {f"base_model.model.{key}": value for key, value in nn.Sequential(Tuned(), Tuned()).state_dict().items()}
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(given)
    step = caught.value.ckpt_sentry.findings[0].next
    assert step == (
        "Rename its keys: model.load_state_dict(ckpt_sentry.unify_keys(state_dict, model), strict=False); "
        "2 keys of the checkpoint stay out: base_model.model.{0-1}.lora_A.weight."
    )
    assert model.load_state_dict(unify_keys(given, model), strict=False).missing_keys == []
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(unify_keys(given, model))
    assert caught.value.ckpt_sentry.findings[0].next == "If they are to stay out: load_state_dict(…, strict=False)."


@pytest.mark.usefixtures("agent")
def test_what_a_rename_leaves_out_is_said_with_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        Net().load_state_dict({f"module.{key}": value for key, value in without("head").items()})
    step = caught.value.ckpt_sentry.findings[0].next
    assert step == "Rename its keys: ckpt_sentry.unify_keys(state_dict, model); 1 key is still missing then."


@pytest.mark.usefixtures("agent")
def test_as_many_unexpected_keys_as_missing_ones_are_no_gap() -> None:
    with pytest.raises(RuntimeError) as caught:
        Net().load_state_dict({**without("head"), "lm.weight": torch.ones(7)})
    assert [one.next for one in caught.value.ckpt_sentry.findings] == [None, None]


def test_keys_that_are_absent_are_not_on_the_meta_device_in_the_dict(agent: Agent) -> None:
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(without("head"), strict=False, assign=True)
    (finding,) = [one for one in agent.last().findings if one.code == "meta_left"]
    assert finding.text == (
        "1 of 10 keys is still on the meta device, without values: the dict holds nothing for them: head.weight."
    )
    assert "map_location" not in str(agent.last().findings)
    model.head.to_empty(device="cpu")
    assert not model.head.weight.is_meta


def test_its_own_tensors_bring_in_nothing(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    model.load_state_dict(model.state_dict())
    (report,) = agent.reports()
    assert (report.verdict, codes(report)) == ("ok", [])
    assert report.findings[0].text == (
        "All that was loaded are the module's own tensors (10 keys): nothing came from outside."
    )
    model.load_state_dict({**model.state_dict(), "head.weight": torch.ones(16, 8)})
    assert len(agent.reports()) == 2
    assert agent.last().findings[0].text == "9 of 10 keys are the module's own tensors, loaded into itself."
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_a_file_of_which_nothing_was_used_is_named(agent: Agent, tmp_path: Path, form: str) -> None:
    if form == "torch":
        path = tmp_path / "model.pt"
        torch.save(renamed("module."), path)
        read = torch.load
    else:
        path = tmp_path / "model.safetensors"
        save_file(renamed("module."), path)
        read = load_file
    model = Net()
    own = model.state_dict()
    own.update({key: value for key, value in read(path).items() if key in own})
    model.load_state_dict(own)
    report = agent.last()
    assert (report.verdict, report.coverage.keys, report.path) == ("no_op", 0.0, str(path))
    assert codes(report) == ["own_tensors", "renamed_keys"]
    assert report.rename.rule == 'strip the prefix "module."'
    model.load_state_dict(unify_keys(read(path), model))
    assert equal(model, values())


def test_a_file_whose_values_were_copied_by_hand_was_used(agent: Agent, tmp_path: Path) -> None:
    torch.save(renamed("module."), tmp_path / "model.pt")
    model, read = Net(), torch.load(tmp_path / "model.pt")
    for key, value in model.state_dict().items():
        value.copy_(read[f"module.{key}"])
    model.load_state_dict(model.state_dict())
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])


def test_a_model_that_was_filled_in_place_is_whole(agent: Agent, tmp_path: Path) -> None:
    dcp.save(values(), checkpoint_id=tmp_path / "step-1")
    model = Net()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    model.load_state_dict(state)
    assert [(report.framework, report.verdict) for report in agent.reports()] == [("dcp", "ok"), ("torch", "ok")]


class Adapted(nn.Module):
    """
    As a model of peft: adapters by their names, which stand in the keys.
    """

    def __init__(self, *adapters: str) -> None:
        super().__init__()
        self.peft_config = dict.fromkeys(adapters)
        self.base = nn.Linear(3, 3)
        self.lora_A = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 3, bias=False) for name in adapters})


def test_another_adapter_is_not_missing(agent: Agent) -> None:
    given = {key: value for key, value in Adapted("default").state_dict().items() if "lora" in key}
    Adapted("default").load_state_dict(given, strict=False)
    other = {key.replace("default", "other"): value for key, value in given.items()}
    Adapted("default", "other").load_state_dict(other, strict=False)
    assert [(report.verdict, report.coverage.keys) for report in agent.reports()] == [("ok", 1.0), ("ok", 1.0)]
    Adapted("default", "other").load_state_dict({"lora_A.other.weight": other["lora_A.other.weight"]}, strict=False)
    assert (agent.last().verdict, agent.last().missing.keys) == ("partial", ("lora_B.other.weight",))
    Adapted("default").load_state_dict({f"net.{key}": value for key, value in given.items()}, strict=False)
    assert agent.last().verdict == "no_op"


def test_an_adapter_of_any_kind_is_known_by_its_class(agent: Agent) -> None:
    class Tuner(nn.Module):
        prefix = "oft_"

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.oft_R = nn.ModuleDict({"default": nn.Linear(3, 2)})

    model = nn.Module()
    model.base_model, model.peft_config = Tuner(), {"default": None}
    given = {key: value for key, value in model.state_dict().items() if "oft_R" in key}
    model.load_state_dict({key: value.clone() for key, value in given.items()}, strict=False)
    assert (agent.last().verdict, agent.last().coverage.keys) == ("ok", 1.0)


def test_a_prompt_that_peft_fills_itself_is_not_unexpected(agent: Agent) -> None:
    model = Adapted("default")
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    model.load_state_dict({"prompt_embeddings": torch.ones(3)}, strict=False)
    assert agent.reports() == []


def test_shards_one_after_the_other_are_one_line(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    for part in ("embed", "layers.0", "layers.1", "head"):
        model.load_state_dict(only(part), strict=False)
    assert equal(model, values())
    first, whole = agent.reports()
    assert (first.verdict, first.coverage.keys, codes(first)) == ("partial", 0.1, [])
    assert (whole.verdict, whole.coverage, whole.findings) == ("ok", Coverage(1.0, 1.0), ())
    assert [line[:13] for line in capfd.readouterr().err.splitlines()] == ["ckpt_sentry !"]


def shards(folder: Path, *parts: str, of: int = 4) -> Iterator[dict[str, torch.Tensor]]:
    for number, part in enumerate(parts, 1):
        path = folder / f"model-{number:05}-of-{of:05}.safetensors"
        save_file(only(part), path)
        yield load_file(path)


def test_shards_that_say_how_many_they_are_raise_no_alarm(
    agent: Agent, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    for state in shards(tmp_path, "embed", "layers.0", "layers.1", "head"):
        model.load_state_dict(state, strict=False)
    assert equal(model, values())
    assert [(report.verdict, report.coverage.judged) for report in agent.reports()] == [("ok", 1.0)]
    del model
    gc.collect()
    assert len(agent.reports()) == 1
    assert capfd.readouterr().err == ""


def test_shards_of_which_one_never_comes(agent: Agent, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    for state in shards(tmp_path, "embed", "layers.0", "head"):
        model.load_state_dict(state, strict=False)
    assert agent.reports() == []
    del model
    gc.collect()
    (report,) = agent.reports()
    assert (report.verdict, report.missing.count, codes(report, "warning")[0]) == ("partial", 4, "missing_keys")
    assert capfd.readouterr().err.startswith("ckpt_sentry !")


def test_shards_that_hold_a_part_together(agent: Agent, tmp_path: Path) -> None:
    model = Net()
    for state in shards(tmp_path, "embed", "layers.0", "head", of=3):
        model.load_state_dict(state, strict=False)
    (report,) = agent.reports()
    assert (report.verdict, report.missing.count) == ("partial", 4)
    model.load_state_dict(values())
    assert [one.verdict for one in agent.reports()] == ["partial", "ok"]


def test_what_follows_a_shard_and_is_none_is_told_after_it(agent: Agent, tmp_path: Path) -> None:
    model = Net()
    for state in shards(tmp_path, "embed"):
        model.load_state_dict(state, strict=False)
    model.load_state_dict(without("head"), strict=False)
    assert [report.coverage.keys for report in agent.reports()] == [0.1, 0.9]


def test_a_counter_that_comes_alone_goes_on_with_the_shards(agent: Agent) -> None:
    model = normed()
    for key, value in normed().state_dict().items():
        model.load_state_dict({key: value}, strict=False)
    assert [report.verdict for report in agent.reports()] == ["partial", "ok"]


def test_a_scripted_module_is_watched_as_any(agent: Agent) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model.load_state_dict(model.state_dict())
    assert (agent.last().verdict, agent.last().findings[0].code) == ("ok", "own_tensors")


def test_another_gap_in_the_same_class_is_another_report(agent: Agent) -> None:
    for _ in range(2):
        Net().load_state_dict(without("head"), strict=False)
        Net().load_state_dict(only("head"), strict=False)
    assert [report.coverage.keys for report in agent.reports()] == [0.9, 0.1]


def test_another_checkpoint_for_the_same_module_is_another_report(agent: Agent) -> None:
    model = Net()
    model.load_state_dict(without("head"), strict=False)
    model.load_state_dict(without("layers"), strict=False)
    assert [report.missing.count for report in agent.reports()] == [1, 8]


def test_a_part_beside_what_nobody_wants_is_a_warning(agent: Agent) -> None:
    Net().load_state_dict({**without("head"), "lm_head.weight": torch.zeros(3)}, strict=False)
    assert (agent.last().verdict, codes(agent.last())) == ("partial", ["missing_keys"])


@pytest.mark.parametrize(
    ("options", "state_dict"),
    [
        ({"tied": True}, without("head", tied=True)),
        ({"tied": True}, without("embed", tied=True)),
        ({"counter": True}, without("num_batches_tracked", counter=True)),
        ({}, {**values(), "layers.0.rotary_emb.inv_freq": torch.ones(4)}),
        ({}, {**values(), **renamed("ema.")}),
    ],
    ids=["head tied", "embedding tied", "counters", "inv_freq", "ema beside"],
)
def test_what_is_legitimate_raises_no_alarm(
    agent: Agent, capfd: pytest.CaptureFixture[str], options: dict[str, bool], state_dict: dict[str, torch.Tensor]
) -> None:
    Net(**options).load_state_dict(state_dict, strict=False)
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])
    assert capfd.readouterr().err == ""


def test_load_hooks_are_the_truth(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    def rename(_module: nn.Module, state_dict: dict[str, torch.Tensor], *_rest: object) -> None:
        for key in list(state_dict):
            state_dict[key.removeprefix("module.")] = state_dict.pop(key)

    def forgive(_module: nn.Module, incompatible: torch.nn.modules.module._IncompatibleKeys) -> None:
        incompatible.missing_keys.clear()

    model = Net()
    before_load(model, rename)
    model.load_state_dict(renamed("module."))
    assert equal(model, values())
    model = Net()
    model.register_load_state_dict_post_hook(forgive)
    model.load_state_dict(without("head"))
    assert [report.verdict for report in agent.reports()] == ["ok", "ok"]
    assert capfd.readouterr().err == ""


def test_an_error_of_a_hook_is_the_hosts(agent: Agent) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("mine")

    model = Net()
    before_load(model, fail)
    with pytest.raises(RuntimeError, match=r"^mine") as caught:
        model.load_state_dict(values())
    assert caught.value.args == ("mine",)
    assert caught.value.ckpt_sentry.load_id == agent.last().load_id
    assert (agent.last().verdict, agent.last().findings[0].text) == ("failed", "RuntimeError: mine")
    assert len(agent.reports()) == 1


def test_what_is_no_dict_is_the_hosts_error(agent: Agent) -> None:
    with pytest.raises(TypeError, match="dict-like"):
        Net().load_state_dict([1])  # type: ignore[arg-type]
    assert agent.reports() == []


def test_a_module_that_loads_within_another_adds_nothing(agent: Agent) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def _load_from_state_dict(self, state_dict, prefix, *_rest) -> None:
            self.inner.load_state_dict({k.removeprefix(f"{prefix}inner."): v for k, v in state_dict.items()})

    Outer().load_state_dict(renamed("inner."))
    assert [report.model.keys for report in agent.reports()] == [10]


def test_a_load_within_another_framework_adds_nothing(agent: Agent) -> None:
    outer = loads.begin("dcp", "dcp.load", None)
    try:
        Net().load_state_dict(renamed("module."), strict=False)
    finally:
        outer.leave()
    assert agent.reports() == []


def test_a_module_on_the_meta_device_has_got_nothing(agent: Agent) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict(values())
    assert (agent.last().verdict, codes(agent.last())) == ("no_op", ["meta_left"])
    model.load_state_dict(values(), assign=True)
    assert agent.last().verdict == "ok"
    assert equal(model, values())


@pytest.mark.parametrize("name", ["embed", "layers.0", "head"])
def test_a_part_on_the_meta_device_has_got_nothing(agent: Agent, name: str) -> None:
    model = Net()
    model.get_submodule(name).to("meta")
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict(values())
    report = agent.last()
    assert (report.verdict, codes(report)) == ("partial", ["meta_left"])
    assert 0 < report.coverage.judged < 1
    assert "on the meta device, where there is nothing to copy into: " in report.findings[0].text
    assert name in report.findings[0].text


def test_a_part_on_the_meta_device_is_seen_after_a_good_load_of_its_kind(agent: Agent) -> None:
    Net().load_state_dict(values())
    model = Net()
    model.layers[1].attn.to("meta")
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict(values())
    assert [report.verdict for report in agent.reports()] == ["ok", "partial"]


def test_a_dict_on_the_meta_device_takes_the_values_away(agent: Agent) -> None:
    model = Net()
    model.load_state_dict({key: value.to("meta") for key, value in values().items()}, assign=True)
    assert (agent.last().verdict, codes(agent.last())) == ("no_op", ["meta_left"])
    assert agent.last().findings[0].text == "The dict is on the meta device: the module has no values for 10 keys."


@pytest.mark.filterwarnings("ignore:for .*no-op")
def test_strict_refuses_what_could_not_enter(agent: Agent) -> None:
    agent.mode("strict")
    model = Net()
    model.head.to("meta")
    for given, strict in ((values(), True), (values(), False), (without("embed"), False)):
        for _ in range(2):
            with pytest.raises(LowCoverageError, match="meta device") as caught:
                model.load_state_dict(given, strict=strict)
        assert caught.value.ckpt_sentry.coverage.keys == pytest.approx((len(given) - 1) / 10)
    with torch.device("meta"):
        model = Net()
    with pytest.raises(LowCoverageError, match=" 0 % of keys"):
        model.load_state_dict(without("embed"), strict=False)
    assert agent.last().verdict == "no_op"


def test_a_part_of_a_dict_for_a_part_on_the_meta_device(agent: Agent) -> None:
    model = Net()
    model.head.to("meta")
    given = without("embed")
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict(given, strict=False)
    report = agent.last()
    assert report.verdict == "partial"
    assert "meta_left" in codes(report)
    assert report.coverage.keys == pytest.approx((len(given) - 1) / 10)


def test_strict_refuses_a_part_and_observe_never(agent: Agent) -> None:
    agent.mode("strict")
    with pytest.raises(
        LowCoverageError, match=r"90 % of keys and .* of elements came in, the minimum is 100 %"
    ) as caught:
        Net().load_state_dict(without("head"), strict=False)
    assert (caught.value.ckpt_sentry.verdict, caught.value.ckpt_sentry.error.phase) == ("partial", None)
    with pytest.raises(LowCoverageError, match=r"CKPT_SENTRY_ALLOW_MISSING='head\.\*'"):
        Net().load_state_dict(without("head"), strict=False)
    agent.set(ALLOW_MISSING="head.*")
    Net().load_state_dict(without("head"), strict=False)
    agent.mode("observe")
    agent.set(ALLOW_MISSING="")
    Net().load_state_dict(renamed("module."), strict=False)
    assert agent.last().verdict == "no_op"


@pytest.mark.parametrize("strict", [True, False])
def test_align_mends_the_keys_and_says_so(agent: Agent, capfd: pytest.CaptureFixture[str], *, strict: bool) -> None:
    agent.set(ALIGN="auto")
    model, given = Net(), renamed("module.")
    assert model.load_state_dict(given, strict=strict) == ([], [])
    assert equal(model, values())
    assert list(given) == list(renamed("module."))
    (report,) = agent.reports()
    assert (report.verdict, codes(report, "info")) == ("ok", ["renamed_keys"])
    assert report.findings[0].text == '10 keys were aligned: strip the prefix "module.".'
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ckpt_sentry ✓ Module.load_state_dict  10 keys of Net, 100 % · ")
    assert line.endswith(' · 10 keys were aligned: strip the prefix "module."')


def test_align_leaves_alone_what_is_not_beyond_doubt(agent: Agent) -> None:
    agent.set(ALIGN="auto")
    with pytest.raises(RuntimeError, match="Missing key"):
        Net().load_state_dict({f"module.{key}": value for key, value in without("head").items()})
    assert agent.last().rename.coverage == pytest.approx(0.9, abs=0.2)


def test_set_model_state_dict_is_judged_by_what_it_was_given(agent: Agent) -> None:
    set_model_state_dict(Net(), values())
    assert (agent.last().entry_point, agent.last().verdict) == ("set_model_state_dict", "ok")
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        set_model_state_dict(Net(), without("head"))
    assert caught.value.ckpt_sentry.missing.keys == ("head.weight",)


@pytest.fixture
def _group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_filled_gap_is_still_a_gap(agent: Agent) -> None:
    set_model_state_dict(Net(), without("head"), options=StateDictOptions(full_state_dict=True))
    assert (agent.last().verdict, codes(agent.last())) == ("partial", ["missing_keys"])


def sharded(*, use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(Net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_gap_of_a_sharded_model_has_its_name(agent: Agent, *, use_orig_params: bool) -> None:
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(sharded(use_orig_params=use_orig_params), values(), options=full)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        set_model_state_dict(sharded(use_orig_params=use_orig_params), without("head"), options=broadcast)
    whole, failed = agent.reports()
    assert (whole.verdict, whole.coverage, whole.model.keys) == ("ok", Coverage(1.0, 1.0), 10)
    assert (failed.verdict, failed.missing.keys, codes(failed)) == ("failed", ("head.weight",), ["missing_keys"])
    if use_orig_params:
        set_model_state_dict(sharded(use_orig_params=True), without("head"), options=full)
        partial = agent.last()
        assert (partial.verdict, partial.missing.keys, partial.coverage.keys) == ("partial", ("head.weight",), 0.9)
        return
    # torch takes the flat parameter for the value of the missing key, whether strict or not.
    with pytest.raises(RuntimeError, match="size mismatch"):
        set_model_state_dict(sharded(use_orig_params=False), without("head"), options=full)
    assert (agent.last().missing.keys, agent.last().findings[0].next) == (("head.weight",), None)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    ("given", "verdict", "found"),
    [
        (renamed("model."), "no_op", ["renamed_keys", "no_overlap", "missing_keys"]),
        (without("head"), "partial", []),
        (values(), "ok", []),
    ],
)
def test_a_dict_that_is_broadcast_is_judged_by_the_rank_that_has_it(
    agent: Agent, given: dict[str, torch.Tensor], verdict: str, found: list[str]
) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(Net(), given, options=options)
    (report,) = agent.reports()
    assert (report.entry_point, report.verdict, codes(report)) == ("set_model_state_dict", verdict, found)


@pytest.mark.usefixtures("_group")
def test_a_rank_that_is_given_nothing_says_nothing(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    monkeypatch.setattr(calls, "_rank", lambda: 1)
    set_model_state_dict(Net(), {}, options=options)
    assert agent.reports() == []


def one_by_one(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    """
    As Lightning does it (lightning/fabric/strategies/model_parallel.py, `_load_raw_module_state`).
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for path, part in model.named_modules():
        for name, _ in part.named_parameters(recurse=False):
            if (key := f"{path}.{name}".lstrip(".")) in given:
                set_model_state_dict(part, {name: given[key]}, options=options)


@pytest.mark.usefixtures("_group")
def test_parameters_that_come_one_by_one_are_one_load(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    one_by_one(model, values())
    assert equal(model, values())
    assert [(report.verdict, report.model.keys) for report in agent.reports()] == [("ok", 10)]
    assert capfd.readouterr().err == ""
    one_by_one(Net(), without("layers.1.norm.bias"))
    assert (agent.last().verdict, agent.last().missing.count) == ("partial", 1)
    assert "bias" in agent.last().missing.keys[0]


@pytest.mark.usefixtures("_group")
def test_a_parameter_of_the_root_that_comes_alone_does_not_lack_the_rest(agent: Agent) -> None:
    class Rooted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    one_by_one(Rooted(), {**values(), "scale": torch.zeros(3)})
    assert [(report.verdict, report.model.keys) for report in agent.reports()] == [("ok", 11)]
    one_by_one(Rooted(), without("head"))
    assert (agent.last().verdict, agent.last().missing.count) == ("ok", 0)


def test_load_model_of_safetensors_is_one_strict_load(agent: Agent, tmp_path: Path) -> None:
    save_model(Net(tied=True), str(tmp_path / "tied.safetensors"))
    load_model(Net(tied=True), tmp_path / "tied.safetensors")
    assert (agent.last().entry_point, agent.last().verdict) == ("safetensors.torch.load_model", "ok")
    save_file(renamed("module."), tmp_path / "module.safetensors")
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        load_model(Net(), tmp_path / "module.safetensors")
    report = caught.value.ckpt_sentry
    assert (report.path, report.verdict) == (str(tmp_path / "module.safetensors"), "failed")
    assert report.rename.coverage == 1.0
    assert len(agent.reports()) == 2


@pytest.mark.usefixtures("agent")
def test_a_shard_of_a_distributed_checkpoint_is_named(tmp_path: Path) -> None:
    dcp.save({"model": values()}, checkpoint_id=tmp_path / "step-1")
    shard = next((tmp_path / "step-1").glob("*.distcp"))
    with pytest.raises(TypeError) as caught:
        Net().load_state_dict(torch.load(shard))
    if hasattr(caught.value, "add_note"):
        assert "one shard of a distributed checkpoint (DCP)" in caught.value.__notes__[0]


def test_loads_in_several_threads_do_not_disturb_each_other(agent: Agent) -> None:
    models = [Net() for _ in range(8)]
    threads = [threading.Thread(target=model.load_state_dict, args=(values(),)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(model, values()) for model in models)
    assert {report.verdict for report in agent.reports()} == {"ok"}


class Extra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def test_extra_state_may_be_a_tensor(agent: Agent) -> None:
    Extra(2, 2).load_state_dict({**Extra(2, 2).state_dict(), "more": torch.ones(1)}, strict=False)
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])


def test_sparse_tensors_are_counted(agent: Agent) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.eye(3).to_sparse())
    model.load_state_dict(model.state_dict())
    assert agent.last().model == ModelSummary(1, 9, 36, "Module")


@pytest.mark.parametrize("more", [{}, {"ema.x": torch.ones(1)}], ids=["whole", "more"])
def test_a_mapping_is_not_asked_twice_for_its_values(agent: Agent, more: dict[str, torch.Tensor]) -> None:
    class Lazy(Mapping[str, torch.Tensor]):
        def __init__(self) -> None:
            self.held, self.asked = {**values(), **more}, 0

        def __getitem__(self, key: str) -> torch.Tensor:
            self.asked += 1
            return self.held[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.held)

        def __len__(self) -> int:
            return len(self.held)

    lazy, model = Lazy(), Net()
    model.load_state_dict(lazy, strict=False)
    assert (lazy.asked, equal(model, values())) == (len(lazy), True)
    assert (agent.last().verdict, agent.last().coverage) == ("ok", Coverage(1.0, 1.0))
    assert agent.last().model == ModelSummary(10, 432, 1728, "Net")


def test_nothing_after_a_part_is_said(agent: Agent) -> None:
    model = Net()
    model.load_state_dict(without("head"), strict=False)
    model.load_state_dict({}, strict=False)
    nn.Sequential(nn.Linear(2, 2)).load_state_dict({"0.weight": torch.ones(2, 2)}, strict=False)
    nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).load_state_dict({"0.weight": torch.ones(2, 2)}, strict=False)
    assert [report.verdict for report in agent.reports()] == ["partial", "no_op", "partial", "partial"]


def test_a_refused_load_keeps_nothing_alive(agent: Agent) -> None:
    gc.collect()
    gc.disable()
    try:
        model = Net()
        gone = weakref.ref(model)
        with contextlib.suppress(RuntimeError):
            model.load_state_dict(without("head"))
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert agent.last().verdict == "failed"


def test_an_own_error_does_not_blind_the_agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_lists", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Net().load_state_dict(values())
    Net().load_state_dict(values())
    assert agent.last().verdict == "ok"


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(2.0), persistent=False)


def test_buffers_that_no_checkpoint_holds_are_named_where_they_are_on_meta(agent: Agent) -> None:
    given = Rotary().state_dict()
    with torch.device("meta"):
        model = nn.Sequential(Rotary())
    model.load_state_dict({f"0.{key}": value for key, value in given.items()}, assign=True)
    report = agent.last()
    assert (report.verdict, codes(report)) == ("ok", ["meta_left"])
    assert report.findings[-1].text == (
        "1 buffer that no checkpoint holds (persistent=False) is still on the meta device, without values: 0.inv_freq."
    )
    with torch.device("meta"):
        model = nn.Sequential(Rotary())
    model[0].inv_freq = torch.arange(2.0)
    model.load_state_dict({f"0.{key}": value for key, value in given.items()}, assign=True)
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])


def test_where_nothing_has_values_the_buffers_are_no_news(agent: Agent) -> None:
    with torch.device("meta"):
        model = Rotary()
    model.load_state_dict(Rotary().state_dict())
    assert [one.code for one in agent.last().findings] == ["meta_left"]
