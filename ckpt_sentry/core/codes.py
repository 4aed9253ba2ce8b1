"""
The catalogue of findings: every code once, with what it means, where it stands among others and what it explains.

A code is a promise to other programs (`report --json`): codes are added, none is renamed. The order of the catalogue is
the order in which findings of one level are said: causes before their effects. What one code is to another stands here
and nowhere else. `docs/findings.md` is made of it (`as_markdown`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

from ckpt_sentry.core.report import Finding, FindingFacts, Level, Verdict
from ckpt_sentry.core.words import keys, verb

Group = Literal["ranks", "files", "keys", "values", "device map", "training state", "the agent"]


QUOTED: Final = "message"
"""The fact that is in the words of others: an address or a rank in it may be the process's own."""


class Sentence(NamedTuple):
    """
    What a finding says: all of it, the same among others on one line, and above rows that list its keys.
    """

    text: str
    brief: str
    headline: str


class Code(NamedTuple):
    """
    One kind of finding.

    Args:
        meaning: a paragraph for whoever has met it: what was seen, what it leads to, what to do.
        explains: the codes that are not worth a line of their own where this one stands for all of them.
        always_explains: those of them that say nothing more even where this one stands for a part.
        because_of: the codes that say why this one is said: with it, they lead a report as what explains others does.
        verdict: what a load comes to of which this is said, and not as information.
        sentence: the words, made of the finding's facts; None where they are made where it is found.
        step: what the reader does next, where that is the same wherever it is said.
        tells_why: False for what says whose error it was, or what the exception says as well.
        ends_load: whether the loader raises for it, whatever may be missing.
        finds_missing: whether it says how the missing keys come in: they are not to be allowed then.
        uncounted: whether it is of a part of a training's state, for which no count of keys stands.
        of_optimizer: whether it explains the keys of an optimizer's state alone.
    """

    name: str
    group: Group
    meaning: str
    explains: frozenset[str] = frozenset()
    always_explains: frozenset[str] = frozenset()
    because_of: frozenset[str] = frozenset()
    verdict: Verdict | None = None
    sentence: Callable[[Mapping[str, str]], Sentence] | None = None
    step: str | None = None
    tells_why: bool = True
    ends_load: bool = False
    finds_missing: bool = False
    uncounted: bool = False
    of_optimizer: bool = False

    @property
    def is_told_at_length(self) -> bool:
        """
        Whether the meaning is more than the one sentence that the finding itself comes to.
        """
        return ". " in self.meaning


ABSENCES: Final = frozenset({"missing_keys", "block_lost", "kind_lost"})
"""The codes that say which keys are missing."""
_MISSING: Final = ABSENCES | {"no_overlap"}
_LITTLE: Final = frozenset({"no_overlap", "low_coverage"})
_ALL: Final = _MISSING | _LITTLE | {"unexpected_keys"}


LEVELS: Final[dict[str, int]] = {"error": 0, "warning": 1, "info": 2}
"""The levels of findings, the gravest first."""


def finding(code: str, level: Level, step: str | None = None, /, **facts: str | int) -> Finding:
    """
    A finding in the words of the catalogue. Raises KeyError where facts are lacking that they are made of.
    """
    say = BY_NAME[code].sentence
    told = {name: str(value) for name, value in facts.items()}
    return Finding(code, level, "" if say is None else say(told).text, step, tuple(told.items()))


def sentence(code: str, text: str, facts: FindingFacts) -> Sentence:
    """
    The words of a finding that was read, in all three lengths; its text where its facts are not those known here.
    """
    known = BY_NAME.get(code)
    if facts and known is not None and known.sentence is not None:
        try:
            return known.sentence(dict(facts))
        except (KeyError, ValueError):  # those of another version
            pass
    return _plain(text)


def fact(facts: FindingFacts, name: str) -> str | None:
    """
    One of the facts of a finding.
    """
    return next((value for known, value in facts if known == name), None)


