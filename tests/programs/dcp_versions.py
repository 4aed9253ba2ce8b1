"""
Other versions of torch, simulated: seams that are renamed or gone, one after another, in good and failing loads.

Prints {"differences": [...], "states": {what: {attribute: state}}} as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"CKPT_SENTRY_LOG": "off", "CKPT_SENTRY_GUARD": "swallow"}
warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import api, default_planner, format_utils, state_dict_loader, utils  # noqa: E402

from ckpt_sentry import hooks, install, uninstall  # noqa: E402

FOLDER = Path(tempfile.mkdtemp(prefix="ckpt-sentry-versions-"))
GONE = [
    (state_dict_loader, "load_state_dict"),
    (state_dict_loader, "_load_state_dict_from_keys"),
    (format_utils, "_load_state_dict"),
    (utils._DistWrapper, "barrier"),
    (utils._DistWrapper, "all_reduce"),
    (api.CheckpointException, "__str__"),
]
"""What may be absent without torch's own loads breaking; the rest is renamed below, with its uses."""


def without(owner: Any, name: str) -> Any:
    value = vars(owner)[name]
    delattr(owner, name)
    return value


def outcome(state: dict[str, Any], path: Path) -> tuple[Any, ...]:
    try:
        dcp.load(state, checkpoint_id=path, no_dist=True)
    except BaseException as error:
        failures = getattr(error, "failures", {})
        inner = [(rank, type(one), one.args) for rank, (one, _) in failures.items()]
        return (type(error), inner)
    return tuple(value.tolist() if isinstance(value, torch.Tensor) else value for value in state.values())


def outcomes() -> list[Any]:
    return [
        outcome({"a": torch.zeros(3), "n": 0}, FOLDER / "step-7"),
        outcome({"a": torch.zeros(4), "c": torch.zeros(2)}, FOLDER / "step-7"),
        outcome({"a": torch.zeros(3)}, FOLDER / "step-8"),
    ]


def renamed_wrap_exception() -> Any:
    """
    `utils` without its `_wrap_exception`: the methods of `_DistWrapper` find it under another name.
    """
    original = utils._wrap_exception

    def reduce_scatter(_: Any, step: str, map_fun: Any, reduce_fun: Any) -> Any:
        try:
            return reduce_fun([map_fun()])[0]
        except BaseException as error:
            raise api.CheckpointException(step, {0: original(error)}) from None

    saved = vars(utils._DistWrapper)["reduce_scatter"]
    utils._DistWrapper.reduce_scatter = reduce_scatter
    del utils._wrap_exception

    def restore() -> None:
        utils._DistWrapper.reduce_scatter = saved
        utils._wrap_exception = original

    return restore


def renamed_read_items() -> Any:
    """
    `default_planner` without its `_create_read_items`: the plan is made by another name.
    """
    original, made = default_planner.create_default_local_load_plan, default_planner._create_read_items

    def plan(state_dict: dict[str, Any], metadata: Any, strict: bool = True) -> Any:  # noqa: FBT001, FBT002
        default_planner._create_read_items = made
        try:
            return original(state_dict, metadata, strict)
        finally:
            del default_planner._create_read_items

    default_planner.create_default_local_load_plan = plan
    del default_planner._create_read_items

    def restore() -> None:
        default_planner.create_default_local_load_plan = original
        default_planner._create_read_items = made

    return restore


def no_size_check() -> Any:
    """
    As torch 2.4: the planner does not compare sizes.
    """
    original = default_planner.create_default_local_load_plan

    def plan(state_dict: dict[str, Any], metadata: Any, strict: bool = True) -> Any:  # noqa: FBT001, FBT002
        requests: list[Any] = []
        for fqn, value in state_dict.items():
            if fqn not in metadata.state_dict_metadata:
                if strict:
                    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
                continue
            requests += default_planner._create_read_items(fqn, metadata.state_dict_metadata[fqn], value)
        return default_planner.LoadPlan(requests)

    default_planner.create_default_local_load_plan = plan

    def restore() -> None:
        default_planner.create_default_local_load_plan = original

    return restore


def compare(what: str, found: dict[str, Any]) -> None:
    uninstall()
    wanted = outcomes()
    install()
    if outcomes() != wanted:
        found["differences"].append(what)
    found["states"][what] = {
        one.attribute: one.state for one in hooks.status() if "torch.distributed.checkpoint" in one.attribute
    }
    uninstall()
    if outcomes() != wanted:
        found["differences"].append(f"{what}, uninstalled")


def main() -> None:
    dcp.save({"a": torch.ones(3), "n": 5}, checkpoint_id=FOLDER / "step-7", no_dist=True)
    found: dict[str, Any] = {"differences": [], "states": {}}
    compare("as it is", found)
    for owner, name in GONE:
        value = without(owner, name)
        compare(f"no {name}", found)
        setattr(owner, name, value)
    for what in (renamed_wrap_exception, renamed_read_items, no_size_check):
        restore = what()
        compare(what.__name__, found)
        restore()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
