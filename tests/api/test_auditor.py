from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckpt_sentry import LoadAuditor, LowCoverageError
from ckpt_sentry.core.report import Coverage
from ckpt_sentry.patching import ledger
from tests.integrations.nets import Net, renamed, values

WHOLE = Coverage(1.0, 1.0)
NOTHING = Coverage(0.0, 0.0)


@pytest.fixture(autouse=True)
def _no_hooks() -> None:
    ledger.uninstall()


def without(part: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in values().items() if part not in key}


@pytest.mark.parametrize("model", [Net(), values(), list(values())], ids=["module", "dict", "names"])
@pytest.mark.parametrize("checkpoint", [values(), list(values())], ids=["dict", "names"])
def test_audit_returns_the_coverage(model: object, checkpoint: object) -> None:
    assert LoadAuditor().audit(model, checkpoint) == WHOLE


def test_audit_raises_below_the_minimum() -> None:
    auditor = LoadAuditor()
    with pytest.raises(LowCoverageError, match=r"90 % of keys and .* would load, the minimum is 99 %"):
        auditor.audit(Net(), without("head"))
    assert auditor.coverage.keys == 0.9
    assert LoadAuditor(min_coverage=0.5).audit(Net(), without("head")) == auditor.coverage


def test_audit_counts_elements_by_names_too() -> None:
    auditor = LoadAuditor(min_coverage=0)
    assert auditor.audit(Net(), list(without("head"))) == auditor.audit(Net(), without("head"))
    assert auditor.audit(list(values()), list(without("head"))) == Coverage(0.9, 0.9)


def test_a_gap_may_be_allowed() -> None:
    assert LoadAuditor(allow_missing=["head.*"]).audit(Net(), without("head")) == WHOLE


def test_audit_names_the_rename() -> None:
    with pytest.raises(LowCoverageError, match=r'strip the prefix "module\."'):
        LoadAuditor().audit(list(values()), list(renamed("module.")))


