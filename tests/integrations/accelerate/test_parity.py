"""
accelerate's loads with the agent and without: the same exception, with the same arguments, and the same values in the
model, at each stage at which accelerate may raise. What differs is a refusal that docs/policy.md names.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate import load_checkpoint_in_model as load_in_model
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import save_file
from torch import nn

from ckpt_sentry import LowCoverageError
from ckpt_sentry.patching import ledger
from tests.agents import Agent, hooked
from tests.integrations.nets import Net, renamed, values

CPU = {"": "cpu"}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
BYTES = {"lfs": LFS, "html": b"<!DOCTYPE html><html>404</html>", "empty": b"", "noise": b"x" * 99}
HALF = list(values())[:5]


class Outcome(NamedTuple):
    """
    All that a program can see of a load.
    """

    kind: type | None
    args: tuple[Any, ...]
    values: dict[str, Any]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def put(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors", kind: str = "pt") -> Path:
    save_file({key: value.clone() for key, value in tensors.items()}, folder / name, metadata={"format": kind})
    return folder


def sharded(folder: Path, second: bytes | None) -> Path:
    names = {key: ("a" if key in HALF else "b") + ".safetensors" for key in values()}
    put(folder, {key: value for key, value in values().items() if key in HALF}, "a.safetensors")
    if second is not None:
        (folder / "b.safetensors").write_bytes(second)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def file(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    (folder / name).write_bytes(content)
    return folder


def holding(content: bytes, name: str) -> Callable[[Path], Path]:
    return lambda folder: file(folder, content, name)


def pickled(folder: Path, content: object) -> Path:
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def cut(folder: Path) -> Path:
    path = put(folder, values()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-99])
    return folder


def another_shape() -> dict[str, torch.Tensor]:
    return {**values(), "head.weight": torch.zeros(3, 8)}


FILES: dict[str, Callable[[Path], Path]] = {
    "good": lambda folder: put(folder, values()),
    "good shards": lambda folder: sharded(
        folder, put(folder, values(), "b.safetensors").joinpath("b.safetensors").read_bytes()
    ),
    "none": lambda folder: folder / "none",
    "no files": lambda folder: folder,
    "two indexes": lambda folder: file(file(folder, b"{}", "a.index.json"), b"{}", "b.index.json"),
    "bad index": lambda folder: file(folder, b"{", "model.safetensors.index.json"),
    "missing shard": lambda folder: sharded(folder, None),
    "broken shard": lambda folder: sharded(folder, LFS),
    "cut": cut,
    "of tensorflow": lambda folder: put(folder, values(), kind="tf2"),
    "a list": lambda folder: pickled(folder, [1, 2]),
    "an object": lambda folder: pickled(folder, nn.Linear(2, 2)),
    "unexpected": lambda folder: put(folder, {**values(), "x.y": torch.zeros(1)}),
    "another shape": lambda folder: put(folder, another_shape()),
    "renamed": lambda folder: put(folder, renamed("module.")),
    "headless": lambda folder: put(folder, {key: value for key, value in values().items() if "head" not in key}),
    **{name: holding(content, "model.safetensors") for name, content in BYTES.items()},
    **{f"{name} bin": holding(content, "pytorch_model.bin") for name, content in BYTES.items()},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "map": {"device_map": CPU},
    "strict": {"strict": True},
    "strict map": {"device_map": CPU, "strict": True},
}
MAPS: dict[str, dict[str, Any]] = {
    "int": {"device_map": 0},
    "word": {"device_map": "cpu"},
    "typo": {"device_map": {"": "cpuu"}},
    "one typo": {"device_map": {"embed": "cpu", "layers": "cpuu", "head": "cpu"}},
    "all on disk": {"device_map": {"": "disk"}, "offload_folder": "off"},
    "no folder": {"device_map": {"embed": "cpu", "layers": "disk", "head": "cpu"}},
    "wrong names": {"device_map": {"model.embed": "cpu", "model.layers": "cpu", "model.head": "cpu"}},
    "uncovered": {"device_map": {"embed": "cpu", "layers": "cpu"}},
    "uncovered, no folder": {"device_map": {"embed": "cpu", "layers": "disk"}},
    "no dtype": {"device_map": CPU, "dtype": "float99"},
    "on disk": {"device_map": {"embed": "cpu", "layers": "disk", "head": "cpu"}, "offload_folder": "off"},
}
REFUSED = {"another shape", "renamed", "headless"}
"""Files of which too little would load."""
UNCOVERED = {"wrong names", "uncovered"}
"""Maps on which accelerate's own check ends the load before anything is written."""


class Counter:
    """
    An object whose state cannot be loaded.
    """

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _state: dict[str, int]) -> None:
        raise ArithmeticError("no state")


