"""Processes that decode or scan die, hang and lie: that costs the data an error, nothing else."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from gyre_daemon.datasets import shard_worker
from gyre_daemon.datasets.checks import DecodedShards, SampleChecker
from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.formats.chunk_index import (
    ChunkIndex,
    Column,
    ScannedChunk,
    StoredChunk,
    chunk_arrays,
)
from gyre_daemon.datasets.made_shards import Decoders, decoded_shards
from gyre_daemon.datasets.scanning import Scanner, scan_workers
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import CorruptSample
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

ROWS = 10
FIELD = FieldSpec("number", np.dtype(np.uint8), (), ragged=False, codec="bytes")


@dataclass(frozen=True)
class Decoder:
    """Chunks of ten bytes as they are; the first byte of one may be an order to misbehave.

    Attributes:
        deaths: a folder with a file for each time that an order `o` killed a process.
        num_deaths: how often it does.
    """

    deaths: str
    num_deaths: int = 1

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        ((_, data),) = chunk.pieces
        order = data[0]
        num = len(list(Path(self.deaths).iterdir()))
        if order == ord("d") or (order == ord("o") and num < self.num_deaths):
            Path(self.deaths, str(num)).touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        if order == ord("h"):
            time.sleep(1000)
        if order == ord("m"):
            raise MemoryError
        if order == ord("g"):
            setattr(shard_worker, "encode", lambda *_: b"no reply")  # noqa: B010  # from the next chunk on
        if order == ord("l"):
            data = data[1:]
        return [Column(np.frombuffer(data, np.uint8))]


@dataclass(frozen=True)
class Opened:
    """A daemon's parts, and one shard of chunks."""

    source: Storage
    index: ChunkIndex
    decoders: Decoders
    processes: ComputeServer


def run_on(
    tmp_path: Path,
    orders: bytes,
    work: Callable[[Opened], Coroutine[Any, Any, Any]],
    *,
    max_decode_s: float = 300.0,
    num_deaths: int = 1,
) -> Any:
    """Work on a shard with a chunk for each order."""
    folder, deaths = tmp_path / "set", tmp_path / "deaths"
    folder.mkdir()
    deaths.mkdir()
    contents = [bytes([order]) * ROWS for order in orders]
    (folder / "000").write_bytes(b"".join(contents))
    places = [[(ROWS * number, ROWS * (number + 1))] for number in range(len(orders))]
    arrays = chunk_arrays([FIELD], [ScannedChunk(ROWS, its, [None]) for its in places])

    async def run(opener: StorageOpener, decoders: Decoders) -> Any:
        source = await opener.open(parse_location(str(folder)), {}, "*")
        decoder = Decoder(str(deaths), num_deaths)
        index = ChunkIndex(source.shards, [arrays], decoder, "piece", b"")
        return await work(Opened(source, index, decoders, processes))

    with ThreadPoolExecutor(2) as executor:
        workers, processes = FairExecutor(executor, 2), ComputeServer()
        opener = StorageOpener(workers, EndpointOptions(16, 10.0), Metrics())
        decoders = Decoders(processes, workers, max_decode_s)
        try:
            return asyncio.run(run(opener, decoders))
        finally:
            decoders.close()
            processes.close()


def read(tmp_path: Path, orders: bytes, chunks: Sequence[int], max_decode_s: float) -> Any:
    """Read the chunks one after the other; returns the bytes or the error of each."""

    async def run(opened: Opened) -> list[Any]:
        source, index, decoders = opened.source, opened.index, opened.decoders
        assert index.chunks
        storage, found = decoded_shards(source, index.chunks, b"", decoders), list[Any]()
        for chunk in chunks:
            target = np.empty(ROWS, np.uint8)
            try:
                await storage.read(Reads.into([target], [0], [ROWS * chunk]))
                found.append(target.tobytes())
            except* CorruptSample as caught:
                found.append(caught.exceptions[0])
        return found

    return run_on(tmp_path, orders, run, max_decode_s=max_decode_s)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (b"d", "the process that decoded it died"),
        (b"m", "it needs too much memory"),
        (b"l", "its rows are not those that were indexed"),
    ],
)
def test_a_chunk_that_cannot_be_decoded_is_named_and_the_next_one_is_read(
    tmp_path: Path, order: bytes, reason: str
) -> None:
    failure, after = read(tmp_path, b"a" + order + b"b", [1, 2], max_decode_s=300.0)
    assert str(failure).startswith(f"piece 1 of shard 000 (at byte 10): {reason}")
    assert failure.facts["chunk"] in (1, "1")
    assert after == b"b" * ROWS


def test_a_chunk_whose_processes_were_lost_is_checked_again(tmp_path: Path) -> None:
    async def damaged(opened: Opened) -> list[int]:
        sidecars = SidecarStore(str(tmp_path / "indexes"), tmp_path)
        checker, found = SampleChecker(sidecars, scan_workers(opened.processes)), list[int]()
        chunks = opened.index.chunks
        assert chunks
        for _ in range(2):
            shards = DecodedShards(opened.source, chunks, opened.index, opened.decoders)
            none = np.empty(0, np.int64)
            run = checker.run("set", shards, opened.index, none, [FIELD], refresh=False)
            found += [len(each.damages) async for each in run]
        return found

    assert run_on(tmp_path, b"ao", damaged, num_deaths=2) == [ROWS, 0]


def test_a_chunk_that_hangs_its_decoder_is_given_up(tmp_path: Path) -> None:
    (failure,) = read(tmp_path, b"h", [0], max_decode_s=0.5)
    assert "it was not decoded within 0.5 s" in str(failure)


def test_a_process_that_is_killed_once_is_replaced(tmp_path: Path) -> None:
    assert read(tmp_path, b"o", [0], max_decode_s=300.0) == [b"o" * ROWS]


def test_a_process_that_sends_no_reply_of_its_task_is_replaced(tmp_path: Path) -> None:
    assert read(tmp_path, b"gb", [0, 1], max_decode_s=300.0) == [b"g" * ROWS, b"b" * ROWS]


@dataclass(frozen=True)
class DyingScan:
    """A scan whose process is killed the first times, each of which leaves a file."""

    folder: Path
    num_deaths: int

    def __call__(self, shard: str, file: BinaryIO) -> dict[str, Any]:
        if (num := len(list(self.folder.iterdir()))) < self.num_deaths:
            (self.folder / str(num)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"bytes": np.frombuffer(file.read(), np.uint8)}


def scanned(tmp_path: Path, num_deaths: int) -> bytes:
    deaths, shard = tmp_path / "deaths", tmp_path / "shard"
    deaths.mkdir()
    shard.write_bytes(b"samples")

    async def run() -> bytes:
        source = await opener.open(parse_location(str(shard)), {}, "*")
        scanner = Scanner(scan_workers(processes))
        try:
            arrays = await scanner.scan(DyingScan(deaths, num_deaths), source, 0)
        finally:
            scanner.kill()
        return arrays["bytes"].tobytes()

    with ThreadPoolExecutor(2) as executor:
        processes = ComputeServer()
        opener = StorageOpener(FairExecutor(executor, 2), EndpointOptions(16, 10.0), Metrics())
        try:
            return asyncio.run(run())
        finally:
            opener.close()
            processes.close()


def test_a_scan_whose_process_is_killed_once_is_repeated(tmp_path: Path) -> None:
    assert scanned(tmp_path, 1) == b"samples"


def test_a_scan_whose_process_is_killed_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorruptSample, match="shard shard has no index: the process that indexed"):
        scanned(tmp_path, 3)
    assert len(list((tmp_path / "deaths").iterdir())) == 2
