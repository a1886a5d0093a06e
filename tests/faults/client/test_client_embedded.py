"""The private daemon's life.

Started on demand, shared, and gone with its last client however that ends.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gyre_client import Loader
from gyre_client.errors import (
    ConfigError,
    DaemonUnavailable,
    NotInstalled,
    ShardMissing,
    UnknownDataset,
)
from gyre_client.transport.run import PrivateFolder

from tests.daemons import private_daemons

OPTIONS = {"dtype": "uint16", "sequence_length": 8}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that nobody else uses, with a short path."""
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    np.arange(800, dtype=np.uint16).tofile(path)
    return path


def private(path: Path, prefetch_batches: int = 0) -> Loader:
    return Loader(
        path, batch_size=10, format="tokens", options=OPTIONS, prefetch_batches=prefetch_batches
    )


def daemons() -> list[psutil.Process]:
    return private_daemons(Path(os.environ["TMPDIR"]))


def directory_of(daemon: psutil.Process) -> Path:
    command = daemon.cmdline()
    return Path(command[command.index("--socket-dir") + 1])


def wait_until_gone(daemon: psutil.Process, directory: Path, deadline_s: float = 120.0) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        daemon.wait(deadline_s)
    deadline = time.monotonic() + deadline_s
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_loaders_share_one_private_daemon_and_the_last_stops_it(
    tokens: Path, temporary: Path
) -> None:
    with private(tokens) as first:
        (daemon,) = daemons()
        assert daemon not in psutil.Process().children()
        (directory,) = temporary.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        with private(tokens) as second:
            assert len(daemons()) == 1
            assert next(first)["tokens"].tolist() == next(second)["tokens"].tolist()
        assert len(list(islice(first.stream(), 20))) == 20
    assert daemons() == []
    assert not directory.exists()
    with private(tokens) as third:
        assert next(third)["tokens"].shape == (10, 8)
    assert daemons() == []


def test_a_private_daemon_ends_when_its_client_is_killed(tokens: Path) -> None:
    program = "\n".join(
        [
            "import sys, time",
            "from gyre_client import Loader",
            "options = {'dtype': 'uint16', 'sequence_length': 8}",
            "loader = Loader(sys.argv[1], batch_size=10, format='tokens', options=options)",
            "next(loader)",
            "print('reading', flush=True)",
            "time.sleep(60)",
        ]
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tokens)], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "reading\n"
        (daemon,) = daemons()
        directory = directory_of(daemon)
        client.kill()
    wait_until_gone(daemon, directory)