def _missing_keys(facts: Mapping[str, str]) -> Sentence:
    """
    Of `count` keys, `listed`; how many of them, `allowed`, may be missing; `is_new`: a head that is to be trained.
    """
    count, allowed, listed = int(facts["count"]), int(facts.get("allowed", 0)), facts["listed"]
    if "is_new" in facts:
        head = "New in this model, and to be trained"
        return Sentence(
            f"{head}: {listed} ({keys(count)} {verb(count, 'is', 'are')} not the checkpoint's).",
            f"{head}: {listed}",
            head,
        )
    head = f"{keys(count)} missing from the checkpoint"
    text = brief = f"{head}: {listed}"
    if not allowed:
        return Sentence(f"{text}.", brief, head)
    if allowed < count:
        return Sentence(f"{text}. {allowed:,} of them may be.", brief, f"{head}, {allowed:,} of which may be")
    which = verb(count, "It", "All of them")
    return Sentence(f"{text}. {which} may be.", brief, f"{head}, as {verb(count, 'it', 'they')} may be")


def _listed(head: str, listed: str) -> Sentence:
    return Sentence(f"{head}: {listed}.", f"{head}: {listed}", head)


def _unexpected_keys(facts: Mapping[str, str]) -> Sentence:
    count = int(facts["count"])
    which = f"{keys(count)} of the checkpoint {verb(count, 'is', 'are')} not in the model, unexpected"
    return _listed(which, facts["listed"])


def _shape_mismatch(facts: Mapping[str, str]) -> Sentence:
    """
    Of `count` keys; `is_copied`: those that are read all the same.
    """
    count = int(facts["count"])
    if "is_copied" in facts:
        what = f"{keys(count)} {verb(count, 'was', 'were')} copied as far as the shapes allow"
    else:
        what = f"{keys(count)} {verb(count, 'has another shape', 'have other shapes')} in the checkpoint"
    return _listed(what, facts["listed"])


def _dtype_cast(facts: Mapping[str, str]) -> Sentence:
    count = int(facts["count"])
    what = f"{keys(count)} {verb(count, 'is', 'are')} cast from {facts['saved']} to {facts['wanted']}"
    return _listed(what, facts["listed"])


def _renamed_keys(facts: Mapping[str, str]) -> Sentence:
    """
    By a `rule`, which leads for `count` keys `before` to `after`, to a `coverage`; `in_doubt`: others fit as well.
    """
    unsure = " Other rules fit as well: check this one against the code that saved it." if "in_doubt" in facts else ""
    text = (
        f"The checkpoint has {keys(int(facts['count']))} of this model under other names: {facts['rule']} "
        f"({facts['before']} → {facts['after']}), then {facts['coverage']} would load.{unsure}"
    )
    return _plain(text)


def _no_overlap(facts: Mapping[str, str]) -> Sentence:
    """
    0 of the model's `count` keys; what the checkpoint has, `theirs` ("" for nothing), and what the model wants, `ours`.
    """
    none = f"0 of {keys(int(facts['count']))} would load"
    if not facts["theirs"]:
        return _plain(f"The checkpoint holds nothing: {none}.")
    what = f"The checkpoint has {facts['theirs']}; the model wants {facts['ours']}."
    return _plain(f"No key of the checkpoint is a key of this model: {none}. {what}")


def _type_mismatch(facts: Mapping[str, str]) -> Sentence:
    """
    Of `count` keys, `listed`: the checkpoint has `saved` where the program asks for `wanted`.
    """
    count = int(facts["count"])
    are = verb(count, "is", "are each")
    what = f"{keys(count)} {are} {facts['saved']} in the checkpoint where the program asks for {facts['wanted']}"
    return _plain(f"{what}: {facts['listed']}.")


def _low_coverage(facts: Mapping[str, str]) -> Sentence:
    """
    The parts of `keys` and `elements` that would load, and the `minimum`.
    """
    part = f"Coverage is {facts['keys']} of keys and {facts['elements']} of elements"
    return _plain(f"{part}, under the minimum of {facts['minimum']}.")


