"""
Fresh interpreters, with the wheel installed and without it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Environment, make_environment, pip

MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"
WAYS = "import sys; s = sys.modules.get('ckpt_sentry._startup'); print(*(s.ways() if s else ()))"
HEAVY = {"dataclasses", "inspect", "logging", "opentelemetry", "re", "structlog", "threading", "torch", "typing"}
NOT_LAUNCHED = "CKPT_SENTRY_BOOTSTRAP"


def modules(environment: Environment, **variables: str) -> set[str]:
    return set(json.loads(environment.run("-c", MODULES, **variables)))


@pytest.mark.parametrize("variables", [{}, {"CKPT_SENTRY": ""}, {"CKPT_SENTRY": "0"}])
def test_off_loads_not_one_module(bare: Environment, installed: Environment, variables: dict[str, str]) -> None:
    assert modules(installed, **variables) == modules(bare, **variables)


@pytest.mark.parametrize("word", ["off", "False", "no"])
def test_other_words_for_off_load_the_gate_alone(bare: Environment, installed: Environment, word: str) -> None:
    loaded = modules(installed, CKPT_SENTRY=word) - modules(bare)
    assert loaded == {"__future__", "ckpt_sentry", "ckpt_sentry._startup"}


@pytest.mark.parametrize("word", ["1", "on", "observe", "strict", "surely"])
def test_on_loads_nothing_heavy(bare: Environment, installed: Environment, word: str) -> None:
    loaded = modules(installed, CKPT_SENTRY=word) - modules(bare)
    assert {"ckpt_sentry._startup", "ckpt_sentry.patching.ledger"} <= loaded
    assert not HEAVY & loaded


def test_on_starts_no_thread(installed: Environment) -> None:
    tasks = "import os, sys; print(len(os.listdir('/proc/self/task')), 'threading' in sys.modules)"
    if not Path("/proc/self/task").is_dir():
        pytest.skip("this system has no /proc")
    assert installed.run("-c", tasks, CKPT_SENTRY="1") == "1 False\n"


@pytest.mark.parametrize("options", [[], ["-I"], ["-E"], ["-s"], ["-O"], ["-OO"], ["-P"], ["-B"], ["-u"]])
def test_on_by_site_under_every_option(installed: Environment, options: list[str]) -> None:
    if options == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    assert installed.run(*options, "-c", WAYS, CKPT_SENTRY="1") == "site\n"


def test_without_site_there_is_no_agent(installed: Environment) -> None:
    assert installed.run("-S", "-c", WAYS, CKPT_SENTRY="1") == "\n"


def test_on_in_scripts_modules_and_safe_path(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAYS)
    assert installed.run(tmp_path / "program.py", CKPT_SENTRY="1") == "site\n"
    assert installed.run("-m", "program", CKPT_SENTRY="1", PYTHONPATH=str(tmp_path)) == "site\n"
    assert installed.run("-c", WAYS, CKPT_SENTRY="1", PYTHONSAFEPATH="1") == "site\n"


def test_the_pth_line_may_run_again(installed: Environment) -> None:
    program = (
        "import site, sys, sysconfig; site.addsitedir(sysconfig.get_path('purelib'));"
        "from ckpt_sentry import _startup; from ckpt_sentry.patching import postimport; _startup.start();"
        "print(*_startup.ways(), sys.meta_path.count(postimport._FINDER))"
    )
    assert installed.run("-c", program, CKPT_SENTRY="1") == "site 1\n"


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_on_in_children(installed: Environment, tmp_path: Path, method: str) -> None:
    (tmp_path / "program.py").write_text(
        "import multiprocessing\n"
        "def ways(_):\n"
        "    from ckpt_sentry import _startup; from ckpt_sentry.patching import ledger\n"
        "    return _startup.ways(), ledger.installed()\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context('{method}').Pool(1) as pool:\n"
        "        print(pool.map(ways, [0]))\n"
    )
    assert installed.run(tmp_path / "program.py", CKPT_SENTRY="1") == "[(('site',), True)]\n"


def test_all_targets_wait(installed: Environment) -> None:
    program = (
        "from ckpt_sentry import integrations\n"
        "from ckpt_sentry.patching import ledger\n"
        "assert {s.attribute for s in ledger.status()} == {module for module, _ in integrations.seams()}\n"
        "print({s.state for s in ledger.status()})"
    )
    assert installed.run("-c", program, CKPT_SENTRY="1") == "{'waiting'}\n"


@pytest.fixture
def breakable(tmp_path: Path, wheel: Path) -> Environment:
    made = make_environment(tmp_path / "breakable")
    pip("--python", made.python, "install", "--no-deps", "--no-index", wheel)
    return made


@pytest.mark.parametrize(
    "module",
    [
        "__init__",
        "_startup",
        "patching/ledger",
        "patching/guard",
        "patching/postimport",
        "patching/wrapping_importlib_bootstrap",
    ],
)
@pytest.mark.parametrize("damage", ["raise SystemError('broken')", "this is no Python", None])
def test_a_broken_package_leaves_the_interpreter_alone(breakable: Environment, module: str, damage: str | None) -> None:
    path = breakable.site_packages / "ckpt_sentry" / f"{module}.py"
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    on = breakable.command("python", "-c", "print('here')", CKPT_SENTRY="1")
    assert (on.returncode, on.stdout) == (0, "here\n")
    assert "ckpt_sentry" in on.stderr or module == "__init__"
    off = breakable.command("python", "-c", "print('here')")
    assert (off.returncode, off.stdout, off.stderr) == (0, "here\n", "")


@pytest.mark.parametrize("close", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_closed_and_full_streams(breakable: Environment, close: str) -> None:
    (breakable.site_packages / "ckpt_sentry" / "patching" / "ledger.py").write_text("raise SystemError('broken')")
    line = f'CKPT_SENTRY=1 "{breakable.python}" -c "import sys; sys.exit(7)" {close}'
    assert subprocess.run(["/bin/sh", "-c", line], check=False).returncode == 7


def test_install_in_code_and_its_switch(installed: Environment) -> None:
    program = (
        "import ckpt_sentry; ckpt_sentry.install(); ckpt_sentry.install()\n"
        "from ckpt_sentry import _startup, config; from ckpt_sentry.patching import ledger\n"
        "print(_startup.ways(), config.settings().mode, ledger.installed())\n"
        "ckpt_sentry.uninstall(); ckpt_sentry.uninstall()\n"
        "print(_startup.ways(), ledger.installed(), ledger.status())"
    )
    assert installed.run("-c", program) == "('install()',) on True\n() False ()\n"
    assert installed.run("-c", program, CKPT_SENTRY="strict").startswith("('site', 'install()') strict True\n")
    assert installed.run("-c", program, CKPT_SENTRY="0") == "() off False\n() False ()\n"


def test_importing_the_package_imports_nothing_else(bare: Environment, installed: Environment) -> None:
    program = "import ckpt_sentry; " + MODULES
    loaded = set(json.loads(installed.run("-c", program))) - modules(bare)
    assert loaded == {"__future__", "ckpt_sentry"}


class TestSitecustomize:
    """
    The folder that `ckpt-sentry run` puts on PYTHONPATH, in an environment that has no `.pth` file of ours.
    """

    @pytest.fixture
    def folder(self, installed: Environment) -> Path:
        return installed.site_packages / "ckpt_sentry" / "_bootstrap"

    def test_starts_an_install_that_site_does_not_scan(self, bare: Environment, folder: Path) -> None:
        variables = {"CKPT_SENTRY": "1", "PYTHONPATH": str(folder), NOT_LAUNCHED: str(bare.prefix)}
        assert bare.run("-c", WAYS, **variables) == "run\n"

    def test_is_off_where_the_variable_is_off(self, bare: Environment, folder: Path) -> None:
        assert bare.run("-c", WAYS, PYTHONPATH=str(folder), CKPT_SENTRY="0") == "\n"

    def test_comes_after_the_pth_file_without_doing_it_twice(self, installed: Environment, folder: Path) -> None:
        program = (
            "import sys; from ckpt_sentry import _startup; from ckpt_sentry.patching import postimport;"
            "print(*_startup.ways(), sys.meta_path.count(postimport._FINDER))"
        )
        assert installed.run("-c", program, PYTHONPATH=str(folder), CKPT_SENTRY="1") == "site run 1\n"

    def test_chains_to_the_next_one(self, bare: Environment, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.path.append('/added'); HERE = True")
        program = (
            "import sys, sitecustomize; print(sitecustomize.HERE, sys.path[1], '/added' in sys.path,"
            "'ckpt_sentry._startup' in sys.modules)"
        )
        path = f"{folder}:{tmp_path}"
        assert bare.run("-c", program, PYTHONPATH=path, CKPT_SENTRY="1") == f"True {folder} True True\n"

    def test_the_next_one_fails_as_it_would_alone(self, bare: Environment, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')")
        alone = bare.command("python", "-c", "print(1)", PYTHONPATH=str(tmp_path))
        chained = bare.command("python", "-c", "print(1)", PYTHONPATH=f"{folder}:{tmp_path}", CKPT_SENTRY="1")
        assert (chained.returncode, chained.stdout, chained.stderr) == (alone.returncode, alone.stdout, alone.stderr)

    def test_refuses_another_python_and_says_so_once(self, bare: Environment, folder: Path) -> None:
        program = f"import subprocess, sys; {WAYS}; subprocess.run([sys.executable, '-c', 'print(2)'])"
        variables = {"PYTHONPATH": str(folder), "CKPT_SENTRY": "1", NOT_LAUNCHED: "/another"}
        done = bare.command("python", "-c", program, **variables)
        assert (done.returncode, sorted(done.stdout.split())) == (0, ["2"])
        assert done.stderr == (
            f"ckpt_sentry: off in {bare.python}: another Python than ckpt-sentry's (/another); "
            "install ckpt-sentry there\n"
        )

    def test_a_broken_package_leaves_the_interpreter_alone(
        self, bare: Environment, folder: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / "ckpt_sentry" / "_bootstrap"
        copy.mkdir(parents=True)
        (copy / "sitecustomize.py").write_bytes((folder / "sitecustomize.py").read_bytes())
        done = bare.command("python", "-c", "print(1)", PYTHONPATH=str(copy), CKPT_SENTRY="1")
        assert (done.returncode, done.stdout) == (0, "1\n")
        assert done.stderr.startswith("ckpt_sentry: not started: ")
