from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_sentry import LowCoverageError
from ckpt_sentry.core.report import Coverage
from tests.agents import Agent, codes, hooked
from tests.integrations.nets import Net, before_load


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("accelerate.checkpointing"):
        yield


class Run:
    """
    An accelerator with models of `classes`, the first `trained` of them with an optimizer and a scheduler.
    """

    def __init__(self, classes: tuple[type[nn.Module], ...], trained: int) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        self.models = [self.accelerator.prepare(make()) for make in classes]
        for model in self.models[:trained]:
            optimizer = torch.optim.AdamW(model.parameters())
            self.accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))

    def state(self) -> list[torch.Tensor]:
        return [value.clone() for model in self.models for value in model.state_dict().values()]


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def run(classes: tuple[type[nn.Module], ...] = (Net,), trained: int = 1) -> Run:
    return Run(classes, trained)


def saved(folder: Path, classes: tuple[type[nn.Module], ...] = (Net,), trained: int = 1) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_SENTRY", "0")
        run(classes, trained).accelerator.save_state(str(folder))
    return folder


def edited(file: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file({key: value.clone() for key, value in change(load_file(file)).items()}, file, metadata={"format": "pt"})


def in_module(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{key}": value for key, value in held.items()}


def headless(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in held.items() if "head" not in key}


def unchanged(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_a_whole_state_is_one_good_load(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "step_7")
    run().accelerator.load_state(str(folder))
    (report,) = agent.reports()
    assert (report.framework, report.entry_point, report.path) == ("accelerate", "Accelerator.load_state", str(folder))
    assert (report.verdict, report.coverage, report.step, report.findings) == ("ok", Coverage(1.0, 1.0), 7, ())
    assert [phase.name for phase in report.phases] == ["setup", "optimizer", "scheduler", "random_states", "verify"]


def test_each_model_is_named(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", (Net, Head))
    run((Net, Head)).accelerator.load_state(str(folder))
    (finding,) = agent.last().findings
    each = "model 100 % of keys and 100 % of elements; model_1 100 % of keys and 100 % of elements"
    assert (finding.code, finding.text) == ("model_coverage", f"Coverage of each model: {each}.")


@pytest.mark.parametrize("settings", [{}, {"strict": False}], ids=["strict", "loose"])
def test_nothing_that_would_load_is_refused(agent: Agent, tmp_path: Path, settings: dict[str, bool]) -> None:
    folder = saved(tmp_path / "state")
    edited(folder / "model.safetensors", in_module)
    job = run()
    before = job.state()
    with pytest.raises(LowCoverageError, match="the model is untouched: 0 % of keys") as caught:
        job.accelerator.load_state(str(folder), **settings)
    report = caught.value.ckpt_sentry
    assert report == agent.last()
    assert (report.verdict, report.rename.coverage) == ("no_op", 1.0)
    assert unchanged(before, job.state())


def test_too_little_is_refused_but_where_the_caller_asked_for_it(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    edited(folder / "model.safetensors", headless)
    job = run()
    before = job.state()
    with pytest.raises(LowCoverageError, match=r"start anew: load_state\(…, strict=False\)\.") as caught:
        job.accelerator.load_state(str(folder))
    assert "ALLOW_MISSING" not in str(caught.value)
    assert unchanged(before, job.state())
    job.accelerator.load_state(str(folder), strict=False)
    assert (agent.last().verdict, codes(agent.last())) == ("partial", ["missing_keys"])
    agent.mode("strict")
    with pytest.raises(LowCoverageError, match="the minimum is 100 %"):
        job.accelerator.load_state(str(folder), strict=False)


def test_observe_lets_the_host_speak(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    edited(folder / "model.safetensors", in_module)
    agent.mode("observe")
    run().accelerator.load_state(str(folder), strict=False)
    assert (agent.last().verdict, agent.last().error) == ("no_op", None)
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        run().accelerator.load_state(str(folder))
    assert type(caught.value) is RuntimeError
    assert caught.value.ckpt_sentry.verdict == "failed"


@pytest.mark.usefixtures("agent")
def test_a_small_model_counts_beside_a_large_one(tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", (Net, Head))
    edited(folder / "model_1.safetensors", in_module)
    with pytest.raises(LowCoverageError, match=r"load_state \(model_1\) refused") as caught:
        run((Net, Head)).accelerator.load_state(str(folder))
    first = caught.value.ckpt_sentry.findings[0]
    assert (first.code, first.text[:9]) == ("renamed_keys", "model_1: ")


def test_align_mends_the_keys(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    edited(folder / "model.safetensors", in_module)
    agent.set(ALIGN="auto")
    run().accelerator.load_state(str(folder))
    assert (agent.last().verdict, codes(agent.last(), "info")) == ("ok", ["renamed_keys"])


def test_a_load_hook_is_judged_by_what_came_in(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    edited(folder / "model.safetensors", in_module)
    job = run()

    def rename(_module: nn.Module, state_dict: dict[str, torch.Tensor], *_rest: object) -> None:
        for key in list(state_dict):
            state_dict[key.removeprefix("module.")] = state_dict.pop(key)

    before_load(job.models[0], rename)
    job.accelerator.load_state(str(folder))
    assert (agent.last().verdict, agent.last().coverage) == ("ok", Coverage(1.0, 1.0))


@pytest.mark.parametrize("kind", ["optimizer", "scheduler"])
def test_what_came_before_a_missing_file_is_in(agent: Agent, tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "state")
    wanted = load_file(folder / "model.safetensors")
    (folder / f"{kind}.bin").unlink()
    job = run()
    with pytest.raises(FileNotFoundError) as caught:
        job.accelerator.load_state(str(folder))
    report = caught.value.ckpt_sentry
    assert all(torch.equal(value, wanted[key]) for key, value in job.models[0].state_dict().items())
    assert (report.verdict, codes(report)) == ("failed", [f"{kind}_missing", "partly_overwritten"])
    assert report.findings[-1].text == "The model is whole: only training state is lacking."
    assert agent.last() == report


def test_a_missing_optimizer_is_started_anew_as_the_report_says(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", trained=0)
    with pytest.raises(FileNotFoundError) as caught:
        run().accelerator.load_state(str(folder))
    assert caught.value.ckpt_sentry.findings[0].next == (
        "To start it anew, call load_state before the optimizer is prepared."
    )
    job = run(trained=0)
    job.accelerator.load_state(str(folder))
    job.accelerator.prepare(torch.optim.AdamW(job.models[0].parameters()))
    assert (agent.last().verdict, codes(agent.last())) == ("ok", [])


def test_nothing_that_was_prepared_is_nothing_that_was_loaded(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    run(()).accelerator.load_state(str(folder))
    assert (agent.last().verdict, codes(agent.last())) == ("no_op", ["nothing_prepared"])
    assert agent.last().findings[0].text == (
        f"Nothing was prepared: model.safetensors, optimizer.bin, scheduler.bin of {folder} stay unread."
    )
    agent.mode("strict")
    with pytest.raises(LowCoverageError, match="Nothing was prepared"):
        run(()).accelerator.load_state(str(folder))


def test_a_folder_without_states_leaves_nothing_unread(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", ())
    run(()).accelerator.load_state(str(folder))
    assert (agent.last().verdict, agent.last().findings) == ("ok", ())


class Counter:
    """
    An object with a state of its own.
    """

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.count < 0:
            raise ArithmeticError("no state for this one")
        self.count = state["count"]


def counting(job: Run, count: int = 0) -> Run:
    counter = Counter()
    counter.count = count
    job.accelerator.register_for_checkpointing(counter)
    return job


def test_registered_objects_are_a_part_of_the_load(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    with pytest.raises(RuntimeError, match="Number of custom checkpoints") as caught:
        counting(run()).accelerator.load_state(str(folder))
    report = caught.value.ckpt_sentry
    assert (report.verdict, codes(report)) == ("failed", ["custom_missing", "partly_overwritten"])
    assert report.findings[0].next == "To start them anew, call register_for_checkpointing after load_state."
    job = run()
    job.accelerator.load_state(str(folder))
    counting(job)
    assert agent.last().verdict == "ok"


def test_a_registered_object_that_raises_ends_the_load(agent: Agent, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPT_SENTRY", "0")
        counting(run()).accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(ArithmeticError) as caught:
        counting(run(), -1).accelerator.load_state(str(tmp_path / "state"))
    report = caught.value.ckpt_sentry
    assert (report.verdict, codes(report)) == ("failed", ["rank_raised", "partly_overwritten"])
    assert report == agent.last()


def test_a_folder_that_is_not_there_is_a_load_that_failed(agent: Agent, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder does not exist") as caught:
        run().accelerator.load_state(str(tmp_path / "none"))
    report = caught.value.ckpt_sentry
    assert (report.verdict, report.path, codes(report)) == ("failed", str(tmp_path / "none"), ["path_missing"])
    assert agent.reports() == [report]


@pytest.mark.parametrize("is_there", [True, False])
def test_the_newest_of_no_folders(agent: Agent, tmp_path: Path, *, is_there: bool) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(Net())
    if is_there:
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises((IndexError, FileNotFoundError)):
        accelerator.load_state()
    assert (agent.last().path, codes(agent.last())) == (
        str(tmp_path / "checkpoints"),
        ["no_checkpoint_files" if is_there else "path_missing"],
    )


def test_the_newest_folder_is_named(agent: Agent, tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(Net())
    accelerator.save_state()
    accelerator.save_state()
    accelerator.load_state()
    report = agent.last()
    assert (report.verdict, report.path) == ("ok", str(tmp_path / "checkpoints" / "checkpoint_1"))


FILES = {
    "lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    "html_page": b"<!DOCTYPE html><html><body>404</body></html>",
    "truncated_file": None,
    "empty_file": b"",
}


@pytest.mark.parametrize("code", FILES)
@pytest.mark.parametrize("mode", ["1", "observe", "strict"])
def test_a_file_that_is_something_else_keeps_the_loaders_exception(
    agent: Agent, tmp_path: Path, code: str, mode: str
) -> None:
    file = saved(tmp_path / "state") / "model.safetensors"
    content = FILES[code]
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    agent.mode(mode)
    with pytest.raises(SafetensorError) as caught:
        run().accelerator.load_state(str(file.parent))
    report = caught.value.ckpt_sentry
    assert (report.verdict, codes(report), report.coverage) == ("failed", [code], None)


def test_a_model_that_a_hook_takes_over_is_not_compared(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    job = run()

    def take_over(models: list[nn.Module], input_dir: str) -> None:
        models.pop().load_state_dict(in_module(load_file(Path(input_dir) / "model.safetensors")), strict=False)

    job.accelerator.register_load_state_pre_hook(take_over)
    job.accelerator.load_state(str(folder))
    inner, whole = agent.reports()
    assert (inner.entry_point, inner.verdict) == ("Module.load_state_dict", "no_op")
    assert (whole.verdict, whole.coverage, codes(whole, "info")) == ("ok", None, ["not_compared"])


def test_a_hook_that_raises_ends_the_load(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    job = run()

    def refuse(_models: list[nn.Module], _input_dir: str) -> None:
        raise LookupError("not this one")

    job.accelerator.register_load_state_pre_hook(refuse)
    with pytest.raises(LookupError):
        job.accelerator.load_state(str(folder))
    assert (agent.last().verdict, codes(agent.last())) == ("failed", ["rank_raised"])


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        ({"step": 1}, "random_state, numpy_random_seed, torch_manual_seed"),
        ({"random_state": random.getstate(), "numpy_random_seed": 0}, "torch_manual_seed"),
    ],
    ids=["none", "some"],
)
def test_states_of_generators_that_are_not_whole_are_said(
    agent: Agent, tmp_path: Path, content: dict[str, object], missing: str
) -> None:
    folder = saved(tmp_path / "state")
    torch.save(content, folder / "random_states_0.pkl")
    run().accelerator.load_state(str(folder))
    assert codes(agent.last()) == ["rng_missing"]
    assert agent.last().findings[0].text.startswith(f"random_states_0.pkl lacks {missing}: ")


def test_a_scaler_that_nobody_asks_for_is_said(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    torch.save({}, folder / "scaler.pt")
    torch.save({}, folder / "dl_state_dict.bin")
    run().accelerator.load_state(str(folder))
    assert (agent.last().verdict, codes(agent.last())) == ("ok", ["loader_extra", "scaler_extra"])


def test_what_was_saved_for_more_is_said(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", (Net, Head), trained=2)
    run((Net, Head)).accelerator.load_state(str(folder))
    assert (agent.last().verdict, codes(agent.last())) == ("ok", ["optimizer_extra", "scheduler_extra"])
    run().accelerator.load_state(str(folder))
    assert codes(agent.last()) == ["model_extra", "optimizer_extra", "scheduler_extra"]


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_states_of_generators_that_are_not_restored_are_said(
    agent: Agent, tmp_path: Path, content: bytes | None
) -> None:
    folder = saved(tmp_path / "state")
    (folder / "random_states_0.pkl").unlink()
    if content is not None:
        (folder / "random_states_0.pkl").write_bytes(content)
    run().accelerator.load_state(str(folder))
    assert (agent.last().verdict, codes(agent.last())) == ("ok", ["rng_missing"])


def test_a_late_failure_says_what_was_overwritten(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    (folder / "scheduler.bin").write_bytes(b"x" * 30)
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        run().accelerator.load_state(str(folder))
    report = caught.value.ckpt_sentry
    assert (report.verdict, report.error.phase, codes(report)) == (
        "failed",
        "scheduler",
        ["unknown_format", "partly_overwritten"],
    )
    assert report.findings[1].text == (
        "Overwritten before it failed: model, optimizer.bin. What comes after is as it was."
    )
    assert agent.last() == report


@pytest.mark.parametrize("classes", [(Net,), (Net, Head)], ids=["one", "several"])
def test_the_exception_says_each_thing_once(
    agent: Agent, capfd: pytest.CaptureFixture[str], tmp_path: Path, classes: tuple[type[nn.Module], ...]
) -> None:
    folder = saved(tmp_path / "state", classes)
    edited(folder / "model.safetensors", lambda held: {**held, "head.weight": torch.zeros(3, 8)})
    with pytest.raises(LowCoverageError) as caught:
        run(classes).accelerator.load_state(str(folder))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(set(lines))
    assert [line.split()[0] for line in lines[1:]] == ["checkpoint", "cause", "next"]
    assert lines[1].endswith(" · 10 keys")
    assert (agent.last().model.keys, agent.last().checkpoint.keys) == (10, 10)
    assert "Accelerator.load_state refused: 9 of 10 keys would load" in capfd.readouterr().err


def test_keys_of_all_models_are_counted(agent: Agent, tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", (Net, Head))
    run((Net, Head)).accelerator.load_state(str(folder))
    assert (agent.last().model.keys, agent.last().checkpoint.keys) == (12, 12)


@pytest.mark.usefixtures("agent")
def test_no_loose_load_is_proposed_where_as_much_is_unexpected(tmp_path: Path) -> None:
    folder = saved(tmp_path / "state")
    edited(folder / "model.safetensors", lambda held: {**headless(held), "scorer.weight": torch.zeros(3)})
    with pytest.raises(LowCoverageError) as caught:
        run().accelerator.load_state(str(folder))
    assert all("strict=False" not in (one.next or "") for one in caught.value.ckpt_sentry.findings)
    assert "strict=False" not in str(caught.value)


def test_weights_are_tied_before_they_are_prepared(agent: Agent, tmp_path: Path) -> None:
    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**small, num_attention_heads=2, tie_word_embeddings=True)

    def job(*, tied: bool) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        model = transformers.LlamaForCausalLM(config)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        if tied:
            model.tie_weights()
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        return accelerator

    job(tied=True).save_state(str(tmp_path / "state"))
    with pytest.raises(LowCoverageError, match=r"Call model\.tie_weights\(\) before accelerator\.prepare\.") as caught:
        job(tied=False).load_state(str(tmp_path / "state"))
    assert "ALLOW_MISSING" not in str(caught.value)
    assert "strict=False" not in str(caught.value)
    job(tied=True).load_state(str(tmp_path / "state"))
    assert agent.last().verdict == "ok"
