"""
Each next step that the package can give is followed in some test, or stands here with the reason why none can be.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import ckpt_sentry

SOURCE: Final = Path(ckpt_sentry.__file__).parent
TESTS: Final = Path(__file__).parent.parent
PLACES: Final = {"Finding": 3, "RankFinding": 4, "RankStatement": 2, "_problem": 3, "finding": 2}
"""Where the next step stands among the arguments."""

FOLLOWED: Final = {
    "dcp_checkpoint": "test_a_distributed_checkpoint",
    "device_map_uncovered": "test_a_map_that_leaves_something_out",
    "device_map_unknown_name": "test_a_map_with_names_that_are_not_the_models",
    "dtype_ignored": "test_a_type_without_a_map",
    "duplicate_keys": "test_an_index_with_a_key_in_two_shards",
    "empty_file": "test_a_file_that_is_something_else",
    "flat_optimizer": "test_the_form_of_an_optimizer_state",
    "html_page": "test_a_file_that_is_something_else",
    "index_incomplete": "test_an_index_that_does_not_fit",
    "lfs_pointer": "test_a_file_that_is_something_else",
    "low_coverage": "test_a_rename_that_leaves_a_gap_is_no_matter_of_a_setting",
    "meta_left": "test_a_model_on_meta_without_a_map",
    "metadata_format": "test_another_metadata",
    "metadata_missing": "test_another_checkpoint_is_loaded_instead",
    "metadata_unreadable": "test_another_checkpoint_is_loaded_instead",
    "missing_keys": "test_a_part_is_loaded_as_strict_wants_it",
    "nested_state_dict": "test_a_state_dict_one_level_down",
    "no_checkpoint_files": "test_a_folder_of_checkpoints",
    "no_state_dict": "test_a_whole_module",
    "non_finite_values": "test_an_earlier_step_without_nan",
    "offload_folder_unwritable": "test_a_folder_that_cannot_be_written_to",
    "optimizer_class_changed": "test_an_optimizer_of_another_class_is_left_out",
    "optimizer_missing": "test_no_state_is_made_while_gradients_are_alive",
    "optimizer_names_differ": "test_an_optimizer_state_by_number",
    "path_is_file": "test_a_shard_in_place_of_its_folder",
    "path_missing": "test_a_path_that_does_not_exist",
    "rank_stalled": "test_a_rank_that_still_reads_gets_more_time",
    "renamed_keys": "test_renamed_keys_are_asked_for_as_they_are_called",
    "safetensors_file": "test_a_file_of_safetensors",
    "several_indexes": "test_several_indexes",
    "shape_mismatch": "test_the_model_is_built_as_it_was_saved",
    "shard_damaged": "test_another_checkpoint_is_loaded_instead",
    "shard_empty": "test_another_checkpoint_is_loaded_instead",
    "shard_missing": "test_a_shard_that_is_gone",
    "shard_truncated": "test_another_checkpoint_is_loaded_instead",
    "stale_offload_folder": "test_a_folder_that_dispatch_finds_filled",
    "tied_weights_lost": "test_a_tie_that_the_load_breaks",
    "torch_save_file": "test_a_file_of_torch_save",
    "truncated_file": "test_a_file_that_is_something_else",
    "type_mismatch": "test_the_type_that_was_saved_is_asked_for",
    "unsafe_globals": "test_more_than_tensors",
    "values_not_loaded": "test_objects_that_were_put_into_a_copy",
    "wrong_extension": "test_a_file_of_torch_save_by_another_name",
    "wrong_file_preferred": "test_the_file_that_is_not_read",
}
"""The codes of findings that have a next step, and a test that follows it."""

ONLY_TO_LOOK: Final = {
    "device_map_ignored": "says what to compare",
    "disk_full": "says what to free",
    "no_overlap": "says what to check",
    "not_read": "says where to look",
    "permission_denied": "chmod, as the owner",
    "rank_absent": "says where to look",
    "rank_exited": "says where to look",
    "rank_killed": "says where to look",
    "storage_error": "says what to check",
    "unknown_version": "another torch",
}
"""Those that say where to look, or what only a person can do."""

ELSEWHERE: Final = {
    "custom_extra", "custom_missing", "loader_extra", "loader_missing", "model_extra", "model_missing",
    "nothing_prepared", "optimizer_extra", "partly_overwritten", "quantized_state_dropped", "rank_local_metadata",
    "rng_missing", "scaler_extra", "scheduler_extra", "scheduler_missing", "tied_keys_missing", "tied_values_differ",
}  # fmt: skip
"""Those that say to do as was done when the checkpoint was saved; the tests of each target load so, and rightly."""


def with_a_next_step() -> set[str]:
    """
    The codes that stand in the code beside a next step.
    """
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or not node.args or name not in PLACES:
                continue
            place = PLACES[name]
            if len(node.args) > place or any(one.arg in ("next", "step") for one in node.keywords):
                found |= {one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant)}
    return {code for code in found if re.fullmatch(r"[a-z]+(_[a-z]+)+", code)}


def test_each_next_step_is_followed() -> None:
    assert with_a_next_step() - FOLLOWED.keys() - ONLY_TO_LOOK.keys() - ELSEWHERE == set()


def test_the_tests_are_there() -> None:
    written = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert [name for name in FOLLOWED.values() if f"def {name}(" not in written] == []
