"""A running daemon restores sockets and lock files that are removed, and no second one starts."""

import shutil
from pathlib import Path

import pytest
from gyre_client import Loader

from tests.channels import is_serving
from tests.conftest import Daemon, GyredCommand, StartDaemon
from tests.faults.served_tokens import read_some
from tests.waiting import eventually

TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 10}
LOOK_DEADLINE_S = 60.0


@pytest.fixture
def daemon(gyred: StartDaemon, token_files: Path) -> Daemon:
    return gyred({"datasets": {"tokens": {"uri": str(token_files), **TOKENS}}})


def path_of(daemon: Daemon) -> Path:
    return Path(daemon.address.removeprefix("unix:"))


def has_event(daemon: Daemon, name: str) -> bool:
    return eventually(
        lambda: any(event["event"] == name for event in daemon.events()), LOOK_DEADLINE_S
    )


@pytest.mark.parametrize("what", ["socket", "side channel", "folder"])
def test_a_removed_socket_is_made_again(daemon: Daemon, what: str) -> None:
    path = path_of(daemon)
    with Loader("tokens", batch_size=20, seed=1, address=daemon.address) as loader:
        first = next(loader)
        match what:
            case "socket":
                path.unlink()
            case "side channel":
                path.with_name("gyre.sock.side").unlink()
            case "folder":
                shutil.rmtree(path.parent)
        assert has_event(daemon, "socket made again")
        with Loader("tokens", batch_size=20, seed=1, address=daemon.address) as newcomer:
            assert next(newcomer)["sample_id"].tolist() == first["sample_id"].tolist()
        for _ in range(50):
            next(loader)  # a connected client continues to read
    assert sum(event["event"] == "arena shared" for event in daemon.events()) == 2
    assert is_serving(daemon.address)
    assert {file.name for file in path.parent.iterdir()} == {
        "gyre.sock",
        "gyre.sock.lock",
        "gyre.sock.side",
    }
    assert daemon.stop() == 0
    assert list(path.parent.iterdir()) == []


def test_a_second_daemon_is_refused_even_without_the_lock_file(
    daemon: Daemon, gyred_command: GyredCommand
) -> None:
    path = path_of(daemon)
    path.with_name("gyre.sock.lock").unlink()
    second = gyred_command("serve", "--config", str(daemon.config_path))
    assert second.returncode == 2
    assert (
        "another process listens on" in second.stderr or "another daemon (process" in second.stderr
    )
    assert read_some(daemon)
    assert eventually(lambda: path.with_name("gyre.sock.lock").exists(), LOOK_DEADLINE_S)
    shutil.rmtree(path.parent)
    assert has_event(daemon, "socket made again")
    second = gyred_command("serve", "--config", str(daemon.config_path))
    assert second.returncode == 2
    assert daemon.process
    assert f"another daemon (process {daemon.process.pid}) serves" in second.stderr
    assert read_some(daemon)


def test_a_socket_that_cannot_be_made_again_is_reported(gyred: StartDaemon, tmp_path: Path) -> None:
    daemon = gyred({"listen": [f"unix:{tmp_path}/run/gyre.sock", "tcp:127.0.0.1:0"]})
    (_, address) = next(event for event in daemon.events() if event["event"] == "ready")["listen"]
    assert is_serving(address)
    folder = tmp_path / "run"
    shutil.rmtree(folder)
    folder.touch()
    assert has_event(daemon, "socket lost")
    lost = next(event for event in daemon.events() if event["event"] == "socket lost")
    assert "gyre.sock" in lost["reason"]
    assert eventually(lambda: not is_serving(address), LOOK_DEADLINE_S)
    folder.unlink()
    assert has_event(daemon, "socket made again")
    assert eventually(lambda: is_serving(address), LOOK_DEADLINE_S)