@pytest.mark.parametrize("arguments", [{"min_coverage": 2}, {"min_coverage": -0.1}])
def test_a_minimum_is_a_part(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not a number from 0 to 1"):
        LoadAuditor(**arguments)


def test_globs_are_several() -> None:
    with pytest.raises(TypeError, match="several globs"):
        LoadAuditor(allow_missing="head.*")


def test_check_reads_headers(tmp_path: Path) -> None:
    save_file(values(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.save(values(), tmp_path / "model.pt")
    auditor = LoadAuditor()
    assert auditor.check(Net(), tmp_path) == WHOLE
    assert auditor.check(Net(), tmp_path / "model.safetensors") == WHOLE
    assert auditor.check(Net(), str(tmp_path / "model.pt")) == WHOLE


def test_check_says_why_nothing_would_load(tmp_path: Path) -> None:
    auditor = LoadAuditor()
    with pytest.raises(LowCoverageError, match="does not exist"):
        auditor.check(Net(), tmp_path / "nope")
    torch.save({"state_dict": values()}, tmp_path / "model.pt")
    with pytest.raises(LowCoverageError, match=r"one level down in model\.pt, under 'state_dict'"):
        auditor.check(Net(), tmp_path / "model.pt")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(LowCoverageError, match=r"\.metadata"):
        auditor.check(Net(), tmp_path / "bad")


@pytest.mark.parametrize("state", [{"model": values(), "step": 3}, values()], ids=["within a state", "alone"])
def test_check_of_a_distributed_checkpoint(tmp_path: Path, state: dict[str, object]) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "step-3")
    assert LoadAuditor().check(Net(), tmp_path / "step-3") == WHOLE


@pytest.mark.parametrize("surplus", [{}, {"optimizer": {"lr": torch.ones(1)}}], ids=["alone", "with an optimizer"])
def test_a_rename_of_a_distributed_checkpoint_begins_with_its_names(tmp_path: Path, surplus: dict[str, object]) -> None:
    dcp.save(renamed("a.b.") | surplus, checkpoint_id=tmp_path)
    with pytest.raises(LowCoverageError, match=r'strip the prefix "a\.b\."') as caught:
        LoadAuditor().check(Net(), tmp_path)
    assert "Ask for them under the names that they have in the checkpoint" in str(caught.value)
    assert "unify_keys" not in str(caught.value)


def by_data(model: Net, _folder: Path) -> None:
    for name, value in model.named_parameters():
        value.data.copy_(values()[name])


def by_accelerate(model: Net, folder: Path, prefix: str = "", **options: object) -> None:
    save_file(renamed(prefix), folder / "model.safetensors", metadata={"format": "pt"})
    accelerate.load_checkpoint_and_dispatch(model, str(folder / "model.safetensors"), **options)


def by_dcp(model: Net, folder: Path) -> None:
    dcp.save({"model": values()}, checkpoint_id=folder / "dcp")
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "dcp")


@pytest.mark.parametrize(
    "load",
    [
        lambda model, _: model.load_state_dict(values()),
        lambda model, _: model.load_state_dict(values(), assign=True),
        lambda model, _: model.load_state_dict(model.state_dict()),
        by_data,
        by_dcp,
        lambda model, folder: by_accelerate(model, folder, device_map={"": "cpu"}),
        lambda model, folder: by_accelerate(
            model,
            folder,
            device_map={"embed": "cpu", "layers": "disk", "head": "cpu"},
            offload_folder=str(folder / "offload"),
        ),
    ],
    ids=["copied", "assigned", "the same values", "data", "dcp", "accelerate", "offloaded"],
)
def test_any_load_is_seen(tmp_path: Path, load: Callable[[Net, Path], object]) -> None:
    model = Net()
    with LoadAuditor(model=model) as auditor:
        load(model, tmp_path)
    assert auditor.coverage == WHOLE


@pytest.mark.parametrize(
    "load",
    [
        lambda _model, _: None,
        lambda model, _: model.load_state_dict(renamed("module."), strict=False),
        lambda model, folder: by_accelerate(model, folder, "module.", device_map={"": "cpu"}),
    ],
    ids=["none", "loose", "accelerate"],
)
def test_a_load_of_nothing_raises(tmp_path: Path, load: Callable[[Net, Path], object]) -> None:
    model = Net()
    auditor = LoadAuditor(model=model)
    with pytest.raises(LowCoverageError, match="nothing was loaded into") as caught, auditor:
        load(model, tmp_path)
    assert auditor.coverage == NOTHING
    assert str(caught.value) == (
        "LoadAuditor: nothing was loaded into the model inside the with block: 0 of 10 keys came in, the minimum is "
        "99 %\n"
        "  missing     {embed,head}.weight, layers.{0-1}.{attn,norm}.{bias,weight}\n"
        "  next        Load inside the block, into this model and not into a copy; if it was load_state_dict(…, "
        "strict=False), look at the unexpected_keys that it returns."
    )


def test_a_load_of_too_little_raises() -> None:
    model = Net()
    with pytest.raises(LowCoverageError, match="has loaded too little: 10 % of keys"), LoadAuditor(model=model):
        model.load_state_dict({"head.weight": values()["head.weight"]}, strict=False)


def test_a_tied_part_is_counted_once() -> None:
    model = Net(tied=True)
    auditor = LoadAuditor(0, model=model)
    with auditor:
        model.embed.load_state_dict({"weight": values()["embed.weight"]})
    assert auditor.coverage == Coverage(1 / 9, 128 / (128 + 2 * (64 + 8 + 8 + 8)))


def test_an_error_inside_passes() -> None:
    model = Net()
    with pytest.raises(KeyError, match="mine"), LoadAuditor(model=model):
        raise KeyError("mine")


def test_it_needs_a_model_to_watch() -> None:
    with pytest.raises(ValueError, match="no model to watch"), LoadAuditor():
        pass


def test_it_keeps_nothing_of_the_model_alive() -> None:
    model = Net()
    gone = weakref.ref(model.embed.weight)
    with LoadAuditor(model=model):
        model.load_state_dict(values(), assign=True)
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("swapping", [True, False])
def test_a_load_that_swaps_tensors_is_not_disturbed(monkeypatch: pytest.MonkeyPatch, *, swapping: bool) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swapping)
    model = Net()
    with LoadAuditor(model=model) as auditor:
        model.load_state_dict(values())
    assert auditor.coverage == WHOLE


def test_counters_of_batches_may_be_missing(tmp_path: Path) -> None:
    model = Net(counter=True)
    old = {key: value for key, value in values(counter=True).items() if "num_batches" not in key}
    save_file(old, tmp_path / "model.safetensors")
    for wanted in (model, model.state_dict(), list(model.state_dict())):
        assert LoadAuditor().audit(wanted, old) == WHOLE
    assert LoadAuditor().check(model, tmp_path) == WHOLE
    with LoadAuditor(model=model) as auditor:
        model.load_state_dict(old)
    assert auditor.coverage == WHOLE


def test_what_a_class_says_may_be_missing_is_not_wanted() -> None:
    class Lenient(Net):
        _keys_to_ignore_on_load_missing = (r"^head\.",)

    assert LoadAuditor().audit(Lenient(), without("head")) == WHOLE


def test_it_works_amid_other_modes() -> None:
    model = nn.Linear(37, 3)
    saved = nn.Linear(37, 3).state_dict()
    with torch.device("meta"), LoadAuditor(model=model) as auditor:
        model.load_state_dict(saved)
    assert auditor.coverage == WHOLE
