"""Shards that Ray scans, on a Ray of this machine's own that has a worker for each core."""

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client.command.cli import main
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import Format
from gyre_daemon.datasets.formats.base import Arrays, Scan
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.datasets.scans.processes import ScanProcesses
from gyre_daemon.datasets.scans.ray_scans import RayScans, ray_address
from gyre_daemon.datasets.scans.scanner import Scanner
from gyre_daemon.errors import ConfigError, GyreError, InvalidRequest
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.opening.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

from tests.conftest import Daemon, StartDaemon
from tests.object_server.process import object_server
from tests.waiting import until

REPOSITORY = Path(__file__).parents[3]
OPTIONS = EndpointOptions(16, 60.0)
NUM_SHARDS = 5


def tar(first: int, num_samples: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(first, first + num_samples):
            for extension, data in (("txt", b"text %d" % number), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def store(folder: Path) -> Path:
    """Tar shards, of which one is cut off in a header."""
    folder.mkdir()
    for number in range(NUM_SHARDS):
        (folder / f"{number}.tar").write_bytes(tar(100 * number, 20 + number))
    data = (folder / "3.tar").read_bytes()
    (folder / "3.tar").write_bytes(data[:5000])
    return folder


def die(_: str, __: BinaryIO) -> Arrays:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@dataclass(frozen=True)
class DieOnce:
    """A scan whose first process dies, as one does that the kernel kills for its memory."""

    folder: Path

    def __call__(self, _: str, file: BinaryIO) -> Arrays:
        with contextlib.suppress(FileExistsError):
            (self.folder / "killed").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"size": np.array([len(file.read())])}


def scan_of(format_name: str) -> Scan:
    made = cast("Format", make_format("set", DatasetConfig(uri="", format=format_name)))
    inspection = made.inspection
    assert isinstance(inspection, Scan)
    return inspection


Result = Any  # the arrays of a shard, or the kind, text and facts of an error


async def scanned(
    scanners: Sequence[Scanner], scan: Scan, storage: Storage, settings: Any
) -> list[Result]:
    """What a scan of each shard returns or raises; each scanner takes one at a time."""
    results: dict[int, Result] = {}
    shards = iter(range(len(storage.shards)))

    async def work(scanner: Scanner) -> None:
        for shard in shards:
            try:
                arrays = await scanner.scan(scan, storage, shard, settings)
                results[shard] = {
                    name: [str(its.dtype), its.tolist()] for name, its in arrays.items()
                }
            except GyreError as error:
                results[shard] = (type(error).__name__, str(error), dict(error.facts))

    await asyncio.gather(*map(work, scanners))
    return [results[shard] for shard in range(len(storage.shards))]


def processes_of(folder: str) -> list[str]:
    """The command lines of processes that name a folder."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and folder in (text := (process / "cmdline").read_text()):
                found.append(text.replace("\0", " "))
    return found


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths may have 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        yield folder


def test_the_index_by_ray_is_that_of_the_daemon_bit_for_bit(
    tmp_path: Path, short_folder: str, gyred: StartDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started by the command, which goes on after an error; nothing is left behind."""
    folder = store(tmp_path / "tars")
    environment = {"TMPDIR": short_folder, "HOME": short_folder}
    table = {"datasets": {"set": {"uri": str(folder), "format": "webdataset"}}}
    daemons = [gyred(table, environment) for _ in range(2)]

    def index(daemon: Daemon, engine: str) -> dict[str, Any]:
        code = main(["index", "set", "--json", "--address", daemon.address, "--engine", engine])
        text, error = capsys.readouterr()
        return {"error": error} if code else json.loads(text)

    assert "shard 3.tar at byte 5000" in index(daemons[1], "local")["error"]
    (folder / "3.tar").write_bytes(tar(300, 23))
    indexed = [index(daemons[0], "local"), index(daemons[1], "ray")]
    assert "error" not in indexed[1], indexed[1]["error"]
    for each in indexed:  # what was indexed before the error, in one of the two, counts as kept
        del each["shards"], each["num_reused"]
    assert indexed[0] == indexed[1]
    assert indexed[0]["num_samples"] == sum(20 + number for number in range(NUM_SHARDS))
    stored = [
        {path.name: path.read_bytes() for path in (daemon.config_path.parent / "index").iterdir()}
        for daemon in daemons
    ]
    assert stored[0] == stored[1]
    until(lambda: not processes_of(short_folder))
    assert not any(Path(short_folder).iterdir())


def test_its_own_ray_finds_what_the_daemons_processes_find(
    tmp_path: Path, short_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From disk, S3 and HTTP, damaged or not, also if a worker dies; and nothing is left behind."""
    monkeypatch.setenv("TMPDIR", short_folder)
    monkeypatch.setenv("HOME", short_folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    folder = store(tmp_path / "tars")
    table = pa.table({"id": np.arange(500), "text": [f"row {row}" for row in range(500)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=100)

    async def run() -> None:
        opener = StorageOpener(FairExecutor(threads, 2), OPTIONS, Metrics())
        places: list[tuple[str, str, Any]] = [
            ("webdataset", str(folder), {}),
            ("webdataset", "s3://tars/", server.storage_settings),
            ("parquet", f"{server.url}/rows/rows.parquet", {}),
        ]
        async with RayScans("local") as by_ray:
            for format_name, uri, settings in places:
                scan = scan_of(format_name)
                storage = await opener.open(parse_location(uri), settings, "*")
                expected = await scanned([ours], scan, storage, settings)
                by_tasks = await scanned([ray(by_ray)] * NUM_SHARDS, scan, storage, settings)
                assert by_tasks == expected
                failures = [each[0] for each in expected if isinstance(each, tuple)]
                assert failures == ([] if format_name == "parquet" else ["CorruptSample"])
            storage = await opener.open(parse_location(str(folder / "0.tar")), {}, "*")
            once, always = [
                Scan("dying/1", run, len, lambda *_: None) for run in (DieOnce(tmp_path), die)
            ]
            ((found,), (failure,)) = await asyncio.gather(
                *(scanned([ray(by_ray)], scan, storage, {}) for scan in (once, always))
            )
            assert found == {"size": ["int64", [storage.shards[0].size_bytes]]}
            reason = "the Ray workers that indexed it died, 4 of them"
            assert failure[:2] == ("CorruptSample", f"shard 0.tar has no index: {reason}")
            assert processes_of(short_folder)
        opener.close()

    def ray(scans: RayScans) -> Scanner:
        return Scanner(processes, scans, OPTIONS)

    compute_server = ComputeServer()
    processes = ScanProcesses(compute_server)
    with ThreadPoolExecutor(2) as threads, object_server() as server:
        for path in folder.iterdir():
            server.put(f"/tars/{path.name}", path.read_bytes())
        server.put("/rows/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
        ours = Scanner(processes, None, OPTIONS)
        try:
            asyncio.run(run())
        finally:
            ours.kill()
            compute_server.close()
    until(lambda: not processes_of(short_folder))
    assert not any(Path(short_folder).iterdir())


@pytest.mark.parametrize("engine", ["spark", "ray://", "ray://host", "ray://user@host:1", "RAY"])
def test_an_engine_that_is_none_is_refused(engine: str) -> None:
    with pytest.raises(InvalidRequest, match="write `local`, `ray`"):
        ray_address(engine)


def test_the_extra_is_named_where_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "gyre-ml\[ray\]"'):
        ray_address("ray")
    assert ray_address("local") is None
