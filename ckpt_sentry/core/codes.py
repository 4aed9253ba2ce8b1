"""
The catalogue of findings: every code once, with what it means, where it stands among others and what it explains.

A code is a promise to other programs (`report --json`): codes are added, none is renamed. The order of the catalogue is
the order in which findings of one level are said: causes before their effects. `docs/findings.md` is made of it
(`as_markdown`).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Group = Literal["ranks", "files", "keys", "values", "device map", "training state", "the agent"]


class Code(NamedTuple):
    """
    One kind of finding.

    `meaning` is a paragraph for whoever has met it: what was seen, what it leads to, what to do. `explains` are the
    codes that are not worth a line of their own where this one is said.
    """

    name: str
    group: Group
    meaning: str
    explains: frozenset[str] = frozenset()


_MISSING: Final = frozenset({"missing_keys", "no_overlap", "block_lost", "kind_lost"})

CATALOGUE: Final[tuple[Code, ...]] = (
    # How a rank ended comes first: it explains what every other rank then saw.
    Code(
        "rank_killed",
        "ranks",
        "A rank was ended by a signal that its launcher did not send: SIGKILL is most often the kernel's, for want of "
        "memory (see dmesg), or a scheduler's; SIGSEGV and SIGABRT come from native code. The phase says how far it "
        "had come; the other ranks then wait for it, and fail by that.",
    ),
    Code(
        "rank_absent",
        "ranks",
        "A rank never began a load that the others have begun. Either it ended before, or it is elsewhere in the "
        "program: the stall report shows its stack. Ranks that take different branches before a load are the usual "
        "cause.",
    ),
    Code(
        "rank_exited",
        "ranks",
        "A rank ended by itself amid a load, or before one that the others have begun, with the exit code that is "
        "given: look for sys.exit and os._exit in the program, and for its last output.",
    ),
    Code(
        "rank_stalled",
        "ranks",
        "A load has lasted longer than CKPT_SENTRY_STALL_AFTER. The finding says in which phase the rank is and shows "
        "the Python stack of its thread; ranks that share a stack are one finding. A rank in native code that holds "
        "the interpreter lock cannot answer.",
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
        frozenset({"missing_keys", "no_overlap", "unexpected_keys"}),
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
        "stale_offload_folder", "files", "The offload folder holds the weights of another checkpoint, which were used."
    ),
    # What explains missing keys comes before them.
    Code(
        "renamed_keys",
        "keys",
        "The checkpoint has the keys under other names, and one rule (a prefix, a suffix, a piece) leads from its "
        "names to the model's, with all shapes in agreement. The coverage that it would give is named. "
        "`ckpt_sentry.unify_keys` applies it, or CKPT_SENTRY_ALIGN=auto where the loader can be helped.",
        _MISSING,
    ),
    Code(
        "published_layout",
        "keys",
        "The checkpoint is in the layout in which a model of transformers is published (experts apart, older names). "
        "`from_pretrained` converts it on the way in; `load_state_dict`, accelerate's loaders and the Trainer's resume "
        "do not. A model that `from_pretrained` has built keeps these values when a Trainer resumes.",
        frozenset({"no_overlap", "block_lost", "kind_lost"}),
    ),
    Code(
        "tied_keys_missing",
        "keys",
        "A missing key shares its tensor with one that the checkpoint has under its name, or is tied to it by the "
        "model's configuration and not tied yet: `model.tie_weights()`.",
        frozenset({"low_coverage"}),
    ),
    Code(
        "flat_optimizer",
        "keys",
        "The optimizer's state was saved in one form (nested or flat, StateDictOptions' flatten_optimizer_state_dict) "
        "and is asked for in the other.",
        _MISSING,
    ),
    Code(
        "optimizer_names_differ",
        "keys",
        "The optimizer's state was saved by the names of parameters and is asked for by their numbers, or the other "
        "way round: `optimizer.state_dict()` numbers them, `get_optimizer_state_dict` names them.",
        _MISSING,
    ),
    Code(
        "optimizer_class_changed",
        "keys",
        "The state in the checkpoint is another optimizer's: its buffers have other names. Load with the class that "
        "saved, or start the optimizer anew.",
        _MISSING,
    ),
    Code(
        "load_hooks_skipped",
        "keys",
        "The model renames keys in load pre-hooks or in _load_from_state_dict. accelerate calls these with "
        "device_map=None alone: with a map it sets each tensor by itself.",
        frozenset({"no_overlap"}),
    ),
    Code(
        "no_overlap",
        "keys",
        "Not one key of the checkpoint is a key of the model. Where a rule of renaming leads from one to the other, "
        "`renamed_keys` says so; else the checkpoint is another model's.",
        frozenset({"missing_keys", "unexpected_keys"}),
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
    ),
    Code(
        "tied_weights_lost",
        "values",
        "Two names share one tensor; the load broke the tie and made it anew from the name that held the old values.",
    ),
    Code(
        "quantized_state_dropped",
        "values",
        "The checkpoint's weights are quantized: numbers that mean nothing without scales and tables beside them. The "
        "loader took the numbers for values and left the rest out: each value is wrong by a factor. Dequantize before "
        "the load, or use the library that quantized.",
        frozenset({"dtype_cast"}),
    ),
    Code("tied_values_differ", "values", "Tied names have different values in the checkpoint: only one can be loaded."),
    Code("non_finite_values", "values", "NaN was found in floating-point tensors that the load has just brought in."),
    Code(
        "meta_left", "values", "Tensors of the model are on the meta device after the load: they hold no data at all."
    ),
    Code(
        "paths_differ", "ranks", "Ranks of one load read different paths: the model is put together from several saves."
    ),
    Code(
        "steps_differ", "ranks", "Ranks of one load read different steps: the model is put together from several saves."
    ),
    Code(
        "shape_mismatch",
        "keys",
        "The key is on both sides with different shapes. Both are shown. The model was built with another "
        "configuration than the one that was saved, or on this rank alone.",
    ),
    Code(
        "type_mismatch", "keys", "One side has a tensor where the other has an object: torch replaces what was there."
    ),
    Code(
        "missing_keys",
        "keys",
        "The model asks for keys that the checkpoint lacks. They keep the values that they had: of a fresh model, "
        "random ones. CKPT_SENTRY_ALLOW_MISSING names those that may stay so.",
    ),
    Code("block_lost", "keys", "All keys of a repeated block are missing, though its neighbours are there."),
    Code("kind_lost", "keys", "Keys of one kind (norms, biases, buffers) are missing in every layer."),
    Code("not_read", "keys", "The checkpoint has the keys, and the plan of this load does not read them."),
    Code("not_asked_for", "keys", "The checkpoint holds more than was asked for, as any load of a part does."),
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
    Code("model_missing", "training state", "The program has prepared more models than were saved."),
    Code("model_extra", "training state", "More models were saved than the program has prepared."),
    Code(
        "optimizer_missing",
        "training state",
        "The optimizer, or a part of its state, was not loaded: its moments start anew. A state dict taken before the "
        "first step has none to be filled.",
    ),
    Code("optimizer_extra", "training state", "More optimizers were saved than the program has prepared."),
    Code("scheduler_missing", "training state", "The program has more schedulers than were saved: they start at 0."),
    Code("scheduler_extra", "training state", "More schedulers were saved than the program has prepared."),
    Code("loader_missing", "training state", "The data loader's position was not saved: data are seen again."),
    Code("loader_extra", "training state", "More data loaders were saved than the program has prepared."),
    Code("scaler_missing", "training state", "The gradient scaler was not saved: its scale starts anew."),
    Code("scaler_extra", "training state", "A gradient scaler was saved, and the program has none."),
    Code("custom_missing", "training state", "The program has registered more objects than were saved."),
    Code("custom_extra", "training state", "More objects were saved than the program has registered."),
    Code("rng_missing", "training state", "The random states were not loaded: the run is not repeatable from here."),
    # What tells of effects rather than causes.
    Code("low_coverage", "keys", "Less of the model would be loaded than CKPT_SENTRY_MIN_COVERAGE asks for."),
    Code("dtype_cast", "keys", "The tensors are cast to the model's type, as torch does without a word."),
    Code(
        "quantized_state_unread",
        "keys",
        "The checkpoint has keys with names of scales and tables beside quantized weights, and the model asks for none "
        "of them. It may have them from elsewhere: this is information.",
    ),
    Code("unexpected_keys", "keys", "The checkpoint has keys that the model does not ask for. They are left out."),
    Code(
        "not_compared",
        "the agent",
        "The load could not be compared: a planner, reader, hook or tensor type that is not understood. It is neither "
        "blamed nor vouched for.",
    ),
    Code("shards_not_checked", "the agent", "Not all files were looked at, for their number."),
    Code("rank_raised", "ranks", "The exception that a rank raised, where no other finding explains it."),
    Code("key_sets_differ", "ranks", "Ranks ask for different keys, as the stages of a pipeline do."),
    Code("peer_failed", "ranks", "This rank had no error of its own: it ended because another one did."),
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
