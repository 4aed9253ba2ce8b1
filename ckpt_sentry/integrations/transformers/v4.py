"""
transformers 4: the loading info, where `from_pretrained` gets it from `PreTrainedModel._load_pretrained_model`.

transformers 5 hands an object with the loading info to `_finalize_model_loading`, with the names of the model. Up to
4.57 `_load_pretrained_model` returns the model and lists of keys (modeling_utils.py:4426 of 4.48.3, 5285 of 4.57.1):

* 4.48 names missing keys as the checkpoint would, with or without the prefix of the base model, and mismatched ones
  with both shapes; 4.57 names the model's keys, and mismatched ones without shapes.
* A size mismatch that is not to be ignored is raised from within: then the headers of the files tell the shapes.
* Weights are tied after it has returned. So what it says is judged when `from_pretrained` returns, but for a quantised
  model, whose parameters get other names by then.
* `key_mapping` is not to be advised: 4.48 knows none, and 4.57 looks for the prefix of the base model before it
  renames, and raises where the rename brings it in.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckpt_sentry.core.findings import counted, listing, verb
from ckpt_sentry.core.fold import folds
from ckpt_sentry.core.report import Coverage, Finding
from ckpt_sentry.dataclasses_ import dataclass, replace
from ckpt_sentry.patching.guard import contained
from ckpt_sentry.session import loads

if TYPE_CHECKING:
    from ckpt_sentry.patching.ledger import Patch
    from ckpt_sentry.session.loads import Load

SEAM: Final = "_load_pretrained_model"
_FILES: Final = ("checkpoint_files", "resolved_archive_file")
"""The parameter that has the files: from 4.51 on, and before."""


class Info(NamedTuple):
    """
    What of `LoadStateDictInfo` (transformers 5, utils/loading_report.py) is told here. All keys are the model's.
    """

    missing_keys: set[str]
    unexpected_keys: set[str]
    mismatched_keys: set[tuple[str, Any, Any]]
    """Key, its shape in the checkpoint, its shape in the model."""


class Config(NamedTuple):
    """
    What of `LoadStateDictConfig` (transformers 5, modeling_utils.py) is told here.
    """

    ignore_mismatched_sizes: bool
    hf_quantizer: Any


@dataclass(slots=True)
class _Returned:
    """
    What `_load_pretrained_model` returned: judged when the weights are tied, at the end of the load.
    """

    model: Any
    config: Config
    info: Info
    is_noted: bool = False


def loading(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    """
    Wrap `_load_pretrained_model`.
    """
    current, reads, raised, returned = loads.current, _reads, _raised, _returned
    parameters = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def load_pretrained_model(*args: Any, **kwargs: Any) -> Any:
        load = current() if patch.active else None
        if load is None:
            return original(*args, **kwargs)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        reads(load, given)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            raised(load, given, error)
            raise
        returned(load, given, result)
        return result

    return load_pretrained_model


def note(load: Load) -> None:
    """
    Judge a load that is about to end by what `_load_pretrained_model` returned, with its weights tied by now.
    """
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    returned = load.state(_Returned)
    if returned is not None and not returned.is_noted:
        returned.is_noted = True
        transformers_judge.note_info(load, returned.model, returned.config, returned.info)
        _note_left(load, returned.model)


def _note_left(load: Load, model: Any) -> None:
    """
    Say what is on the meta device still, where nothing was to be offloaded: 4.57 leaves there what it takes for a key
    of the head.
    """
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    wanted, coverage = transformers_judge.state_of(load).wanted, load.facts.coverage
    left = {key for key, value in model.state_dict().items() if value.is_meta and key in wanted.entries}
    if not left or coverage is None or _offloads(getattr(model, "hf_device_map", None) or {}):
        return
    elements = sum(wanted.entries[key].elements for key in left)
    total = sum(entry.elements for entry in wanted.entries.values()) or 1
    shares = coverage.keys - len(left) / len(wanted.entries), coverage.elements - elements / total
    are, listed = verb(len(left), "is", "are"), listing(tuple(folds(left)))
    text = (
        f"{counted(len(left), 'tensor')} of the model {are} on the meta device after the load, without data: {listed}."
    )
    load.facts = replace(load.facts, coverage=Coverage(*(max(0.0, share) for share in shares))).with_findings(
        [Finding("meta_left", "warning", text)]
    )


def _offloads(device_map: Mapping[str, Any]) -> bool:
    """
    Whether values lie elsewhere until they are used: on disk, or on the CPU beside another device.
    """
    devices = set(map(str, device_map.values()))
    return "disk" in devices or ("cpu" in devices and len(devices) > 1)


@contained("transformers.reads")
def _reads(load: Load, given: Mapping[str, Any]) -> None:
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    state = transformers_judge.state_of(load)
    state.renames = False
    files = next((given[name] for name in _FILES if given.get(name)), ())
    if state.files is None:
        transformers_judge.note_files(load, ([files] if isinstance(files, (str, os.PathLike)) else files,))


@contained("transformers.returned")
def _returned(load: Load, given: Mapping[str, Any], result: Any) -> None:
    model, missing, unexpected, mismatched = result[:4]
    name = _namer(model)
    shapes = _saved_shapes(load, name) if any(isinstance(one, str) for one in mismatched) else {}
    ours = model.state_dict()
    pairs = [(one, None) if isinstance(one, str) else one[:2] for one in mismatched]
    info = Info(
        set(map(name, missing)),
        set(unexpected),
        {(name(key), shapes.get(name(key), shape) or (), tuple(ours[name(key)].shape)) for key, shape in pairs},
    )
    load.keep(_Returned(model, _config(given), info))
    if given.get("hf_quantizer") is not None:
        note(load)


@contained("transformers.raised")
def _raised(load: Load, given: Mapping[str, Any], error: BaseException) -> None:
    """
    Tell what the headers say of the model, where torch's words for a size mismatch have ended the load.
    """
    from ckpt_sentry.integrations.transformers import judge as transformers_judge
    from ckpt_sentry.model import inventories

    model = given.get("model")
    if model is None or not isinstance(error, RuntimeError) or "size mismatch" not in str(error):
        return
    saved = _saved_shapes(load, _namer(model))
    wanted = inventories.model_inventory(model)
    differing = {
        (key, saved[key], entry.shape)
        for key, entry in wanted.entries.items()
        if saved.get(key, entry.shape) != entry.shape
    }
    missing = {key for key in wanted.entries if key not in saved and wanted.ties.get(key) not in saved}
    if differing:
        info = Info(missing, saved.keys() - wanted.entries.keys(), differing)
        transformers_judge.note_info(load, model, _config(given), info)


def _config(given: Mapping[str, Any]) -> Config:
    return Config(bool(given.get("ignore_mismatched_sizes")), given.get("hf_quantizer"))


def _saved_shapes(load: Load, name: Callable[[str], str]) -> dict[str, Any]:
    """
    The shapes in the files, by the model's names.
    """
    from ckpt_sentry.integrations.transformers import judge as transformers_judge

    files: Iterable[Any] = transformers_judge._state_files(load)
    return {name(key): entry.shape for file in files for key, entry in file.inventory.entries.items()}


def _namer(model: Any) -> Callable[[str], str]:
    """
    What turns a key of the checkpoint into the model's: one of the two may have the prefix of the base model.
    """
    prefix = f"{model.base_model_prefix}." if getattr(model, "base_model_prefix", "") else ""
    known = model.state_dict().keys()

    def name(key: str) -> str:
        return next((one for one in (key, prefix + key, key.removeprefix(prefix)) if one in known), key)

    return name
