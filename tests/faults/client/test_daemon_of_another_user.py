"""Daemons and sockets of users whom the client was not told to trust."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gyre_client import Loader
from gyre_client.errors import (
    UntrustedDaemon,
)

from tests.stub_daemon import (
    StubDaemon,
)
from tests.stubbed_loader import loader_of

NOBODY = 65534


@pytest.fixture
def stub(tmp_path: Path) -> StubDaemon:
    return StubDaemon(tmp_path)


AS_NOBODY = """
import os, pathlib, sys
sys.path[:0] = {path!r}
from tests.stub_daemon import StubDaemon
os.setgroups([]); os.setresgid(*3 * [{user}]); os.setresuid(*3 * [{user}])
with StubDaemon(pathlib.Path(sys.argv[1])) as stub:
    stub.path.chmod(0o777); pathlib.Path(str(stub.path) + ".side").chmod(0o777)
    print("ready", flush=True)
    sys.stdin.read()
print(len(stub.opened), len(stub._peers), flush=True)
"""


@pytest.fixture
def others_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Starts a daemon of the user `nobody` in a folder; returns its process."""
    if os.geteuid():
        pytest.skip("only root can start a process of another user")
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> "subprocess.Popen[str]":
        program = AS_NOBODY.format(path=[*filter(None, sys.path), str(Path.cwd())], user=NOBODY)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.communicate(timeout=120)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def test_a_daemon_of_another_user_is_told_nothing(
    others_daemon: Callable[..., Any], open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder / "run"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    process = others_daemon(folder)
    address = f"unix:{folder}/gyre.sock"
    with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY} .*trusts only uid 0") as caught:
        Loader("d", batch_size=2, address=address)
    assert caught.value.facts == {"uid": str(NOBODY), "trusted_uids": "0"}

    # A folder of root's does not make that daemon root's.
    os.chown(folder, 0, 0)
    with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"):
        Loader("d", batch_size=2, address=address)

    # Its socket file may belong to root, and the kernel still tells.
    os.chown(folder / "gyre.sock", 0, 0)
    with pytest.raises(UntrustedDaemon, match=f"is served by process {process.pid} of uid"):
        Loader("d", batch_size=2, address=address)
    os.chown(folder / "gyre.sock", NOBODY, NOBODY)

    for user in (NOBODY, str(NOBODY), "nobody"):
        with Loader("d", batch_size=2, address=address, daemon_user=user) as loader:
            assert len(next(loader.stream())) == 4
    monkeypatch.setenv("GYRE_DAEMON_USER", "nobody")
    with Loader("d", batch_size=2, address=address) as loader:
        next(loader.stream())
    answer, _ = process.communicate(timeout=120)
    num_opened, _ = map(int, answer.split())
    assert num_opened == 4


def test_the_command_names_the_user_to_trust(
    others_daemon: Callable[..., Any], open_folder: Path
) -> None:
    folder = open_folder / "run"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    others_daemon(folder)
    command = [sys.executable, "-m", "gyre_client", "status", f"--address=unix:{folder}/gyre.sock"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"uid {NOBODY}" in refused.stderr
    assert "trusts only uid 0" in refused.stderr
    command.append("--daemon-user=nobody")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_side_channel_of_another_user_is_refused(
    others_daemon: Callable[..., Any], open_folder: Path
) -> None:
    """The main socket is root's, and the one beside it is not."""
    theirs, ours = open_folder / "theirs", open_folder / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    others_daemon(theirs)
    stub = StubDaemon(ours)
    with stub:
        Path(f"{stub.path}.side").unlink()
        Path(f"{stub.path}.side").symlink_to(theirs / "gyre.sock.side")
        with (
            pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"),
            loader_of(stub) as loader,
        ):
            next(loader.stream())
    assert stub.opened == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_folder_in_which_others_may_put_a_socket(stub: StubDaemon, mode: int) -> None:
    folder = stub.path.parent
    with stub:
        folder.chmod(mode)
        with pytest.raises(UntrustedDaemon, match=rf"mode {mode:04o}.*chmod go-w {folder}"):
            loader_of(stub)
        folder.chmod(0o1777)  # as /tmp: nobody else may replace a socket there
        with loader_of(stub) as loader:
            next(loader.stream())
        folder.chmod(0o700)
