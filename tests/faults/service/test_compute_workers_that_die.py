"""Compute workers: what they can reach, and how they end. Their fork server dies, too."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader

from tests.conftest import Daemon, to_toml
from tests.probe_transforms import install
from tests.waiting import until

NUM_SAMPLES, LENGTH = 256, 8
SECRET = "which no compute worker may see"
CHAIN = [{"name": "draw"}]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with both kinds of worker: it copies, scans, decodes and transforms."""
    (tmp_path / "data").mkdir()
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint16).tofile(tmp_path / "data/a.bin")
    pq.write_table(pa.table({"number": range(NUM_SAMPLES)}), tmp_path / "rows.parquet")
    address, config = f"unix:{tmp_path}/run/gyre.sock", tmp_path / "gyre.toml"
    tokens = {"format": "tokens", "dtype": "uint16", "sequence_length": LENGTH}
    values = {
        "listen": [address],
        "index_dir": str(tmp_path / "index"),
        "num_transform_workers": 2,
        "installed_transforms": ["draw", "trouble"],
        "datasets": {
            "tokens": {"uri": str(tmp_path / "data"), **tokens},
            "rows": {"uri": str(tmp_path / "rows.parquet"), "format": "parquet"},
        },
    }
    config.write_text(to_toml(values))
    environment = {
        "PYTHONPATH": str(install(tmp_path / "packages")),
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    daemon = Daemon(config, address, tmp_path / "log", environment).start()
    yield daemon
    daemon.stop()


def family(daemon: Daemon) -> dict[str, list[psutil.Process]]:
    """The processes of a daemon by their names; servers have the name of their kind."""
    found: dict[str, list[psutil.Process]] = {}
    assert daemon.process
    for each in psutil.Process(daemon.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.setdefault(each.name(), []).append(each)
    return found


def computing(daemon: Daemon) -> list[psutil.Process]:
    """The compute workers and their fork server."""
    return [each for name, some in family(daemon).items() if name != "gyre-copy" for each in some]


def reaches_an_arena(process: psutil.Process) -> bool:
    """Whether a process has mapped an arena, or could map one by a descriptor."""
    folder = Path(f"/proc/{process.pid}")
    opened = []
    for descriptor in (folder / "fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(str(descriptor.readlink()))
    return "gyre-arena" in (folder / "maps").read_text() + " ".join(opened)


def test_only_copy_workers_reach_arenas(daemon: Daemon) -> None:
    """And no compute worker has the daemon's environment or memory without a bound."""
    arguments: dict[str, Any] = {"address": daemon.address, "batch_size": 16}
    with (
        Loader("tokens", token_dtype="stored", **arguments) as plain,
        Loader("tokens", token_dtype="stored", transform=CHAIN, **arguments) as drawn,
        Loader("rows", **arguments) as rows,
    ):
        for loader in (plain, drawn, rows):
            next(loader)
        named = family(daemon)
        assert named.keys() == {"gyre-copy", "gyre-compute", "gyre-scan", "gyre-transform"}
        assert all(map(reaches_an_arena, named["gyre-copy"]))
        for process in computing(daemon):
            assert not reaches_an_arena(process), process.name()
            assert SECRET not in Path(f"/proc/{process.pid}/environ").read_text()
            is_server = process in named["gyre-compute"]
            limit, _ = process.rlimit(psutil.RLIMIT_DATA)
            assert is_server or 0 < limit <= 4 << 30, process.name()
            assert not is_server or process.num_threads() == 1, "it must not fork with threads"


def test_a_fork_server_that_is_killed_with_its_workers_is_replaced(daemon: Daemon) -> None:
    arguments: dict[str, Any] = {
        "address": daemon.address,
        "batch_size": 16,
        "token_dtype": "stored",
    }
    with Loader("tokens", transform=CHAIN, epochs=None, **arguments) as loader:
        first = next(loader)["drawn"].clone()
        until(lambda: len(family(daemon)["gyre-compute"]) == 1)  # a new worker has its name, too
        (server,) = family(daemon)["gyre-compute"]
        for process in (server, *server.children()):
            process.kill()
        for _ in range(NUM_SAMPLES // 16 * 3):
            next(loader)
        until(lambda: family(daemon)["gyre-compute"] != [server])
    with Loader("tokens", transform=CHAIN, **arguments) as loader:
        assert next(loader)["drawn"].equal(first), "by processes of the new server"


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_compute_workers_end_with_their_daemon(daemon: Daemon, how: str) -> None:
    """Also one in which a user's function hangs."""
    hangs = {"name": "trouble", "hangs": [LENGTH * number for number in range(NUM_SAMPLES)]}
    arguments: dict[str, Any] = {
        "address": daemon.address,
        "batch_size": 16,
        "token_dtype": "stored",
    }
    with Loader("tokens", transform=CHAIN, **arguments) as loader:
        next(loader)
        with Loader("tokens", transform=[hangs], **arguments):
            busy = [each for each in computing(daemon) if each.name() == "gyre-transform"]
            assert busy
            forked = computing(daemon)
            for process in forked:
                process.send_signal(signal.SIGINT)  # as Ctrl-C does
            if how == "killed":
                daemon.kill()
            else:
                assert daemon.stop() == 0
    gone, alive = psutil.wait_procs(forked, timeout=120)
    assert len(gone) == len(forked), alive