def state_of(folder: Path, change: Callable[[Path, Accelerator], object], **options: Any) -> Callable[[], nn.Module]:
    """
    A call of `load_state` on a folder that was saved, and changed since.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    optimizer_of(accelerator, accelerator.prepare(Net()))
    accelerator.save_state(str(folder))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    optimizer_of(accelerator, model)
    change(folder, accelerator)

    def load() -> nn.Module:
        accelerator.load_state(str(folder), **options)
        return model

    load.model = model  # type: ignore[attr-defined]
    return load


def optimizer_of(accelerator: Accelerator, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))


def gone(name: str) -> Callable[[Path, Accelerator], object]:
    return lambda folder, _: (folder / name).unlink()


def instead(name: str, content: bytes) -> Callable[[Path, Accelerator], object]:
    return lambda folder, _: (folder / name).write_bytes(content)


def raising(_models: object, _folder: object) -> None:
    raise LookupError("not this one")


def without_folder(folder: Path, _: Accelerator) -> None:
    shutil.rmtree(folder)


def custom(folder: Path, accelerator: Accelerator) -> None:
    accelerator.register_for_checkpointing(Counter())
    torch.save({}, folder / "custom_checkpoint_0.pkl")


STATES: dict[str, Callable[[Path, Accelerator], object]] = {
    "good": lambda _folder, _accelerator: None,
    "no folder": without_folder,
    **{
        f"no {name}": gone(name)
        for name in ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    },
    **{f"model {name}": instead("model.safetensors", content) for name, content in BYTES.items()},
    **{f"optimizer {name}": instead("optimizer.bin", content) for name, content in BYTES.items()},
    "another optimizer": lambda folder, _: torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin"),
    "scheduler noise": instead("scheduler.bin", BYTES["noise"]),
    "random noise": instead("random_states_0.pkl", BYTES["noise"]),
    "custom count": lambda _, accelerator: accelerator.register_for_checkpointing(Counter()),
    "custom raises": custom,
    "hook raises": lambda _, accelerator: accelerator.register_load_state_pre_hook(raising),
    "another shape": lambda folder, _: put(folder, another_shape()),
    "renamed": lambda folder, _: put(folder, renamed("module.")),
    "headless": lambda folder, _: put(folder, {key: one for key, one in values().items() if "head" not in key}),
}


def loader(name: str, files: str, options: dict[str, Any]) -> Callable[[Path], Outcome]:
    def case(folder: Path) -> Outcome:
        path, model = FILES[files](folder), net()
        given = {**options, **({"offload_folder": str(folder / "off")} if "offload_folder" in options else {})}
        call = load_in_model if name == "in_model" else load_checkpoint_and_dispatch
        return outcome(model, lambda: call(model, path, **given))

    return case


def state(name: str, options: dict[str, Any]) -> Callable[[Path], Outcome]:
    def case(folder: Path) -> Outcome:
        load = state_of(folder / "state", STATES[name], **options)
        return outcome(load.model, load)  # type: ignore[attr-defined]

    return case


def meta(folder: Path) -> Outcome:
    with init_empty_weights():
        model = net()
    return outcome(model, lambda: load_checkpoint_and_dispatch(model, put(folder, values())))


def newest(folder: Path) -> Outcome:
    AcceleratorState._reset_state(reset_partial_state=True)
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    return outcome(accelerator.prepare(net()), accelerator.load_state)


def unnamed(_folder: Path) -> Outcome:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    return outcome(accelerator.prepare(net()), accelerator.load_state)


def dispatched(folder: Path) -> Outcome:
    model = net()
    return outcome(model, lambda: dispatch_model(model, {"embed": "cpu", "layers": "disk"}, offload_dir=folder / "off"))


CASES: dict[str, Callable[[Path], Outcome]] = {
    **{
        f"{call}: {files}: {how}": loader(call, files, OPTIONS[how])
        for call, ways in (("in_model", OPTIONS), ("dispatch", ("map",)))
        for how in ways
        for files in FILES
    },
    **{f"{call}: good: {how}": loader(call, "good", MAPS[how]) for call in ("in_model", "dispatch") for how in MAPS},
    **{f"state: {name}": state(name, {}) for name in STATES},
    **{f"state: {name}: loose": state(name, {"strict": False}) for name in ("another shape", "headless")},
    "dispatch: meta": meta,
    "state: newest": newest,
    "state: unnamed": unnamed,
    "dispatch_model: uncovered": dispatched,
}


def outcome(model: nn.Module, load: Callable[[], object]) -> Outcome:
    kind, args = None, ()
    try:
        load()
    except Exception as error:
        kind, args = type(error), error.args
    return Outcome(kind, tuple(map(str, args)), {key: numbers(value) for key, value in model.state_dict().items()})


def numbers(value: torch.Tensor) -> Any:
    return None if value.is_meta else value.tolist()


def run(case: str, folder: Path) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return CASES[case](folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    One folder for all loads: exceptions name it.
    """
    return tmp_path_factory.mktemp("parity") / "place"


@pytest.fixture(scope="module", autouse=True)
def without(place: Path) -> Iterator[dict[str, Outcome]]:
    """
    What happens without the agent.
    """
    ledger.uninstall()
    # accelerate collects garbage after each file: there shall be little to look at.
    gc.collect()
    gc.freeze()
    found = {case: run(case, place) for case in CASES}
    with hooked("accelerate.accelerator"):
        yield found
    gc.unfreeze()


def is_refused(case: str, mode: str) -> bool:
    """
    Whether too little would load, which an explicit strict=False allows but for the mode "strict".
    """
    parts = case.split(": ")
    return mode != "observe" and not REFUSED.isdisjoint(parts) and (mode == "strict" or parts[-1] != "loose")


@pytest.mark.parametrize("mode", ["1", "observe", "strict"])
@pytest.mark.parametrize("case", CASES)
def test_the_only_differences_are_refusals(
    agent: Agent, place: Path, without: dict[str, Outcome], case: str, mode: str
) -> None:
    agent.mode(mode)
    got, wanted = run(case, place), without[case]
    untouched = {key: numbers(value) for key, value in net().state_dict().items()}
    if is_refused(case, mode):
        assert (got.kind, got.values) == (LowCoverageError, untouched)
    elif mode != "observe" and not UNCOVERED.isdisjoint(case.split(": ")):
        assert (got.kind, got.values) == (wanted.kind, untouched)
    else:
        assert got == wanted
    if got.kind is not None and not case.startswith("dispatch_model"):
        assert agent.last().error is not None
