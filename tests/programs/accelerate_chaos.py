"""
Loads by accelerate with each function of the agent broken in turn, compared with the same loads without the agent.

Prints what `tests.chaos.run` does.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
os.environ |= {"CKPT_SENTRY_GUARD": "swallow", "CKPT_SENTRY_LOG": "auto", "HF_HUB_OFFLINE": "1"}
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
warnings.simplefilter("ignore")

import torch  # noqa: E402
from accelerate import dispatch_model, load_checkpoint_and_dispatch, load_checkpoint_in_model  # noqa: E402
from accelerate.utils import tqdm as _  # noqa: E402, F401 - imported now rather than in the first load
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from ckpt_sentry import install, uninstall  # noqa: E402
from tests import chaos  # noqa: E402

torch.set_num_threads(1)
FOLDER = Path(tempfile.mkdtemp(prefix="ckpt-sentry-chaos-"))
PARTS_OF_THE_AGENT = tuple(f"ckpt_sentry.{part}" for part in ("integrations", "model", "session", "core", "formats"))
PARTS = {"0": "cpu", "1": "disk", "2": "cpu"}
logging.getLogger("accelerate").setLevel(logging.CRITICAL)


def net(seed: int = 0) -> nn.Module:
    """
    Three layers, the last of which is the first again.
    """
    torch.manual_seed(seed)
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Linear(4, 4), first)


def outcome(load: Any) -> tuple[Any, ...]:
    """
    All that a program can see of a load: result, exception, values.
    """
    model = net()
    try:
        result = load(model)
    except BaseException as error:
        return (type(error), str(error), values(model))
    return (result is model, result is None, values(model))


def values(model: nn.Module) -> dict[str, Any]:
    """
    Plain numbers, which compare; of what is offloaded, those in its map.
    """
    found = {}
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for name, value in module._parameters.items():
            held = hook.weights_map[name] if value is not None and value.device.type == "meta" else value
            found[f"{path}.{name}"] = None if held is None else held.tolist()
    return found


def on_disk(model: nn.Module) -> nn.Module:
    """
    Load and dispatch, partly to disk.
    """
    shutil.rmtree(FOLDER / "off", ignore_errors=True)
    return load_checkpoint_and_dispatch(model, FOLDER / "good", device_map=PARTS, offload_folder=FOLDER / "off")


def by_itself(model: nn.Module) -> nn.Module:
    """
    Dispatch a model into a folder that is there already.
    """
    return dispatch_model(model, PARTS, offload_dir=FOLDER / "mine")


def outcomes() -> list[tuple[Any, ...]]:
    """
    Good loads with and without a map, one partly on disk, and loads that fail in accelerate.
    """
    return [
        outcome(lambda model: load_checkpoint_in_model(model, FOLDER / "good")),
        outcome(lambda model: load_checkpoint_and_dispatch(model, FOLDER / "good", device_map={"": "cpu"})),
        outcome(on_disk),
        outcome(by_itself),
        outcome(lambda model: load_checkpoint_and_dispatch(model, FOLDER / "nowhere", device_map={"": "cpu"})),
        outcome(lambda model: load_checkpoint_and_dispatch(model, FOLDER / "broken", device_map={"": "cpu"})),
        outcome(lambda model: load_checkpoint_and_dispatch(model, FOLDER / "good", device_map=0)),
    ]


def main() -> None:
    """
    Without the agent, with it, and with each point broken.
    """
    for name in ("good", "broken"):
        (FOLDER / name).mkdir()
    state = {key: value.clone() for key, value in net(1).state_dict().items()}
    save_file(state, FOLDER / "good" / "model.safetensors", metadata={"format": "pt"})
    (FOLDER / "broken" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    dispatch_model(net(), PARTS, offload_dir=FOLDER / "mine")
    uninstall()
    wanted = outcomes()
    install()
    # The loader collects garbage after each file: there shall be little to look at.
    gc.collect()
    gc.freeze()
    chaos.run(outcomes, wanted, lambda point: str(point).startswith(PARTS_OF_THE_AGENT))


if __name__ == "__main__":
    main()
