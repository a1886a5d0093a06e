"""The private daemon's life: started on demand, shared, and gone with its parent however that ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
from gyre_client import Loader
from gyre_client.errors import ConfigError, DaemonUnavailable, NotInstalled, ShardMissing, UnknownDataset

OPTIONS = {"sequence_length": 8}


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    np.arange(800, dtype=np.uint16).tofile(path)
    return path


def private(path: Path) -> Loader:
    return Loader(path, batch_size=10, format="tokens", options=OPTIONS)


def daemons() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if is_daemon(child)]


def is_daemon(process: psutil.Process) -> bool:
    try:
        return "gyre_daemon" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended
        return False


def directory_of(daemon: psutil.Process) -> Path:
    command = daemon.cmdline()
    return Path(command[command.index("--socket-dir") + 1])


def wait_until_gone(daemon: psutil.Process, directory: Path, deadline_s: float = 15.0) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        daemon.wait(deadline_s)
    deadline = time.monotonic() + deadline_s
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_loaders_share_one_private_daemon_and_the_last_stops_it(tokens: Path) -> None:
    with private(tokens) as first:
        (daemon,) = daemons()
        directory = directory_of(daemon)
        assert directory.stat().st_mode & 0o777 == 0o700
        with private(tokens) as second:
            assert len(daemons()) == 1
            assert next(first)["tokens"].tolist() == next(second)["tokens"].tolist()
        assert len(list(islice(first, 20))) == 20
    assert daemons() == []
    assert not directory.exists()
    with private(tokens) as third:
        assert next(third)["tokens"].shape == (10, 8)
    assert daemons() == []


def test_it_is_gone_when_its_parent_is_killed(tokens: Path) -> None:
    program = "\n".join(
        [
            "import sys, time",
            "from gyre_client import Loader",
            "loader = Loader(sys.argv[1], batch_size=10, format='tokens', options={'sequence_length': 8})",
            "next(loader)",
            "print('reading', flush=True)",
            "time.sleep(60)",
        ]
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tokens)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "reading\n"
        (daemon,) = psutil.Process(parent.pid).children()
        directory = directory_of(daemon)
        assert directory.exists()
        parent.kill()
    wait_until_gone(daemon, directory)


def test_it_is_gone_when_its_parent_ends_without_closing(tokens: Path) -> None:
    program = "\n".join(
        [
            "import sys",
            "from gyre_client import Loader, embedded",
            "loader = Loader(sys.argv[1], batch_size=10, format='tokens', options={'sequence_length': 8})",
            "next(loader)",
            "print(embedded.acquire().address.text)",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tokens)], capture_output=True, text=True, timeout=60, check=True
    )
    directory = Path(result.stdout.strip().removeprefix("unix:")).parent
    assert result.stderr == ""
    deadline = time.monotonic() + 15
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_private_daemon_that_dies_is_replaced_and_nothing_is_lost(tokens: Path) -> None:
    with private(tokens) as loader:
        expected = [batch["sample_id"].tolist() for batch in islice(loader, 201)]
    with private(tokens) as loader:
        seen = [next(loader)["sample_id"].tolist()]
        (daemon,) = daemons()
        os.kill(daemon.pid, signal.SIGKILL)
        seen += [batch["sample_id"].tolist() for batch in islice(loader, 200)]  # more than can be in the queue
        assert seen == expected
        assert daemons() != [daemon]
    assert daemons() == []


def test_what_the_private_daemon_says_against_a_definition(tmp_path: Path, tokens: Path) -> None:
    with pytest.raises((UnknownDataset, ShardMissing), match="missing"):
        private(tmp_path / "missing.bin")
    with pytest.raises(ConfigError, match="tokenz"):
        Loader(tokens, batch_size=10, format="tokenz")
    with pytest.raises(ConfigError, match="sequence_lenght"):
        Loader(tokens, batch_size=10, format="tokens", options={"sequence_lenght": 8})
    assert daemons() == []


def test_a_daemon_that_cannot_start_is_an_error_with_its_last_words(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_PREFETCH_BATCHES", "many")
    with pytest.raises(DaemonUnavailable, match=r"ended with status 2: gyred: .*many"):
        private(tokens)
    assert daemons() == []


def test_a_daemon_that_is_not_installed_is_one_sentence(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gyre_daemon", None)
    with pytest.raises(NotInstalled, match=r'pip install "gyre-ml\[daemon\]"'):
        private(tokens)
