"""
What keys say in a DCP load beyond what they say anywhere.

DCP loads what is asked for: a program that wants the model alone from a checkpoint that has an optimizer as well is
no news. And what one rule of renaming explains is not listed again as missing and unexpected.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.core import codes
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.formats.step import STEP_KEYS
from ckpt_sentry.integrations.dcp.stock import is_torchs
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from ckpt_sentry.core import findings as findings_
    from ckpt_sentry.core.examine import Examination
    from ckpt_sentry.core.findings import anew, keys, listing, verb
    from ckpt_sentry.core.fold import folds
    from ckpt_sentry.core.inventory import Entry
    from ckpt_sentry.formats.dcp.metadata import DcpMetadata, Stored
else:
    findings_ = later("ckpt_sentry.core.findings")
    anew = later("ckpt_sentry.core.findings:anew")
    keys = later("ckpt_sentry.core.findings:keys")
    listing = later("ckpt_sentry.core.findings:listing")
    verb = later("ckpt_sentry.core.findings:verb")
    folds = later("ckpt_sentry.core.fold:folds")
    DcpMetadata = later("ckpt_sentry.formats.dcp.metadata:DcpMetadata")
    Stored = later("ckpt_sentry.formats.dcp.metadata:Stored")

_RENAME: Final = "Ask for them under the names that they have in the checkpoint, and rename them back after the load."
_RENAME_IN_DOUBT: Final = (
    "Ask for them under the names that they have in the checkpoint; see in the code that saved them which is which, "
    "and rename them after the load."
)
_SHOWN: Final = 3


def findings(examination: Examination, paths: Mapping[str, Any] | None) -> tuple[Finding, ...]:
    """
    The findings of an examination, shorter where DCP's ways explain them.

    `paths` is the path of each saved key in the nested state dict, as the planner recorded it (`planner_data`).
    """
    found = advised(examination.findings)
    if not examination.missing.count and not examination.unexpected.count:
        return found
    explained = _explained(examination)
    idle = _not_asked_for(examination, paths or {}, explained)
    if explained:
        found = tuple(one for one in found if one.code not in codes.ABSENCES | {"no_overlap"})
    elif not idle:
        return found
    rest = [key for key in examination.difference.unexpected if key not in idle and key not in explained]
    said = [one for one in found if one.code != "unexpected_keys"]
    if rest:
        said.append(codes.finding("unexpected_keys", "info", count=len(rest), listed=listing(tuple(folds(rest)))))
    return (*said, _idle(idle)) if idle else tuple(said)


def advised(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """
    The same findings, with the way to rename in DCP: a key that is not found is not read, so there is nothing yet to
    rename or to compare.
    """
    return tuple(
        replace(one, next=_RENAME if one.remedy == findings_.BY_RENAMING else _RENAME_IN_DOUBT)
        if one.code == "renamed_keys"
        else one
        for one in found
    )


def asked(state_dict: Mapping[str, Any], saved: AbstractSet[str]) -> dict[str, Any]:
    """
    The values of a state dict by the keys that `DefaultLoadPlanner` looks for, where the checkpoint has `saved`.

    A checkpoint from before torch 2.4 has lists without tensors in one piece; torch finds that out as is done here, but
    for 2.4 itself, which does not.
    """
    from ckpt_sentry.integrations.dcp.entries import flattened

    flat = flattened(state_dict)
    if surplus := saved - flat.keys():
        old = _flattened_before_2_4(state_dict)
        if not surplus.isdisjoint(old):
            return old
    return flat


def _flattened_before_2_4(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    try:
        from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
    except ImportError:  # torch 2.4
        return {}

    flat: dict[str, Any] = {}

    def take(path: tuple[Any, ...], value: Any) -> None:
        flat[".".join(map(str, path))] = value

    traverse_state_dict_v_2_3(state_dict, take)
    return flat


def asked_by_name(planner: Any, metadata: Any) -> tuple[str, ...]:
    """
    The names that a program gave `_load_state_dict_from_keys` and that are no key of the checkpoint, nor an entry of
    the state dict that was saved (torch 2.13.0, default_planner.py, `_should_include_key`).
    """
    names = getattr(planner, "keys", None)
    if not names or not is_torchs(planner, "_should_include_key") or not hasattr(planner, "_should_include_key"):
        return ()
    known = set(metadata.state_dict_metadata)
    for path in (metadata.planner_data or {}).values():
        known.update(accumulate(map(str, path), "{}.{}".format))
    return tuple(sorted(name for name in names if name not in known))


def not_read(examination: Examination, fractions: Mapping[str, float]) -> Iterator[Finding]:
    """
    Say which keys the plan leaves out, or reads in part, though both sides have them in one shape.

    `fractions` is the part in [0, 1] of each key that is not read whole.
    """
    other = {pair.key for pair in (*examination.difference.mismatched, *examination.difference.retyped)}
    lacking = [key for key, part in fractions.items() if part < 1 and key not in other]
    if lacking:
        is_or_are, which = verb(len(lacking), "is", "are"), listing(tuple(folds(lacking)))
        text = f"{keys(len(lacking))} {is_or_are} read in part or not at all: {which}."
        step = (
            "Look at the plan that the planner makes; if it is torch's own, the chunks in the checkpoint leave holes."
        )
        yield Finding("not_read", "warning", text, step)


def _explained(examination: Examination) -> AbstractSet[str]:
    """
    The keys of the checkpoint that a rename leads to the missing ones, where it explains them all; else none.
    """
    inference = examination.inference
    if inference is None or not set(inference.mapping.values()).issuperset(examination.difference.missing):
        return frozenset()
    return inference.mapping.keys()


def _not_asked_for(examination: Examination, paths: Mapping[str, Any], explained: AbstractSet[str]) -> dict[str, str]:
    """
    Unexpected keys below an entry of the saved state dict of which the program asked nothing, with that entry.
    """
    difference = examination.difference
    if not (examination.matched or explained) or not difference.unexpected:
        return {}
    mapped = set() if examination.inference is None else set(examination.inference.mapping)
    below = {key: _top(paths.get(key)) for key in difference.unexpected if key not in mapped}
    others = set(difference.unexpected) - explained
    used = {_top(path) for key, path in paths.items() if key not in others}
    used |= {key.partition(".")[0] for key in difference.missing}
    return {key: top for key, top in below.items() if top is not None and top not in used}


def _top(path: Any) -> str | None:
    return str(path[0]) if isinstance(path, tuple) and len(path) > 1 else None


def _idle(idle: Mapping[str, str]) -> Finding:
    counts = sorted(Counter(idle.values()).items())
    said = ", ".join(f'{keys(count)} under "{shown(top)}"' for top, count in counts[:_SHOWN])
    if rest := sum(count for _, count in counts[_SHOWN:]):
        said += f" and {rest:,} more"
    return Finding("not_asked_for", "info", f"{said} {verb(len(idle), 'was', 'were')} not asked for.")


def decisive(found: Iterable[Finding], way: str) -> tuple[Finding, ...]:
    """
    The findings on keys of a load that they ended: a missing key is an error then, and `way` is the way around it,
    where it is one.

    Where nothing is an error yet, what explains the failure becomes one.
    """
    raised = [replace(one, level="error") if one.code == "missing_keys" else one for one in anew(found, way)]
    if not any(one.level == "error" for one in raised):
        place = next((at for at, one in enumerate(raised) if one.level == "warning"), None)
        if place is not None:
            raised[place] = replace(raised[place], level="error")
    return tuple(raised)


def step_entries(metadata: Any, entry_of: Callable[[Any, dict[Any, Entry]], Entry]) -> DcpMetadata:
    """
    As much of torch's metadata as `peek_step` looks at: the keys that count steps, and where they are stored.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    entries, storage = {}, {}
    stored = getattr(metadata, "storage_data", None) or {}
    for key in STEP_KEYS:
        value = metadata.state_dict_metadata.get(key)
        if value is None:
            continue
        entry = entries[key] = entry_of(value, {})
        offset = None if entry.shape is None else (0,) * len(entry.shape)
        place = stored.get(MetadataIndex(key) if offset is None else MetadataIndex(key, offset))
        if place is not None:
            transforms = tuple(getattr(place, "transform_descriptors", None) or ())
            storage[key, offset] = Stored(place.relative_path, place.offset, place.length, transforms)
    return DcpMetadata(entries=entries, storage=storage)
