from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_sentry import LowCoverageError
from tests.agents import Agent, codes, hooked
from tests.integrations.nets import Net, equal, values

try:
    from transformers.trainer_utils import load_sharded_checkpoint
except ImportError:  # before transformers 5
    from transformers.modeling_utils import load_sharded_checkpoint

PARTS = ("embed", "layers.0", "layers.1", "head")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    with hooked("transformers.modeling_utils", "transformers.trainer_utils"):
        yield


def file_of(part: int) -> str:
    return f"model-{part + 1:05}-of-{len(PARTS):05}.safetensors"


def sharded(folder: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, part in enumerate(PARTS):
        held = {key: value for key, value in (state or values()).items() if part in key}
        save_file(held, folder / file_of(number), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file_of(number))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("strict", [True, False])
def test_a_good_one_is_one_good_load(
    agent: Agent, tmp_path: Path, capfd: pytest.CaptureFixture[str], *, strict: bool
) -> None:
    model = Net()
    load_sharded_checkpoint(model, sharded(tmp_path / "checkpoint-7"), strict=strict)
    assert equal(model, values())
    (report,) = agent.reports()
    assert (report.framework, report.entry_point, report.verdict) == ("transformers", "load_sharded_checkpoint", "ok")
    assert (report.coverage.judged, report.step, report.checkpoint.files, report.findings) == (1.0, 7, 4, ())
    assert "ckpt_sentry !" not in capfd.readouterr().err


def test_files_of_torch_save(agent: Agent, tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = json.loads((folder / INDEX).read_text())
    for file in folder.glob("*.safetensors"):
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    index["weight_map"] = {key: name.replace("safetensors", "bin") for key, name in index["weight_map"].items()}
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    load_sharded_checkpoint(Net(), folder, strict=False)
    (report,) = agent.reports()
    assert (report.verdict, report.format, report.coverage.judged) == ("ok", "torch_save", 1.0)


def test_a_shard_that_lacks_what_the_index_names(agent: Agent, tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    held = load_file(folder / file_of(1))
    gone = min(held)
    save_file({key: held[key] for key in held if key != gone}, folder / file_of(1), metadata={"format": "pt"})
    load_sharded_checkpoint(Net(), folder)
    (report,) = agent.reports()
    assert (report.verdict, report.missing.keys) == ("partial", (gone,))
    assert set(codes(report, "warning")) >= {"missing_keys", "index_incomplete"}
    agent.mode("strict")
    with pytest.raises(LowCoverageError) as caught:
        load_sharded_checkpoint(Net(), folder)
    assert caught.value.ckpt_sentry.missing.keys == (gone,)


def test_shards_of_a_part_are_a_partial_load(agent: Agent, tmp_path: Path) -> None:
    folder = sharded(tmp_path, {key: value for key, value in values().items() if "layers.1" not in key})
    result = load_sharded_checkpoint(Net(), folder, strict=False)
    (report,) = agent.reports()
    assert (report.verdict, report.missing.count) == ("partial", len(result.missing_keys))
    assert "missing_keys" in codes(report, "warning")


def test_shards_of_another_model_load_nothing(agent: Agent, tmp_path: Path) -> None:
    folder = sharded(tmp_path, {f"model.{key}": value for key, value in values().items()})
    model = Net()
    load_sharded_checkpoint(model, folder, strict=False)
    (report,) = agent.reports()
    assert (report.verdict, report.coverage.keys) == ("no_op", 0)
    assert report.rename is not None


def test_what_it_refuses_keeps_its_exception(agent: Agent, tmp_path: Path) -> None:
    folder = sharded(tmp_path, {key: value for key, value in values().items() if "head" not in key})
    model = Net()
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        load_sharded_checkpoint(model, folder)
    assert caught.value.ckpt_sentry == agent.last()
    (found,) = (one for one in agent.last().findings if one.code == "missing_keys")
    assert (agent.last().verdict, found.level) == ("failed", "error")
    assert "load_sharded_checkpoint(…, strict=False)" in found.next
    load_sharded_checkpoint(model, folder, strict=False)


def test_another_shape_and_a_shard_that_is_gone(agent: Agent, tmp_path: Path) -> None:
    folder = sharded(tmp_path, {**values(), "head.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_sharded_checkpoint(Net(), folder, strict=False)
    assert "shape_mismatch" in codes(agent.last(), "error")
    (sharded(tmp_path) / file_of(0)).unlink()
    with pytest.raises(OSError, match="00001") as caught:
        load_sharded_checkpoint(Net(), folder, strict=False)
    assert "shard_missing" in codes(caught.value.ckpt_sentry, "error")
    with pytest.raises(ValueError, match="index"):
        load_sharded_checkpoint(Net(), tmp_path / "elsewhere")
    assert agent.last().verdict == "failed"


def test_nothing_enters_a_module_on_meta(agent: Agent, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    load_sharded_checkpoint(model, sharded(tmp_path))
    assert (agent.last().verdict, codes(agent.last(), "warning")) == ("no_op", ["meta_left"])
