from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from ckpt_sentry.core.report import Identity
from ckpt_sentry.launcher import socket_server
from ckpt_sentry.launcher.socket_server import MAX_LINE, LauncherSocket
from ckpt_sentry.transport.connection import Connection
from tests.collector.jobs import started

ME = Identity("run7-a1b2", rank=1, local_rank=1, world_size=2, local_world_size=2, node="node0", pid=7)
WAIT = 10.0


@pytest.fixture
def heard() -> Queue[dict[str, Any]]:
    return Queue()


@pytest.fixture
def far(heard: Queue[dict[str, Any]]) -> Any:
    made = LauncherSocket(heard.put, lambda _: None)
    made.start()
    yield made
    made.close()


def speaks(far: LauncherSocket) -> bool:
    """
    Whether a new worker is heard.
    """
    way = Connection(far.path)
    way.introduce(ME, print)
    done = way.send(started(1), WAIT) and way.taken(WAIT)
    way.close()
    return done


def closed(sock: socket.socket) -> bool:
    sock.settimeout(WAIT)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_folder_is_its_users_alone_and_goes_with_the_launcher(far: LauncherSocket) -> None:
    folder = Path(far.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.geteuid()
    far.close()
    assert not folder.exists()


def test_folders_of_launchers_that_were_killed_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """
        import os, sys
        from ckpt_sentry.launcher.socket_server import LauncherSocket
        print(LauncherSocket(print, print).path, flush=True)
        os._exit(9)
    """
    line = [sys.executable, "-c", textwrap.dedent(code)]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    killed, young = (
        Path(subprocess.run(line, env=environ, capture_output=True, text=True, check=False).stdout.strip()).parent
        for _ in range(2)
    )
    alive = LauncherSocket(print, print)
    other = tmp_path / killed.name.replace("-", "-x", 1)
    shutil.copytree(young, other, ignore=shutil.ignore_patterns("socket"))
    filled = Path(tempfile.mkdtemp(prefix=killed.name[:-8], dir=tmp_path))
    (filled / "socket").write_text("no socket")
    for folder in (killed, Path(alive.path).parent, other, filled):
        os.utime(folder, (0, 0))
    far = LauncherSocket(print, print)
    for one in (alive, far):
        one.start()
    assert not killed.exists()
    assert young.exists()
    assert Path(alive.path).exists()
    assert other.exists()
    assert filled.exists()
    alive.close()
    far.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_can_neither_connect_nor_see_it(far: LauncherSocket) -> None:
    code = f"""
        import os, socket
        os.setgid(65534); os.setuid(65534)
        path = {far.path!r}
        for attempt in (lambda: socket.socket(socket.AF_UNIX).connect(path), lambda: os.listdir(os.path.dirname(path))):
            try:
                attempt()
            except PermissionError:
                continue
            raise SystemExit(1)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0
    assert speaks(far)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_who_comes_by_an_open_folder_is_turned_away(far: LauncherSocket) -> None:
    os.chmod(os.path.dirname(far.path), 0o755)
    os.chmod(far.path, 0o777)
    code = f"""
        import os, socket
        os.setgid(65534); os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX); sock.connect({far.path!r}); sock.settimeout(10)
        try:
            raise SystemExit(sock.recv(1) != b"")
        except ConnectionResetError:
            pass
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0
    assert speaks(far)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"pid": "x"}\n',
        b"[]\n",
        b'{"pid": 1}\n{"who": {"rank": "x"}}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_whoever_does_not_speak_our_language_is_cut_off(far: LauncherSocket, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(far.path)
        stranger.sendall(said)
        assert closed(stranger)
    assert speaks(far)


def test_a_line_without_an_end_is_cut_off(far: LauncherSocket) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(far.path)
        stranger.settimeout(WAIT)
        with contextlib.suppress(OSError):
            stranger.sendall(b"x" * (2 * MAX_LINE))
        assert closed(stranger)
    assert speaks(far)


def test_a_request_that_nobody_understands_harms_no_other(far: LauncherSocket, heard: Queue[dict[str, Any]]) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(far.path)
        stranger.sendall(b'{"pid": 1}\n{"foo": 1}\n')
        assert json.loads(stranger.recv(100)) == {"taken": 1}
        assert heard.get(timeout=WAIT) == {"foo": 1}
        assert speaks(far)


def test_two_thousand_idle_connections_keep_no_worker_out(far: LauncherSocket) -> None:
    """
    Nor do they take the files that a launcher needs to start its workers again.
    """
    code = f"""
        import resource, socket, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        idle = []
        for _ in range(2000):
            sock = socket.socket(socket.AF_UNIX); idle.append(sock)
            try:
                sock.connect({far.path!r}); sock.send(b'{{"pid": 1}}\\n')
            except OSError:
                pass
        print("ready", flush=True); sys.stdin.read()
    """
    worker = Connection(far.path)
    worker.introduce(ME, print)
    line = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "ready\n"
        assert worker.send(started(1), WAIT)
        assert worker.taken(WAIT)
        assert speaks(far)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert len(far._peers) <= soft // socket_server.SHARE_OF_FILES
        assert set(far.workers()) == {ME}
        crowd.stdin.close()
    worker.close()


def test_a_long_temporary_folder_leaves_room_for_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    made = LauncherSocket(print, print)
    made.start()
    assert speaks(made)
    made.close()
    assert list(long.iterdir()) == []


def test_nobody_is_missed_after_the_close() -> None:
    gone: Queue[Identity] = Queue()
    made = LauncherSocket(lambda _: None, gone.put)
    made.start()
    way = Connection(made.path)
    way.introduce(ME, print)
    assert way.send(started(1), WAIT)
    assert way.taken(WAIT)
    made.close()
    way.close()
    assert gone.empty()
