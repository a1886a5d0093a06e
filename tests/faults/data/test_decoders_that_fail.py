"""Processes that decode or scan die, hang and lie: that costs the data an error, nothing else."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from gyre_daemon.datasets import shard_worker
from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.formats.chunk_index import (
    ChunkIndex,
    Column,
    StoredChunk,
    chunk_arrays,
)
from gyre_daemon.datasets.made_shards import Decoders, decoded_shards
from gyre_daemon.datasets.scanning import Scanner, scan_workers
from gyre_daemon.errors import CorruptSample
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.base import Reads
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

ROWS = 10
FIELD = FieldSpec("number", np.dtype(np.uint8), (), ragged=False, codec="bytes")


@dataclass(frozen=True)
class Decoder:
    """Chunks of ten bytes as they are; the first byte of one may be an order to misbehave.

    Attributes:
        killed_once: a file that a process leaves before it dies the first time.
    """

    killed_once: str

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        ((_, data),) = chunk.pieces
        order = data[0]
        if order == ord("d") or (order == ord("o") and not Path(self.killed_once).exists()):
            Path(self.killed_once).touch()
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


def read(tmp_path: Path, orders: bytes, chunks: Sequence[int], max_decode_s: float) -> Any:
    """Read the chunks one after the other; returns the bytes or the error of each."""
    folder = tmp_path / "set"
    folder.mkdir()
    contents = [bytes([order]) * ROWS for order in orders]
    (folder / "000").write_bytes(b"".join(contents))
    places = [[(ROWS * number, ROWS * (number + 1))] for number in range(len(orders))]
    arrays = chunk_arrays([FIELD], [ROWS] * len(orders), places, [[None]] * len(orders))

    async def run(opener: StorageOpener, decoders: Decoders) -> list[Any]:
        source = await opener.open(parse_location(str(folder)), {}, "*")
        decoder = Decoder(str(tmp_path / "killed"))
        index = ChunkIndex(source.shards, [arrays], decoder, "piece", b"")
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

    with ThreadPoolExecutor(2) as executor:
        workers, processes = FairExecutor(executor, 2), ComputeServer()
        opener = StorageOpener(workers, EndpointOptions(16, 10.0), Metrics())
        decoders = Decoders(processes, workers, max_decode_s)
        try:
            return asyncio.run(run(opener, decoders))
        finally:
            decoders.close()
            processes.close()


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
