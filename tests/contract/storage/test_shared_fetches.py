"""Blocks and chunks that several jobs wait for: they are fetched at the first turn of any job."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from gyre_daemon.datasets.formats import lines
from gyre_daemon.datasets.made_shards import Decoders, decoded_shards
from gyre_daemon.runtime.threads import FairExecutor, Flow
from gyre_daemon.storage.cache.blocks import PAGE_BYTES, BlockMap
from gyre_daemon.storage.cache.node import CachedStorage, NodeCache
from gyre_daemon.storage.engine.endpoint import RemoteStorage
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.storage.response import Response
from gyre_daemon.storage.shard import Shard, Validators
from gyre_daemon.workers.compute_workers import ComputeServer

from tests.contract.formats import test_chunked_formats
from tests.contract.formats.chunk_contract import chunks_in, decode_all
from tests.contract.storage.engine import DATA, Engine, play, until

BLOCK, NUM_BLOCKS = 100, 10
LIGHT, HEAVY = Flow("light"), Flow("heavy", weight=8.0)


def cached(engine: Engine, memory_bytes: int, threads: FairExecutor) -> CachedStorage:
    """The storage of an engine behind a cache whose blocks have 100 bytes."""
    starts = np.arange(NUM_BLOCKS) * BLOCK
    blocks = BlockMap(np.zeros(NUM_BLOCKS, np.int64), starts, starts + BLOCK)
    node = NodeCache(memory_bytes, None, threads, engine.metrics.cache)
    return CachedStorage(engine.storage, "test", node, lambda _: blocks, BLOCK)


async def read(storage: Storage, start: int, flow: Flow, urgency: int = 0) -> bytes:
    memory = np.zeros(16, np.uint8)
    reads = Reads.into([memory], [0], [start])
    await storage.read(replace(reads, flow=flow, urgency=urgency, block_bytes=BLOCK))
    return memory.tobytes()


async def asked_in_turn(engine: Engine, count: int, data: bytes = DATA) -> list[int]:
    """Answer one request after the other; returns where they begin."""
    for number in range(count):
        await until(lambda number=number: len(engine.source.asked) > number)  # type: ignore[misc]
        asked = engine.source.asked[number]
        asked.answer(Response(206, data[asked.start : asked.stop], Validators('"v1"'), len(data)))
    return [asked.start for asked in engine.source.asked]


@pytest.mark.parametrize("room", [NUM_BLOCKS, 1], ids=["waiting for its turn", "waiting for room"])
def test_a_block_of_the_cache_is_fetched_at_the_first_turn_of_those_that_wait(room: int) -> None:
    async def scene() -> None:
        engine = Engine(max_requests=1)
        with ThreadPoolExecutor(1) as executor:
            storage = cached(engine, room * PAGE_BYTES, FairExecutor(executor, 1))
            await storage.expect(BLOCK, np.arange(NUM_BLOCKS), LIGHT)
            queue = engine.endpoint.queue if room > 1 else storage._cache._line
            others = NUM_BLOCKS - 1 - (room == 1)  # one has the turn to wait for room
            await until(lambda: queue.num_waiting == others)
            # The share of the job that expects it is smaller, or its need was not so urgent.
            reading = [
                asyncio.create_task(read(storage, 900, HEAVY)),
                asyncio.create_task(read(storage, 805, LIGHT, urgency=7)),
            ]
            await until(lambda: queue.num_waiting == others + 2)
            starts = await asked_in_turn(engine, NUM_BLOCKS)
            first = [0, 900, 800] if room > 1 else [0, 100, 900, 800]
            assert starts == [*first, *sorted(set(range(0, 1000, BLOCK)) - set(first))]
            assert await asyncio.gather(*reading) == [DATA[900:916], DATA[805:821]]
            await until(lambda: not storage._cache._fetching)
        assert engine.endpoint.queue.num_taken == storage._cache._line.num_taken == 0

    play(scene)


def test_a_block_larger_than_the_memory_waits_for_no_room() -> None:
    """It would wait for as long as others read, and all that wait for room would wait with it."""
    data = DATA * 3
    blocks = BlockMap(np.zeros(2, np.int64), np.array([0, BLOCK]), np.array([BLOCK, len(data)]))

    async def scene() -> None:
        engine = Engine()
        with ThreadPoolExecutor(1) as executor:
            shard = Shard("0", len(data), '"v1"')
            source = RemoteStorage(engine.source, engine.endpoint, ["there"], [shard])
            node = NodeCache(PAGE_BYTES, None, FairExecutor(executor, 1), engine.metrics.cache)
            storage = CachedStorage(source, "test", node, lambda _: blocks, BLOCK)
            await storage.expect(BLOCK, np.arange(2), LIGHT)  # the first fills the memory
            async with asyncio.timeout(10):
                reading = asyncio.create_task(read(storage, 5000, LIGHT))
                await until(lambda: len(engine.source.asked) == 2)
            starts = await asked_in_turn(engine, 2, data)
            assert starts == [0, 5000]
            assert await reading == data[5000:5016]
            await until(lambda: not storage._cache._fetching)

    play(scene)


def test_a_chunk_is_decoded_at_the_first_turn_of_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "MIN_BLOCK_BYTES", 3000)
    contract = test_chunked_formats.TestCompressedJsonl()
    data = contract.shards()[0][0]
    index = contract.index([data])
    chunks = chunks_in(index)
    assert chunks.num_chunks >= 4
    (whole,) = decode_all([data], index)

    async def scene(decoders: Decoders) -> None:
        engine = Engine(max_requests=1)
        source = RemoteStorage(
            engine.source, engine.endpoint, ["there"], [Shard("0", len(data), '"v1"')]
        )
        decoded = decoded_shards(source, chunks, index.digest(), decoders)
        begins = chunks.base.tolist()
        reading = [asyncio.create_task(read(decoded, begin, LIGHT)) for begin in begins]
        await until(lambda: engine.endpoint.queue.num_waiting == len(begins) - 1)
        reading.append(asyncio.create_task(read(decoded, begins[-1], HEAVY)))
        await until(lambda: engine.endpoint.queue.num_waiting == len(begins))
        starts = await asked_in_turn(engine, len(begins), data)
        order: Sequence[int] = [0, len(begins) - 1, *range(1, len(begins) - 1)]
        assert starts == [chunks.pieces(chunk)[0][0] for chunk in order]
        found = await asyncio.gather(*reading)
        assert found == [whole[begin : begin + 16] for begin in [*begins, begins[-1]]]

    server = ComputeServer()
    with ThreadPoolExecutor(1) as executor:
        decoders = Decoders(server, FairExecutor(executor, 1))
        try:
            play(lambda: scene(decoders))
        finally:
            decoders.close()
            server.close()