def test_a_private_daemon_ends_when_its_client_exits_without_closing(tokens: Path) -> None:
    program = "\n".join(
        [
            "import sys",
            "from gyre_client import Loader",
            "from gyre_client.transport.target import acquire_private",
            "options = {'dtype': 'uint16', 'sequence_length': 8}",
            "loader = Loader(sys.argv[1], batch_size=10, format='tokens', options=options)",
            "next(loader)",
            "print(acquire_private().address.text)",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tokens)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    directory = Path(result.stdout.strip().removeprefix("unix:")).parent
    assert result.stderr == ""
    deadline = time.monotonic() + 120
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_private_daemon_that_dies_is_replaced_and_nothing_is_lost(tokens: Path) -> None:
    with private(tokens) as loader:
        expected = [batch["sample_id"].tolist() for batch in islice(loader.stream(), 201)]
    with private(tokens, prefetch_batches=4) as loader:
        seen = [next(loader)["sample_id"].tolist()]
        (daemon,) = daemons()
        os.kill(daemon.pid, signal.SIGKILL)
        # more than can be in the queue
        seen += [batch["sample_id"].tolist() for batch in islice(loader.stream(), 200)]
        assert seen == expected
        (another,) = daemons()
        assert another != daemon
    assert daemons() == []


def test_the_folder_of_a_killed_client_and_daemon_is_removed_by_the_next(
    tokens: Path, temporary: Path
) -> None:
    program = "\n".join(
        [
            "import os, signal, sys",
            "from gyre_client import Loader",
            "from gyre_client.transport.target import acquire_private",
            "options = {'dtype': 'uint16', 'sequence_length': 8}",
            "loader = Loader(sys.argv[1], batch_size=10, format='tokens', options=options)",
            "os.kill(acquire_private().pid, signal.SIGKILL)",
            "os.kill(os.getpid(), signal.SIGKILL)",
        ]
    )
    result = subprocess.run([sys.executable, "-c", program, str(tokens)], timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert {file.name for file in left.iterdir()} == {
        "gyre.sock",
        "gyre.sock.lock",
        "gyre.sock.side",
        "gyred.log",
    }
    (left / "functions").mkdir()
    (left / "functions" / "crop-0.pickle").touch()
    foreign = temporary / "gyred-of-a-user"
    foreign.mkdir()
    (foreign / "gyre.sock").touch()
    (foreign / "precious").touch()
    (temporary / "gyred-a-file").touch()
    (temporary / "gyred-a-link").symlink_to(foreign)
    kept = {"gyred-of-a-user", "gyred-a-file", "gyred-a-link"}
    with (left / "gyre.sock.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the killed daemon's copy workers have ended too
    with private(tokens) as loader:
        assert not left.exists()
        (daemon,) = daemons()
        assert {path.name for path in temporary.iterdir()} == {directory_of(daemon).name, *kept}
        assert next(loader)["tokens"].shape == (10, 8)
    assert {path.name for path in temporary.iterdir()} == kept
    assert {file.name for file in foreign.iterdir()} == {"gyre.sock", "precious"}


def test_folders_of_living_clients_and_daemons_stay(temporary: Path) -> None:
    of_client = PrivateFolder("early")  # whose daemon was not started yet
    of_daemon = temporary / "gyred-orphan"
    of_daemon.mkdir(0o700)
    with (of_daemon / "gyre.sock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        another = PrivateFolder("late")
        assert {path.name for path in temporary.iterdir()} == {
            "gyred-early",
            "gyred-late",
            "gyred-orphan",
        }
    same = PrivateFolder("late")
    assert not another.is_last()
    another.leave()
    assert same.is_last()
    for folder in (of_client, same, PrivateFolder("last")):
        folder.remove()
    assert list(temporary.iterdir()) == [], "the orphan's daemon ended"


def test_a_folder_that_another_client_just_removed_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when this client made it, and is gone when it looks."""
    make, found = os.mkdir, [True]

    def mkdir(path: Path, mode: int) -> None:
        if found and found.pop():
            raise FileExistsError
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    folder = PrivateFolder("shared")
    assert folder.path.is_dir()
    folder.remove()


def test_a_folder_for_temporary_files_may_have_a_long_path(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private(tokens) as loader:
        assert next(loader)["tokens"].shape == (10, 8)
        path = loader._place.target.address.path
        assert path
        assert Path(path).parents[1] == Path("/tmp")


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_daemon_that_dies_while_it_starts_is_started_once_more(
    tokens: Path,
    temporary: Path,
    num_deaths: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[int] = []
    start = subprocess.Popen

    def start_and_kill(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        child: subprocess.Popen[bytes] = start(*arguments, **options)
        started.append(child.pid)
        if len(started) <= num_deaths:
            child.kill()
        return child

    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    if num_deaths == 1:
        with private(tokens) as loader:
            assert next(loader)["tokens"].shape == (10, 8)
    else:
        with pytest.raises(
            DaemonUnavailable, match="the private daemon ended with status -9: it said nothing"
        ):
            private(tokens)
    assert len(started) == 2
    assert "starting it once more" in caplog.text
    assert daemons() == []
    assert list(temporary.iterdir()) == []


def test_a_private_daemon_refuses_a_wrong_definition(tmp_path: Path, tokens: Path) -> None:
    with pytest.raises((UnknownDataset, ShardMissing), match="missing"):
        private(tmp_path / "missing.bin")
    with pytest.raises(ConfigError, match="tokenz"):
        Loader(tokens, batch_size=10, format="tokenz")
    with pytest.raises(ConfigError, match="sequence_lenght"):
        Loader(tokens, batch_size=10, format="tokens", options={"sequence_lenght": 8})
    assert daemons() == []


def test_a_daemon_that_cannot_start_is_an_error_that_quotes_its_log(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_PREFETCH_BATCHES", "many")
    with pytest.raises(
        DaemonUnavailable, match=r"ended with status 2: gyred: .*many.*\(its log is .*gyred.log\)"
    ) as failure:
        private(tokens)
    assert daemons() == []
    log = Path(str(failure.value).partition("its log is ")[2].rstrip(")"))
    assert "many" in log.read_text(), "the folder stays"
    monkeypatch.delenv("GYRE_PREFETCH_BATCHES")
    with private(tokens):
        assert "many" not in log.read_text(), "the next private daemon removes it"


def test_the_log_outlives_a_restart_and_is_cut(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_client.transport.target.MAX_LOG_BYTES", 8000)
    with private(tokens) as loader:
        next(loader)
        (daemon,) = daemons()
        log = directory_of(daemon) / "gyred.log"
        first = log.read_text()
        assert '"event": "ready"' in first
        daemon.terminate()  # in good order: clients are left, so the folder stays
        for _ in range(30):
            next(loader)
        assert log.read_text()[:100] == first[:100] or log.stat().st_size < 8000
        with log.open("a") as file:
            file.write("x" * 9000)
        loader.reset()
        assert "x" * 1000 in log.read_text()
        assert log.stat().st_size < 8000
    assert not log.exists()


def test_an_error_of_a_private_daemon_names_its_log(tokens: Path) -> None:
    with private(tokens) as loader:
        (daemon,) = daemons()
        target = loader._place.target
        error = target.with_log(DaemonUnavailable("it is gone", {"a": "b"}))
        assert str(error) == f"it is gone. Its log is {directory_of(daemon)}/gyred.log"
        assert (type(error), error.facts) == (DaemonUnavailable, {"a": "b"})
        refused = ShardMissing("no shard")
        assert target.with_log(refused) is refused


def test_a_daemon_that_is_not_installed_is_one_sentence(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gyre_daemon", None)
    with pytest.raises(NotInstalled, match=r'pip install "gyre-ml\[daemon\]"'):
        private(tokens)