def _plain(text: str) -> Sentence:
    return Sentence(text, text, text)


def _rank_raised(facts: Mapping[str, str]) -> Sentence:
    return _plain(f"{facts['type']}: {facts['message']}" if facts["message"] else facts["type"])


def _peer_failed(facts: Mapping[str, str]) -> Sentence:
    """
    `ranks` raised, and said so themselves.
    """
    who = f"rank {facts['ranks']}" if facts["ranks"].isdigit() else f"ranks {facts['ranks']}"
    return _plain(f"{who} failed; this rank had no error of its own")


CATALOGUE: Final[tuple[Code, ...]] = (
    # How a rank ended comes first: it explains what every other rank then saw.
    Code(
        "rank_killed",
        "ranks",
        "A rank was ended by a signal that its launcher did not send: SIGKILL is most often the kernel's, for want of "
        "memory (see dmesg), or a scheduler's; SIGSEGV and SIGABRT come from native code. The phase says how far it "
        "had come; the other ranks then wait for it, and fail by that.",
        verdict="failed",
    ),
    Code(
        "rank_absent",
        "ranks",
        "A rank never began a load that the others have begun. Either it ended before, or it is elsewhere in the "
        "program: the stall report shows its stack. Ranks that take different branches before a load are the usual "
        "cause.",
        verdict="stalled",
    ),
    Code(
        "rank_exited",
        "ranks",
        "A rank ended by itself amid a load, or before one that the others have begun, with the exit code that is "
        "given: look for sys.exit and os._exit in the program, and for its last output.",
        verdict="failed",
    ),
    Code(
        "rank_stalled",
        "ranks",
        "A load has lasted longer than CKPT_SENTRY_STALL_AFTER. The finding says in which phase the rank is and shows "
        "the Python stack of its thread; ranks that share a stack are one finding. A rank in native code that holds "
        "the interpreter lock cannot answer.",
        verdict="stalled",
    ),
    # What lies at the path.
    Code(
        "path_missing",
        "files",
        "There is nothing at the path on this node. The finding names the nearest folder that exists and the steps "
        "that lie in it. On one node alone: the folder is not shared, or not mounted there.",
    ),
    Code("path_is_file", "files", "The path is a file where a folder is wanted. Give the folder of the checkpoint."),
    Code(
        "no_checkpoint_files",
        "files",
        "The folder is there and holds none of the files that this loader looks for. The finding says what lies in it "
        "instead, and which file or folder below it could be meant.",
    ),
    Code(
        "metadata_missing",
        "files",
        "The folder has no .metadata. DCP writes it last, so the save never finished: what lies there cannot be "
        "loaded. Take the newest step that is whole.",
    ),
    Code(
        "metadata_unreadable",
        "files",
        "The .metadata is there and cannot be read: it is cut off, empty, or made by a class that is not installed "
        "here. It is read as data by an allow-list; nothing in it is executed.",
    ),
    Code(
        "rank_local_metadata",
        "files",
        "The checkpoint has metadata for each rank (`__RANK.metadata`) instead of one for all: it can be loaded only "
        "with as many ranks as have saved it, each its own part. With another number of ranks torch reads in part, "
        "and does not say so.",
    ),
    Code("permission_denied", "files", "This user may not read the file on that node. The finding has user and mode."),
    Code("disk_full", "files", "A file system or a quota is full: nothing more could be written on that node."),
    Code(
        "storage_error",
        "files",
        "The storage itself gave an error (EIO, a stale handle, a connection that broke): not the checkpoint, but the "
        "mount, the network or the disk of that node.",
        tells_why=False,
    ),
    Code(
        "shard_missing",
        "files",
        "Files that the metadata or the index names are not there. The finding says which ranks wrote them and which "
        "keys lie in them. Copy the whole folder again, or take another step.",
    ),
    Code(
        "shard_truncated",
        "files",
        "A file is shorter than the metadata says: its end was never written, or a copy was cut. The keys that lie in "
        "the part that is gone are named.",
    ),
    Code("shard_empty", "files", "A file of the checkpoint has 0 bytes: its writer was stopped before it wrote."),
    Code(
        "shard_damaged",
        "files",
        "A file has the right size and not the right content: the directory or a checksum inside it does not agree.",
    ),
    Code(
        "lfs_pointer",
        "files",
        "The file is a Git LFS pointer, about 130 bytes of text in place of the weights. `git lfs pull` brings them.",
    ),
    Code(
        "html_page",
        "files",
        "The file is a web page: a server answered with a log-in or an error in place of the file. Download it again "
        "with the rights that it takes.",
    ),
    Code("empty_file", "files", "The file has 0 bytes. Copy or download it again."),
    Code("truncated_file", "files", "The file ends before its own header says. Copy or download it again."),
    Code(
        "wrong_extension",
        "files",
        "The file is sound and of another format than its name says, so the loader opens it with the wrong reader. "
        "Rename it.",
    ),
    Code("torch_save_file", "files", "The path is one file of torch.save, where a DCP folder is wanted. Convert it."),
    Code("dcp_checkpoint", "files", "The path is a DCP checkpoint, where one file is wanted. Load it with dcp.load."),
    Code("safetensors_file", "files", "The path holds safetensors files, which this loader does not read."),
    Code("unknown_format", "files", "The file is of no format that is known here; its first bytes are shown."),
    Code(
        "unknown_version", "files", "The metadata is of a version that is not known here: load it where it was saved."
    ),
    Code(
        "metadata_format", "files", "A safetensors file lacks the entry `format`, without which accelerate refuses it."
    ),
    Code("unsafe_globals", "files", "The pickle asks for objects that torch.load refuses with weights_only=True."),
    Code("no_state_dict", "files", "The file holds one object and no state dict: save model.state_dict() instead."),
    Code(
        "nested_state_dict",
        "files",
        "The state dict lies one or more levels down in what was saved, under a key such as `state_dict` or `model`. "
        "Pass that part on.",
        _ALL,
    ),
    Code("file_unreadable", "files", "The file could not be opened or read; the reason is the operating system's."),
    Code("several_indexes", "files", "The folder has more than one index: pass the path of the one you want."),
    Code(
        "index_incomplete",
        "files",
        "The index and the shards do not agree: it names keys that no shard holds, or leaves out a shard. What it "
        "leaves out is not loaded, in silence.",
        frozenset({"block_lost", "kind_lost"}),
    ),
    Code(
        "newer_unfinished",
        "files",
        "A newer step lies beside the one that was loaded. Its save never finished: the job goes on from further back "
        "than its last save began.",
    ),
    Code("duplicate_keys", "files", "A key stands in several files, or twice in one: the last one wins, in silence."),
    Code(
        "wrong_file_preferred",
        "files",
        "The loader took one of several files in the folder, and another one beside it holds something else. "
        "accelerate prefers pytorch_model.bin to model.safetensors and both to an index; transformers prefers "
        "safetensors.",
        frozenset({"block_lost", "kind_lost"}),
    ),
    Code(
        "stale_offload_folder",
        "files",
        "The offload folder holds the weights of another checkpoint, which were used.",
        verdict="wrong_values",
    ),
    # What explains missing keys comes before them.
    Code(
        "renamed_keys",
        "keys",
        "The checkpoint has the keys under other names, and one rule (a prefix, a suffix, a piece) leads from its "
        "names to the model's, with all shapes in agreement. The coverage that it would give is named. "
        "`ckpt_sentry.unify_keys` applies it, or CKPT_SENTRY_ALIGN=auto where the loader can be helped.",
        _ALL,
        always_explains=_LITTLE,
        sentence=_renamed_keys,
        step="Rename its keys: model.load_state_dict(ckpt_sentry.unify_keys(state_dict, model)).",
    ),
    Code(
        "published_layout",
        "keys",
        "The checkpoint is in the layout in which a model of transformers is published (experts apart, older names). "
        "`from_pretrained` converts it on the way in; `load_state_dict`, accelerate's loaders and the Trainer's resume "
        "do not. A model that `from_pretrained` has built keeps these values when a Trainer resumes.",
        frozenset({"no_overlap", "block_lost", "kind_lost"}),
        finds_missing=True,
    ),
    Code(
        "tied_keys_missing",
        "keys",
        "A missing key shares its tensor with one that the checkpoint has under its name, or is tied to it by the "
        "model's configuration and not tied yet: `model.tie_weights()`.",
        frozenset({"low_coverage"}),
        finds_missing=True,
    ),
    Code(
        "flat_optimizer",
        "keys",
        "The optimizer's state was saved in one form (nested or flat, StateDictOptions' flatten_optimizer_state_dict) "
        "and is asked for in the other.",
        _MISSING,
        of_optimizer=True,
    ),
    Code(
        "optimizer_names_differ",
        "keys",
        "The optimizer's state was saved by the names of parameters and is asked for by their numbers, or the other "
        "way round: `optimizer.state_dict()` numbers them, `get_optimizer_state_dict` names them.",
        _MISSING,
        of_optimizer=True,
    ),
    Code(
        "optimizer_class_changed",
        "keys",
        "The state in the checkpoint is another optimizer's: its buffers have other names. Load with the class that "
        "saved, or start the optimizer anew.",
        _MISSING,
        of_optimizer=True,
    ),
    Code(
        "load_hooks_skipped",
        "keys",
        "The model renames keys in load pre-hooks or in _load_from_state_dict. accelerate calls these with "
        "device_map=None alone: with a map it sets each tensor by itself.",
        frozenset({"no_overlap"}),
        finds_missing=True,
    ),
    Code(
        "no_overlap",
        "keys",
        "Not one key of the checkpoint is a key of the model. Where a rule of renaming leads from one to the other, "
        "`renamed_keys` says so; else the checkpoint is another model's.",
        frozenset({"missing_keys", "unexpected_keys"}),
        sentence=_no_overlap,
    ),
    Code(
        "own_tensors",
        "values",
        "All that was loaded are the module's own tensors: nothing came from outside. That is so where a checkpoint "
        "was read into them before, as `dcp.load` does in place. It is a warning where a file was read and nothing of "
        "it is in the module.",
    ),
    # Values.
    Code(
        "values_not_loaded",
        "values",
        "The keys match, and the model's values are not the checkpoint's after the load: sampled elements were "
        "compared. Something wrote over them, or never wrote them.",
        verdict="wrong_values",
    ),
    Code(
        "tied_weights_lost",
        "values",
        "Two names share one tensor; the load broke the tie and made it anew from the name that held the old values.",
        verdict="wrong_values",
    ),
    Code(
        "quantized_state_dropped",
        "values",
        "The checkpoint's weights are quantized: numbers that mean nothing without scales and tables beside them. The "
        "loader took the numbers for values and left the rest out: each value is wrong by a factor. Dequantize before "
        "the load, or use the library that quantized.",
        frozenset({"dtype_cast"}),
        verdict="wrong_values",
    ),
    Code("tied_values_differ", "values", "Tied names have different values in the checkpoint: only one can be loaded."),
    Code(
        "non_finite_values",
        "values",
        "NaN was found in floating-point tensors that the load has just brought in.",
        verdict="wrong_values",
    ),
    Code(
        "meta_left", "values", "Tensors of the model are on the meta device after the load: they hold no data at all."
    ),
    Code(
        "paths_differ",
        "ranks",
        "Ranks of one load read different paths: the model is put together from several saves.",
        verdict="diverged",
        step="Give every rank the same path.",
    ),
    Code(
        "steps_differ",
        "ranks",
        "Ranks of one load read different steps: the model is put together from several saves.",
        verdict="diverged",
    ),
    Code(
        "shape_mismatch",
        "keys",
        "The key is on both sides with different shapes. Both are shown. The model was built with another "
        "configuration than the one that was saved, or on this rank alone.",
        ends_load=True,
        sentence=_shape_mismatch,
        step="Build the model with the configuration that the checkpoint was saved with.",
    ),
    Code(
        "type_mismatch",
        "keys",
        "One side has a tensor where the other has an object: torch replaces what was there.",
        ends_load=True,
        sentence=_type_mismatch,
        step="Ask for the type that was saved, and convert it after the load.",
    ),
    Code(
        "missing_keys",
        "keys",
        "The model asks for keys that the checkpoint lacks. They keep the values that they had: of a fresh model, "
        "random ones. CKPT_SENTRY_ALLOW_MISSING names those that may stay so.",
        sentence=_missing_keys,
    ),
    Code("block_lost", "keys", "All keys of a repeated block are missing, though its neighbours are there."),
    Code("kind_lost", "keys", "Keys of one kind (norms, biases, buffers) are missing in every layer."),
    Code("not_read", "keys", "The checkpoint has the keys, and the plan of this load does not read them."),
    Code(
        "not_asked_for",
        "keys",
        "The checkpoint holds more than was asked for, as any load of a part does.",
        uncounted=True,
    ),
    Code("model_coverage", "keys", "How much of one of several models came in."),
    Code(
        "partly_overwritten", "values", "The load failed after it had written a part: the model is neither old nor new."
    ),
    Code("source_file", "files", "From which file the state dict came that was passed to load_state_dict."),
    # The device map.
    Code("device_map_unknown_name", "device map", "A name in the device_map is no module of the model."),
    Code("device_map_uncovered", "device map", "Modules of the model are under no name of the device_map."),
    Code("device_map_bad_value", "device map", "A value of the device_map is no device that accelerate understands."),
    Code("device_map_placed", "device map", "Where accelerate has placed the modules, as far as it is worth a word."),
    Code("device_map_ignored", "device map", "A device_map was given that has no effect on this load."),
    Code("dtype_ignored", "device map", "A dtype was given that accelerate ignores without a device_map."),
    Code("offload_folder_unwritable", "device map", "The offload folder cannot be written to."),
    # Training state.
    Code("model_whole", "training state", "The model itself is whole: what is missing is training state alone."),
    Code(
        "optimizer_state_none",
        "training state",
        "Parameters that never had a gradient have no optimizer state: none was saved for them, and none is missing.",
    ),
    Code("nothing_prepared", "training state", "There was nothing to load into: load_state was called before prepare."),
    Code(
        "model_missing",
        "training state",
        "The program has prepared more models than were saved.",
        uncounted=True,
    ),
    Code(
        "model_extra",
        "training state",
        "More models were saved than the program has prepared.",
        uncounted=True,
    ),
    Code(
        "optimizer_missing",
        "training state",
        "The optimizer, or a part of its state, was not loaded: its moments start anew. A state dict taken before the "
        "first step has none to be filled.",
        uncounted=True,
    ),
    Code(
        "optimizer_extra",
        "training state",
        "More optimizers were saved than the program has prepared.",
        uncounted=True,
    ),
    Code(
        "scheduler_missing",
        "training state",
        "The program has more schedulers than were saved: they start at 0.",
        uncounted=True,
    ),
    Code(
        "scheduler_extra",
        "training state",
        "More schedulers were saved than the program has prepared.",
        uncounted=True,
    ),
    Code(
        "loader_missing",
        "training state",
        "The data loader's position was not saved: data are seen again.",
        uncounted=True,
    ),
    Code(
        "loader_extra",
        "training state",
        "More data loaders were saved than the program has prepared.",
        uncounted=True,
    ),
    Code(
        "scaler_missing",
        "training state",
        "The gradient scaler was not saved: its scale starts anew.",
        uncounted=True,
    ),
    Code(
        "scaler_extra",
        "training state",
        "A gradient scaler was saved, and the program has none.",
        uncounted=True,
    ),
    Code(
        "custom_missing",
        "training state",
        "The program has registered more objects than were saved.",
        uncounted=True,
    ),
    Code(
        "custom_extra",
        "training state",
        "More objects were saved than the program has registered.",
        uncounted=True,
    ),
    Code(
        "rng_missing",
        "training state",
        "The random states were not loaded: the run is not repeatable from here.",
        uncounted=True,
    ),
    # What tells of effects rather than causes.
    Code(
        "low_coverage",
        "keys",
        "Less of the model would be loaded than CKPT_SENTRY_MIN_COVERAGE asks for.",
        because_of=frozenset({"missing_keys"}),
        sentence=_low_coverage,
    ),
    Code(
        "dtype_cast",
        "keys",
        "The tensors are cast to the model's type, as torch does without a word.",
        sentence=_dtype_cast,
    ),
    Code(
        "quantized_state_unread",
        "keys",
        "The checkpoint has keys with names of scales and tables beside quantized weights, and the model asks for none "
        "of them. It may have them from elsewhere: this is information.",
    ),
    Code(
        "unexpected_keys",
        "keys",
        "The checkpoint has keys that the model does not ask for. They are left out.",
        sentence=_unexpected_keys,
    ),
    Code(
        "not_compared",
        "the agent",
        "The load could not be compared: a planner, reader, hook or tensor type that is not understood. It is neither "
        "blamed nor vouched for.",
    ),
    Code("shards_not_checked", "the agent", "Not all files were looked at, for their number."),
    Code(
        "rank_raised",
        "ranks",
        "The exception that a rank raised, where no other finding explains it.",
        verdict="failed",
        sentence=_rank_raised,
    ),
    Code("key_sets_differ", "ranks", "Ranks ask for different keys, as the stages of a pipeline do."),
    Code(
        "peer_failed",
        "ranks",
        "This rank had no error of its own: it ended because another one did.",
        tells_why=False,
        sentence=_peer_failed,
    ),
    Code("left_out", "the agent", "What was not kept, for its number, so that the report stays bounded."),
)

