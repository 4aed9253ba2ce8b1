"""
What a model of transformers tells of keys that another loader finds missing: that the checkpoint is in the layout in
which the architecture is published, which `from_pretrained` alone converts, or that the configuration ties them.

Asked only where keys are missing. transformers is not imported for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.core import codes
from ckpt_sentry.core.escape import shown
from ckpt_sentry.core.report import Finding
from ckpt_sentry.dataclasses_ import replace
from ckpt_sentry.formats.paths import shown_path
from ckpt_sentry.patching.later import later

if TYPE_CHECKING:
    import torch

    from ckpt_sentry.core.examine import Examination
    from ckpt_sentry.core.findings import anew, counted, listing, verb
    from ckpt_sentry.core.fold import folds
    from ckpt_sentry.model import conversion
else:
    Examination = later("ckpt_sentry.core.examine:Examination")
    anew = later("ckpt_sentry.core.findings:anew")
    counted = later("ckpt_sentry.core.findings:counted")
    listing = later("ckpt_sentry.core.findings:listing")
    verb = later("ckpt_sentry.core.findings:verb")
    folds = later("ckpt_sentry.core.fold:folds")
    conversion = later("ckpt_sentry.model.conversion")

PUBLISHED: Final = "published_layout"
TIED: Final = "tied_keys_missing"
CODES: Final = frozenset({PUBLISHED, TIED})
"""Findings that explain missing keys: nothing is to be allowed then."""

_SILENCED: Final = codes.ABSENCES | {"low_coverage", "renamed_keys"}


def hinted(
    module: torch.nn.Module, found: Examination, supplied: Collection[str], path: str | None, tie_step: str
) -> Examination:
    """
    An examination with what the model itself tells of its missing keys before all else, and without other advice then.

    Args:
        supplied: the keys of the model that the checkpoint has.
        path: the file or folder of the checkpoint, where it is known.
        tie_step: how this loader is made to load a model whose weights are not tied yet.
    """
    missing = found.difference.missing
    if not missing or not _is_pretrained(module):
        return found
    renamed = {} if found.inference is None else found.inference.mapping
    hints = [
        *_published(module, missing, found.difference.unexpected, renamed, path),
        *_tied(module, missing, supplied, tie_step),
    ]
    if not hints:
        return found
    rest = (
        replace(one, next=None) if one.code in _SILENCED else one
        for one in anew(found.findings, None)
        if hints[0].code != PUBLISHED or one.code not in ("renamed_keys", "no_overlap")
    )
    rename = None if hints[0].code == PUBLISHED else found.rename
    return replace(found, findings=(*hints, *rest), rename=rename)


def ties(module: torch.nn.Module) -> Mapping[str, str]:
    """
    What the configuration of a model ties: each key to the one that it takes its value from, whether tied yet or not.
    """
    known = getattr(module, "all_tied_weights_keys", None)
    if isinstance(known, Mapping):
        return known
    config: Any = getattr(module, "config", None)
    names = getattr(module, "_tied_weights_keys", None)
    if not names or not getattr(config, "tie_word_embeddings", False):
        return {}
    try:
        embedding = module.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return {}
    source = next((f"{path}.weight" for path, part in module.named_modules() if part is embedding), None)
    return {} if source is None else {name: source for name in names if isinstance(name, str) and name != source}


def _is_pretrained(module: torch.nn.Module) -> bool:
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(module, kind)


def _published(
    module: torch.nn.Module,
    missing: Iterable[str],
    unexpected: Iterable[str],
    renamed: Mapping[str, str],
    path: str | None,
) -> Iterator[Finding]:
    """
    Say that keys which are not the model's become missing ones where `from_pretrained` converts them, but for those
    that a plain rename explains.
    """
    mapping = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    if mapping is None:
        return
    open_ = set(missing) - set(renamed.values())
    converted = [key for key, targets in conversion.targets(module, mapping(module), unexpected) if targets & open_]
    if not converted:
        return
    count, name = len(converted), type(module).__name__
    text = (
        f"{counted(count, 'key')} of the checkpoint {verb(count, 'is', 'are')} as {name} is published "
        f"({listing(list(folds(converted)))}): from_pretrained converts {verb(count, 'it', 'them')} on the way in, "
        "this load does not."
    )
    where = "…" if path is None else shown(repr(shown_path(path if os.path.isdir(path) else os.path.dirname(path))))
    yield Finding(PUBLISHED, "warning", text, f"Load it with {name}.from_pretrained({where}).")


def _tied(module: torch.nn.Module, missing: Iterable[str], supplied: Collection[str], step: str) -> Iterator[Finding]:
    partners: dict[str, list[str]] = {}
    for target, source in ties(module).items():
        partners.setdefault(target, []).append(source)
        partners.setdefault(source, []).append(target)
    found = {key: there[0] for key in missing if (there := [one for one in partners.get(key, ()) if one in supplied])}
    if not found:
        return
    others = ", ".join(sorted(set(found.values())))
    is_or_are = verb(len(found), "is", "are")
    text = (
        f"{listing(list(folds(sorted(found))))} {is_or_are} missing from the checkpoint, which has {others}: the "
        "configuration ties them, and they are not tied in this model yet."
    )
    yield Finding(TIED, "warning", text, step)
