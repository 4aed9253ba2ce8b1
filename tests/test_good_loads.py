"""
What a good load makes the agent import: exactly this, and nothing that only explains a failure.

A module costs half a millisecond and a hundred objects that each pass of the garbage collector walks through. One that
is new here is needed by every good load, or else it is named by `ckpt_sentry.later` where it is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "good_loads.py"

MODULES = {
    "start": """
_startup errors guard hooks patches pause postimport wrapping_importlib_bootstrap
""",
    "import torch": """
audit audit.codec audit.codes audit.escape audit.peers audit.ranks audit.report audit.verdict checkpoints
checkpoints.paths checkpoints.regular collector collector.aggregate collector.ends collector.findings
collector.groups collector.left_out collector.records collector.repeats collector.summary collector.wording config
dataclasses_ identity later loads masking names outlets render render.cells render.head render.keys render.page
render.terminal render.text render.words speaker stall targets targets.module targets.provenance targets.ranks
targets.torch_load telemetry telemetry.events telemetry.log telemetry.otel telemetry.otel_env telemetry.otlp_json
""",
    "dcp": """
audit.inventory audit.policy checkpoints.dcp_files checkpoints.neighbours checkpoints.step targets.dcp
targets.dcp_errors targets.dcp_facts targets.dcp_local targets.dcp_planning targets.dcp_portable targets.dcp_reads
targets.dcp_step targets.dcp_stock targets.dcp_text targets.dcp_together targets.dcp_values targets.dcp_whole
targets.exceptions targets.tensors targets.torchrun
""",
    "module": """
audit.inventory audit.policy checkpoints.step targets.exceptions targets.model_state targets.module_calls
targets.module_facts targets.module_judge targets.module_parts targets.module_report targets.tensors
targets.transformers_hints
""",
    "accelerate": """
audit.diff audit.examine audit.fold audit.inventory audit.policy checkpoints.elements checkpoints.errors
checkpoints.folder checkpoints.safetensors checkpoints.state_file checkpoints.step targets.accelerate
targets.accelerate_causes targets.accelerate_facts targets.accelerate_fsdp targets.accelerate_judge
targets.accelerate_proof targets.accelerator_state targets.dcp targets.dcp_errors targets.dcp_facts
targets.dcp_local targets.dcp_planning targets.dcp_portable targets.dcp_reads targets.dcp_step targets.dcp_stock
targets.dcp_text targets.dcp_together targets.dcp_values targets.dcp_whole targets.device_map targets.exceptions
targets.model_state targets.module_facts targets.offload targets.proof targets.quick_proof targets.tensors
targets.torchrun targets.transformers_hints targets.watch
""",
    "load_state": """
audit.align audit.coverage audit.depth audit.diff audit.examine audit.findings audit.fold audit.inventory
audit.optimizer audit.policy audit.rename audit.rule audit.training checkpoints.elements checkpoints.errors
checkpoints.folder checkpoints.safetensors checkpoints.sniff checkpoints.state_file checkpoints.step
targets.accelerate targets.accelerate_causes targets.accelerate_facts targets.accelerate_fsdp
targets.accelerate_judge targets.accelerate_proof targets.accelerate_text targets.accelerator_files
targets.accelerator_state targets.device_map targets.exceptions targets.model_state targets.module_calls
targets.module_facts targets.module_judge targets.module_parts targets.module_report targets.proof
targets.quick_proof targets.tensors targets.transformers_hints targets.watch
""",
    "transformers": """
audit.align audit.coverage audit.depth audit.diff audit.examine audit.findings audit.fold audit.inventory
audit.optimizer audit.policy audit.quantized audit.rename audit.rule audit.training checkpoints.elements
checkpoints.errors checkpoints.folder checkpoints.index checkpoints.safetensors checkpoints.sniff
checkpoints.state_file checkpoints.step targets.accelerate targets.accelerate_causes targets.accelerate_facts
targets.accelerate_fsdp targets.accelerate_judge targets.accelerate_proof targets.accelerator_state targets.dcp
targets.dcp_errors targets.dcp_facts targets.dcp_local targets.dcp_planning targets.dcp_portable targets.dcp_reads
targets.dcp_step targets.dcp_stock targets.dcp_text targets.dcp_together targets.dcp_values targets.dcp_whole
targets.device_map targets.exceptions targets.model_state targets.module_facts targets.module_judge
targets.module_parts targets.module_report targets.proof targets.quick_proof targets.tensors targets.torchrun
targets.transformers targets.transformers_buffers targets.transformers_files targets.transformers_hints
targets.transformers_judge targets.transformers_names targets.transformers_shards targets.transformers_v4
targets.watch
""",
}
"""What comes with the start of the interpreter, with torch, and by framework with its import and one good load."""


def steps(kind: str, folder: Path) -> dict[str, set[str]]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("CKPT_SENTRY")}
    variables = {"CKPT_SENTRY": "1", "CKPT_SENTRY_DIR": str(folder / "records"), "CUDA_VISIBLE_DEVICES": ""}
    (folder / "checkpoint").mkdir()
    done = subprocess.run(
        [sys.executable, PROGRAM, kind, folder / "checkpoint"],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: set(modules) for name, modules in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MODULES)[2:])
def test_a_good_load_imports_what_it_needs_and_no_more(kind: str, tmp_path: Path) -> None:
    found = steps(kind, tmp_path)
    for step in ("start", "import torch"):
        assert found.pop(step) == set(MODULES[step].split())
    assert set().union(*found.values()) == set(MODULES[kind].split())
