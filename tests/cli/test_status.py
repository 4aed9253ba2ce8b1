from __future__ import annotations

import json
from typing import Any

import pytest

from ckpt_sentry import __version__, integrations
from ckpt_sentry.cli import probe
from ckpt_sentry.cli.status import SCHEMA, misspelt
from tests.conftest import Environment, make_environment


def document(environment: Environment, *options: str, **variables: str) -> dict[str, Any]:
    found = json.loads(environment.run("-m", "ckpt_sentry", "status", "--json", *options, **variables))
    assert isinstance(found, dict)
    return found


def ways(found: dict[str, Any]) -> dict[str, str]:
    return {way["name"]: way["state"] for way in found["ways"]}


def test_off(installed: Environment) -> None:
    found = document(installed)
    assert (found["schema"], found["version"], found["prefix"]) == (SCHEMA, __version__, str(installed.prefix))
    assert (found["mode"], found["patches"], found["problems"]) == ("off", None, [])
    assert (ways(found)["site"], ways(found)["run"], ways(found)["code"]) == ("ready", "ready", "ready")
    assert {setting["source"] for setting in found["settings"]} == {"default"}


def test_on(installed: Environment) -> None:
    found = document(installed, CKPT_SENTRY="strict", CKPT_SENTRY_LOG="loud")
    assert (found["mode"], ways(found)["site"]) == ("strict", "in force")
    assert found["settings"][0] == {"name": "CKPT_SENTRY", "value": "strict", "source": "environment"}
    assert found["problems"] == ['CKPT_SENTRY_LOG="loud" is none of auto, console, json, stdlib, off; auto is used']
    assert {patch["state"] for patch in found["patches"]} == {"waiting"}
    assert sorted(patch["attribute"] for patch in found["patches"]) == sorted(
        module for module, _ in integrations.seams()
    )


def test_under_run(installed: Environment) -> None:
    done = installed.command(
        "ckpt-sentry", "run", "--", "ckpt-sentry", "status", "--json", PATH=str(installed.prefix / "bin")
    )
    assert ways(json.loads(done.stdout))["run"] == "in force"


def test_without_a_pth_file(installed: Environment, tmp_path: Any) -> None:
    environment = make_environment(tmp_path)
    found = document(environment, PYTHONPATH=str(installed.site_packages))
    assert ways(found)["site"] == "missing"


def test_text(installed: Environment) -> None:
    lines = installed.run("-m", "ckpt_sentry", "status", CKPT_SENTRY_ALLOW_MISSING="\x1b[31mred").splitlines()
    assert lines[0].startswith(f"ckpt-sentry {__version__} · Python 3.")
    assert "mode      off (set CKPT_SENTRY=1)" in lines
    (row,) = (line for line in lines if "ALLOW_MISSING" in line)
    assert row.split() == ["CKPT_SENTRY_ALLOW_MISSING", r"\x1b[31mred", "environment"]
    assert [line for line in lines if not line.startswith(" ") and " " not in line and line] == [
        "ways",
        "settings",
        "patches",
    ]


def test_the_folder_that_is_meant_by_the_default(installed: Environment) -> None:
    found = {setting["name"]: setting for setting in document(installed, XDG_STATE_HOME="/state")["settings"]}
    assert found["CKPT_SENTRY_DIR"] == {
        "name": "CKPT_SENTRY_DIR",
        "value": "/state/ckpt_sentry",
        "source": "default",
    }


def test_a_word_that_is_not_known_is_shown(installed: Environment) -> None:
    done = installed.command("python", "-m", "ckpt_sentry", "status", CKPT_SENTRY="observ")
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("  CKPT_SENTRY "))
    assert " ".join(row.split()) == 'CKPT_SENTRY on environment: "observ" is unknown'


def test_a_switch_that_is_misspelt_is_said() -> None:
    found = {"CKPT_SENTY": "1", "CKPT_SENTRI_DIR": "x", "CKPT_SENTRY_LOG": "off", "CKPT_DIR": "y", "PATH": "/bin"}
    assert misspelt(found) == (
        "CKPT_SENTRI_DIR is set, which nothing reads; did you mean CKPT_SENTRY_DIR?",
        "CKPT_SENTY is set, which nothing reads; did you mean CKPT_SENTRY?",
    )


def test_a_library_that_several_targets_wait_for_has_one_row(installed: Environment) -> None:
    lines = installed.run("-m", "ckpt_sentry", "status", CKPT_SENTRY="1").splitlines()
    rows = lines[lines.index("patches") + 1 :]
    assert len(rows) == len(set(rows))


def test_nothing_of_torch_is_imported(installed: Environment) -> None:
    program = (
        "import sys; from ckpt_sentry.cli import main\ntry: main(['status'])\nfinally: print('torch' in sys.modules)"
    )
    assert installed.run("-c", program, CKPT_SENTRY="1").splitlines()[-1] == "False"


@pytest.mark.slow
def test_probe_applies_every_patch(installed: Environment) -> None:
    pytest.importorskip("torch")
    done = installed.command("python", "-m", "ckpt_sentry", "status", "--json", "--probe")
    assert done.returncode == 0
    states = {patch["attribute"]: patch["state"] for patch in json.loads(done.stdout)["patches"]}
    assert set(states.values()) <= {"applied", "absent", "version-gated"}
    assert states["torch.distributed.checkpoint.utils._DistWrapper.reduce_scatter"] == "applied"


@pytest.mark.slow
def test_probe_tells_what_is_seen_of_tiny_loads(installed: Environment, tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    done = installed.command("python", "-m", "ckpt_sentry", "status", "--json", "--probe", HOME=str(tmp_path))
    found = json.loads(done.stdout)
    assert {trial["load"]: trial["state"] for trial in found["trials"]} == dict.fromkeys(
        ["dcp.load", "load_state_dict(strict=False)", "load_checkpoint_in_model", "from_pretrained"], "compared"
    )
    seen = {patch["attribute"] for patch in found["patches"] if patch["seen"]}
    assert {
        "torch.distributed.checkpoint.state_dict_loader.load",
        "torch.distributed.checkpoint.utils._wrap_exception",
        "torch.distributed.checkpoint.filesystem.FileSystemReader.read_data",
        "torch.nn.modules.module.Module.load_state_dict",
        "accelerate.utils.modeling.load_checkpoint_in_model",
        "transformers.modeling_utils.PreTrainedModel.from_pretrained",
    } <= seen
    assert "torch.distributed.launcher.api.launch_agent" not in seen
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CKPT_SENTRY_DIR", str(tmp_path / "records"))
    made = probe._tried("a load(x=1)", lambda _: iter([((), 1.0)]), tmp_path)
    assert made == ("a load(x=1)", "not compared", "nothing was reported")

    def gone(_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    assert probe._tried("b", gone, tmp_path) == ("b", "absent", "No module named 'x'")
    assert probe._tried("c", lambda _: iter([1 / 0]), tmp_path) == (
        "c",
        "failed",
        "ZeroDivisionError: division by zero",
    )


def test_probe_without_torch(installed: Environment, tmp_path: Any) -> None:
    for name in ("torch", "accelerate", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError('No module named here', name=__name__)")
    done = installed.command("python", "-m", "ckpt_sentry", "status", "--json", "--probe", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert {patch["state"] for patch in json.loads(done.stdout)["patches"]} == {"absent"}
