"""
What a good load makes the agent import: exactly this, and nothing that only explains a failure.

A module costs half a millisecond and a hundred objects that each pass of the garbage collector walks through. One that
is new here is needed by every good load, or else it is named by `ckpt_sentry.patching.later` where it is used.
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
_startup errors integrations patching patching.guard patching.ledger patching.patches patching.pause
patching.postimport patching.wrapping_importlib_bootstrap
""",
    "import torch": """
collector collector.aggregate collector.ends collector.findings collector.groups collector.left_out collector.records
collector.repeats collector.summary collector.wording config core core.codec core.codes core.escape core.peers
core.ranks core.report core.verdict core.words dataclasses_ formats formats.paths formats.regular identity
integrations.launchers integrations.launchers.ranks integrations.torch_module integrations.torch_module.entry_points
integrations.torch_module.seams integrations.torch_module.torch_load masking model model.provenance names
patching.later render render.cells render.head render.keys render.page render.terminal render.text render.words
session session.loads session.process_reporter session.sinks session.stall transport transport.events transport.log
transport.otel transport.otel_env transport.otlp_json
""",
    "dcp": """
core.inventory core.policy formats.dcp formats.dcp.files formats.dcp.neighbours formats.step integrations.dcp
integrations.dcp.errors integrations.dcp.exceptions integrations.dcp.facts integrations.dcp.fast_compare
integrations.dcp.participants integrations.dcp.planning integrations.dcp.reads integrations.dcp.seams
integrations.dcp.step integrations.dcp.stock integrations.dcp.values integrations.launchers.torchrun model.tensors
session.conclude session.exceptions
""",
    "module": """
core.inventory core.policy formats.step integrations.torch_module.call integrations.torch_module.calls
integrations.torch_module.judge integrations.torch_module.parts integrations.torch_module.report model.hints
model.inventories model.model_state model.tensors session.conclude session.exceptions
""",
    "accelerate": """
core.diff core.examine core.fold core.inventory core.policy formats.elements formats.errors formats.folder
formats.safetensors formats.state_file formats.step integrations.accelerate integrations.accelerate.device_map
integrations.accelerate.facts integrations.accelerate.fsdp integrations.accelerate.judge
integrations.accelerate.offload integrations.accelerate.proof integrations.accelerate.seams
integrations.accelerate.state integrations.dcp integrations.dcp.errors integrations.dcp.exceptions
integrations.dcp.facts integrations.dcp.fast_compare integrations.dcp.participants integrations.dcp.planning
integrations.dcp.reads integrations.dcp.seams integrations.dcp.step integrations.dcp.stock integrations.dcp.values
integrations.launchers.torchrun model.hints model.inventories model.model_state model.proof model.quick_proof
model.tensors session.conclude session.exceptions
""",
    "load_state": """
core.align core.coverage core.depth core.diff core.examine core.findings core.fold core.inventory core.optimizer
core.policy core.rename core.rule core.training formats.elements formats.errors formats.folder formats.safetensors
formats.sniff formats.state_file formats.step integrations.accelerate integrations.accelerate.device_map
integrations.accelerate.facts integrations.accelerate.fsdp integrations.accelerate.judge integrations.accelerate.proof
integrations.accelerate.seams integrations.accelerate.state integrations.accelerate.state_files
integrations.torch_module.call integrations.torch_module.calls integrations.torch_module.judge
integrations.torch_module.parts integrations.torch_module.report model.hints model.inventories model.model_state
model.proof model.quick_proof model.tensors session.conclude session.exceptions
""",
    "transformers": """
core.align core.coverage core.depth core.diff core.examine core.findings core.fold core.inventory core.optimizer
core.policy core.quantized core.rename core.rule core.training formats.elements formats.errors formats.folder
formats.index formats.safetensors formats.sniff formats.state_file formats.step integrations.accelerate
integrations.accelerate.device_map integrations.accelerate.facts integrations.accelerate.fsdp
integrations.accelerate.judge integrations.accelerate.proof integrations.accelerate.seams
integrations.accelerate.state integrations.dcp integrations.dcp.errors integrations.dcp.exceptions
integrations.dcp.facts integrations.dcp.fast_compare integrations.dcp.participants integrations.dcp.planning
integrations.dcp.reads integrations.dcp.seams integrations.dcp.step integrations.dcp.stock integrations.dcp.values
integrations.launchers.torchrun integrations.transformers integrations.transformers.buffers
integrations.transformers.files integrations.transformers.judge integrations.transformers.seams
integrations.transformers.v4 model.conversion model.hints model.inventories model.model_state model.proof
model.quick_proof model.tensors session.conclude session.exceptions
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