VERDICTS: Final = {
    "ok": "All that the model asks for came in, or could not be compared (`not_compared`).",
    "partial": "Some of the model kept the values that it had.",
    "no_op": "Nothing entered: not one key.",
    "wrong_values": "The keys match, the values do not.",
    "failed": "The load raised.",
    "diverged": "Ranks loaded different checkpoints.",
    "stalled": "The load has lasted longer than CKPT_SENTRY_STALL_AFTER and has not ended.",
}
"""The one word for a load."""

BY_NAME: Final = {code.name: code for code in CATALOGUE}
PLACE: Final = {code.name: place for place, code in enumerate(CATALOGUE)}
"""Where each code stands: causes before their effects."""

LEADING: Final = frozenset(code.name for code in CATALOGUE if code.explains)
"""Those that say why keys are missing: they stand among the errors, as warnings too."""
OTHER_NAMES: Final = frozenset(code.name for code in CATALOGUE if code.group == "keys" and code.explains >= _MISSING)
"""Those that say that the missing keys are there, under other names."""


def of_verdict(verdict: Verdict) -> frozenset[str]:
    """
    The codes that make a load come to a verdict.
    """
    return frozenset(code.name for code in CATALOGUE if code.verdict == verdict)


def having(some: Callable[[Code], bool]) -> frozenset[str]:
    """
    The codes of which something holds.
    """
    return frozenset(code.name for code in CATALOGUE if some(code))


def as_markdown() -> str:
    """
    The catalogue as the page `docs/findings.md`.
    """
    lines = [
        "# Verdicts and findings",
        "",
        "`ckpt-sentry explain CODE` prints one of these. The page is made by `python -m ckpt_sentry.core.codes`.",
        "",
        "## Verdicts",
        "",
        "| verdict | meaning |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in VERDICTS.items()),
    ]
    for group in dict.fromkeys(code.group for code in CATALOGUE):
        lines += ["", f"## About {group}", "", "| finding | meaning |", "|---|---|"]
        lines += [f"| `{code.name}` | {code.meaning} |" for code in CATALOGUE if code.group == group]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
