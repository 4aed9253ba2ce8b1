"""
Loads through accelerate, right and wrong ones: `accelerate_loads.py SCENARIO FOLDER`.

A load that fails ends the program with its exception; what the scenario prints is what it has seen of the model.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
warnings.simplefilter("ignore")

if sys.argv[1] == "late_install":
    os.environ["CKPT_SENTRY"] = "1"

import accelerate  # noqa: E402
import torch  # noqa: E402
from accelerate import (  # noqa: E402
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

torch.set_num_threads(1)
FOLDER = Path(sys.argv[2])
FOLDER.mkdir(parents=True, exist_ok=True)
CPU = {"": "cpu"}
PARTS = {"embed": "cpu", "layers": "disk", "head": "cpu"}


class Net(nn.Module):
    """
    An embedding, layers, a head that may share the embedding's weight.
    """

    def __init__(self, *, tied: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(layers))
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def net(seed: int = 0, **options: Any) -> Net:
    """
    A net whose values all differ from those of other seeds, norms too.
    """
    torch.manual_seed(seed)
    made = Net(**options)
    with torch.no_grad():
        for value in made.parameters():
            value.normal_()
    return made


def saved(state: dict[str, Any], name: str = "model.safetensors") -> str:
    """
    Save tensors under the folder.
    """
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().clone() for key, value in state.items()}, path, metadata={"format": "pt"})
    return str(path)


def prefixed() -> str:
    """
    A checkpoint whose every key begins with "model.".
    """
    return saved({f"model.{key}": value for key, value in net(1).state_dict().items()})


def headless() -> str:
    """
    A checkpoint without a head.
    """
    return saved({key: value for key, value in net(1).state_dict().items() if not key.startswith("head")})


def watch(model: nn.Module, load: Callable[[], Any]) -> None:
    """
    Load, and print whether the model is unchanged, also where the load raises.
    """
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load()
    finally:
        after = model.state_dict()
        print("UNCHANGED" if all(torch.equal(before[key], after[key]) for key in before) else "CHANGED")


def good() -> None:
    model = net()
    load_checkpoint_and_dispatch(model, saved(net(1).state_dict(), "checkpoint-40/model.safetensors"), device_map=CPU)
    assert torch.equal(model.embed.weight, net(1).embed.weight)


def in_model() -> None:
    load_checkpoint_in_model(net(), saved(net(1).state_dict()))


def wrong_prefix() -> None:
    model = net()
    watch(
        model, lambda: load_checkpoint_and_dispatch(model, prefixed(), device_map=PARTS, offload_folder=FOLDER / "off")
    )


def wrong_prefix_in_model() -> None:
    model, path = net(), prefixed()
    watch(model, lambda: load_checkpoint_in_model(model, path))


def aligned() -> None:
    for device_map in (None, CPU, "auto"):
        model = net()
        load_checkpoint_and_dispatch(model, prefixed(), device_map=device_map)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net(1).parameters(), strict=True))


def new_head() -> None:
    model = net()
    watch(model, lambda: load_checkpoint_and_dispatch(model, headless(), device_map=CPU))


def tied_lost() -> None:
    path = saved({key: value for key, value in net(1, tied=True).state_dict().items() if key != "embed.weight"})
    load_checkpoint_and_dispatch(net(tied=True), path, device_map=CPU)


def stale_dispatch() -> None:
    """
    A folder of another model's weights, and a model whose weights are right until it is dispatched.
    """
    other = saved(net(2).state_dict(), "other/model.safetensors")
    load_checkpoint_and_dispatch(net(), other, device_map=PARTS, offload_folder=FOLDER / "off")
    model = net()
    load_checkpoint_in_model(model, saved(net(1).state_dict()))
    dispatch_model(model, PARTS, offload_dir=FOLDER / "off")


def stale_missing() -> None:
    """
    Keys that the checkpoint lacks, and that the folder still has from another load.
    """
    other = saved(net(2).state_dict(), "other/model.safetensors")
    load_checkpoint_and_dispatch(net(), other, device_map=PARTS, offload_folder=FOLDER / "off")
    some = {key: value for key, value in net(1).state_dict().items() if not key.startswith("layers.1")}
    load_checkpoint_and_dispatch(net(), saved(some), device_map=PARTS, offload_folder=FOLDER / "off")


def reused_folder() -> None:
    """
    A folder that is used again, but whose files are all written anew.
    """
    for seed in (2, 1):
        path = saved(net(seed).state_dict(), f"{seed}/model.safetensors")
        load_checkpoint_and_dispatch(net(), path, device_map=PARTS, offload_folder=FOLDER / "off")


def uncovered() -> None:
    model = net()
    path = saved(net(1).state_dict())
    watch(model, lambda: load_checkpoint_and_dispatch(model, path, device_map={"embed": "cpu", "layers.0": "cpu"}))


def missing_shard() -> None:
    state = net(1).state_dict()
    names = {key: ("b" if key.startswith("layers") else "a") + ".safetensors" for key in state}
    saved({key: state[key] for key in names if names[key] == "a.safetensors"}, "a.safetensors")
    (FOLDER / "model.safetensors.index.json").write_text(__import__("json").dumps({"weight_map": names}))
    model = net()
    watch(model, lambda: load_checkpoint_and_dispatch(model, FOLDER, device_map=CPU))


def meta_without_map() -> None:
    with init_empty_weights():
        model = net()
    load_checkpoint_and_dispatch(model, saved(net(1).state_dict()))


def hostile() -> None:
    """
    A pickle that would leave a mark if anything ran it.
    """

    class Mark:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(FOLDER / "marked"),)

    torch.save({"embed.weight": Mark()}, FOLDER / "pytorch_model.bin")
    try:
        load_checkpoint_and_dispatch(net(), FOLDER, device_map=CPU)
    finally:
        print("MARKED" if (FOLDER / "marked").exists() else "CLEAN")


class Renaming(nn.Module):
    """
    Takes checkpoints of an older version, which had another name for its layers.
    """

    def __init__(self, *, working: bool = True) -> None:
        super().__init__()
        self.layers = net(0).layers
        if working:
            self.register_load_state_dict_pre_hook(self._rename)
        else:
            self.register_load_state_dict_pre_hook(lambda *_: None)

    @staticmethod
    def _rename(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key in [key for key in state if key.startswith("blocks.")]:
            state[key.replace("blocks.", "layers.")] = state.pop(key)


def renaming_hook() -> None:
    state = {f"blocks.{key}": value for key, value in net(1).layers.state_dict().items()}
    load_checkpoint_in_model(Renaming(working=sys.argv[3] == "working"), saved(state))


def fsdp_model() -> None:
    """
    A whole state dict of FSDP2 from which the head is missing, on one process.
    """
    from accelerate.utils.fsdp_utils import load_fsdp_model
    from torch.distributed.fsdp import StateDictType

    accelerate.PartialState(cpu=True)
    options = SimpleNamespace(offload_to_cpu=False, rank0_only=False)
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=options,
        optim_state_dict_config=options,
    )
    accelerator = SimpleNamespace(
        is_fsdp2=True, is_main_process=True, num_processes=1, process_index=0, wait_for_everyone=lambda: None
    )
    state = net(1).state_dict()
    if sys.argv[3] == "headless":
        del state["head.weight"]
    torch.save(state, FOLDER / "pytorch_model_fsdp.bin")
    model = net()
    watch(model, lambda: load_fsdp_model(plugin, accelerator, model, str(FOLDER)))


def in_threads() -> None:
    path = saved(net(1).state_dict())
    threads = [threading.Thread(target=load_checkpoint_in_model, args=(net(), path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def late_install() -> None:
    """
    The names above were bound before the agent came.
    """
    import ckpt_sentry

    ckpt_sentry.install()
    for load in (load_checkpoint_and_dispatch, accelerate.load_checkpoint_and_dispatch):
        try:
            load(net(), prefixed(), device_map=CPU)
        except RuntimeError as error:
            print(type(error).__name__)
    ckpt_sentry.uninstall()
    load_checkpoint_and_dispatch(net(), prefixed(), device_map=CPU)
    print("PASSED")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
