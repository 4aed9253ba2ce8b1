"""
Loads by nn.Module, torch, safetensors, transformers and `Accelerator.load_state`, with each function of their
integrations broken in turn, compared with the same loads without the agent.

Prints what `tests.chaos.run` does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
# To observe: what the agent refuses on purpose is no outcome of the host's.
os.environ |= {"CKPT_SENTRY_GUARD": "swallow", "CKPT_SENTRY_LOG": "auto", "CKPT_SENTRY": "observe"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "ACCELERATE_USE_CPU": "true"}
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from safetensors.torch import load_file, load_model, save_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import set_model_state_dict  # noqa: E402

from ckpt_sentry import install, uninstall  # noqa: E402
from ckpt_sentry.integrations.torch_module import calls  # noqa: E402
from ckpt_sentry.integrations.torch_module import report as module_report  # noqa: E402
from ckpt_sentry.session import loads  # noqa: E402
from tests import chaos  # noqa: E402
from tests.integrations.nets import Net, renamed, values  # noqa: E402

FOLDER = Path(tempfile.mkdtemp(prefix="ckpt-sentry-chaos-"))
WATCHED = (
    "integrations.torch_module",
    "integrations.transformers",
    "integrations.accelerate.state",
    "model",
    "session.conclude",
)


def outcome(load: Callable[[Any], Any], model: Any) -> tuple[Any, ...]:
    """
    All that a program can see of a load: what it returns or raises, and what is in the model.
    """
    try:
        result: Any = load(model)
    except BaseException as error:
        return type(error), str(error), held(model)
    return held(result) if isinstance(result, torch.nn.Module) else str(result)[:500], held(model)


def held(model: Any) -> Any:
    if not isinstance(model, torch.nn.Module):
        return None
    return {key: value.tolist() for key, value in model.state_dict().items() if value.device.type != "meta"}


def outcomes(state: Accelerator) -> list[tuple[Any, ...]]:
    """
    Good loads, missing and renamed keys, other shapes, files that are none.
    """
    with contextlib.suppress(Exception):
        module_report.forget()
    # What a broken point may have left: each is to be met by the next.
    loads._current.set(None)
    calls._inside.set(False)
    good, bad = str(FOLDER / "good.safetensors"), str(FOLDER / "bad.safetensors")
    small = {key: value for key, value in values().items() if "head" not in key}

    def net() -> Net:
        torch.manual_seed(0)
        return Net()

    def bert(folder: str) -> Any:
        torch.manual_seed(0)
        return transformers.BertModel.from_pretrained(FOLDER / folder)

    found = [
        outcome(lambda model: model.load_state_dict(values()), net()),
        outcome(lambda model: model.load_state_dict(renamed("module.")), net()),
        outcome(lambda model: model.load_state_dict(renamed("module."), strict=False), net()),
        outcome(lambda model: model.load_state_dict(small, strict=False), net()),
        outcome(lambda model: model.load_state_dict({**values(), "head.weight": torch.zeros(2)}), net()),
        outcome(lambda model: model.load_state_dict({"state_dict": values()}, strict=False), net()),
        outcome(lambda model: set_model_state_dict(model, values()), net()),
        outcome(lambda model: model.load_state_dict(torch.load(FOLDER / "good.pt")["model"]), net()),
        outcome(lambda _: torch.load(FOLDER / "empty.pt"), None),
        outcome(lambda model: model.load_state_dict(load_file(good)), net()),
        outcome(lambda model: load_model(model, good), net()),
        outcome(lambda model: load_model(model, bad), net()),
        outcome(lambda _: bert("bert"), None),
        outcome(lambda _: bert("renamed"), None),
        outcome(lambda _: bert("empty"), None),
        outcome(lambda _: state.load_state(str(FOLDER / "state")), state._models[0]),
        outcome(lambda _: state.load_state(str(FOLDER / "state-renamed")), state._models[0]),
    ]
    return [*found, outcome(lambda _: state.load_state(str(FOLDER / "state-broken")), state._models[0])]


def prepare() -> Accelerator:
    save_file(values(), FOLDER / "good.safetensors")
    save_file(renamed("module."), FOLDER / "bad.safetensors")
    torch.save({"model": values()}, FOLDER / "good.pt")
    (FOLDER / "empty.pt").write_bytes(b"")
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
        )
    )
    for name in ("bert", "renamed", "empty"):
        bert.save_pretrained(FOLDER / name)
    change(FOLDER / "renamed" / "model.safetensors")
    (FOLDER / "empty" / "model.safetensors").write_bytes(b"")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for name in ("state", "state-renamed", "state-broken"):
        accelerator.save_state(str(FOLDER / name))
    change(FOLDER / "state-renamed" / "model.safetensors")
    (FOLDER / "state-broken" / "optimizer.bin").write_bytes(b"")
    return accelerator


def change(file: Path) -> None:
    held = {f"module.{key}": value.clone() for key, value in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})


def is_watched(point: chaos.Point) -> bool:
    return str(point).removeprefix("ckpt_sentry.").startswith(WATCHED)


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    uninstall()
    state = prepare()
    wanted = outcomes(state)
    install()
    chaos.run(lambda: outcomes(state), wanted, is_watched)


if __name__ == "__main__":
    main()
