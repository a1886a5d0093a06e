"""What orders cost where samples are rows of chunks, compared with the batches themselves."""

from dataclasses import replace

import numpy as np
import pytest
from gyre_daemon.datasets.cost import CostQuery, CostReport, estimate_costs
from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex, ScannedChunk, chunk_arrays
from gyre_daemon.order.mixture import planner_for
from gyre_daemon.order.permutation import window_of_chunks
from gyre_daemon.order.planner import Order
from gyre_daemon.storage.shard import Shard

ROWS, NUM_CHUNKS, CHUNK_BYTES = 100, 60, 400
PAGE = 4096  # a chunk takes one in the cache
FIELD = FieldSpec("number", np.dtype(np.int32), (), ragged=False, codec="bytes")
ORDER = Order("block", "drop", 1, 50, 1 << 20, 9)


def index() -> ChunkIndex:
    """60 chunks of 100 rows, each in one piece of 150 bytes."""
    pieces = [[(150 * number, 150 * (number + 1))] for number in range(NUM_CHUNKS)]
    arrays = chunk_arrays([FIELD], [ScannedChunk(ROWS, its, [None]) for its in pieces])
    return ChunkIndex([Shard("a", 9000, "1")], [arrays], lambda chunk: [], "piece", b"")


def report(cache_bytes: int = 0, window: int = 9) -> CostReport:
    order = replace(ORDER, window_blocks=window)
    return estimate_costs(index(), CostQuery(order, 3, cache_bytes, 1 << 18, is_local=False))


def test_full_decodes_the_chunks_that_its_batches_touch() -> None:
    planner, table = planner_for(replace(ORDER, mode="full"), index()), index().blocks(0)
    steps = 3 * NUM_CHUNKS * ROWS // 50
    batches = (planner.batch(step, 0, 1).sample_ids for step in range(steps))
    decoded = sum(len(np.unique(table.block_of(ids))) for ids in batches)
    full, block, cached = report().estimates
    assert full.num_chunks_decoded == pytest.approx(decoded, rel=0.02)
    assert full.num_bytes_decoded == pytest.approx(decoded * CHUNK_BYTES, rel=0.02)
    assert full.amplification == pytest.approx(decoded / (3 * NUM_CHUNKS), rel=0.02)
    assert (block.num_chunks_decoded, block.amplification) == (3 * NUM_CHUNKS, 1.0)
    assert (block.num_requests, block.num_bytes) == (3 * NUM_CHUNKS, 3 * 9000)
    assert block.memory_bytes == (9 + 2) * PAGE
    assert (cached.num_chunks_decoded, cached.memory_bytes) == (NUM_CHUNKS, NUM_CHUNKS * PAGE)


@pytest.mark.parametrize(
    ("cache_bytes", "window", "advice"),
    [
        (0, 59, "Take `block`: it decodes each piece once per epoch"),
        (1 << 20, 9, "Take `full` with the cache: it holds all"),
        (NUM_CHUNKS * CHUNK_BYTES, 9, "Take `block` with a narrower window than 9 blocks"),
        (5 * PAGE, 3, "Take `block` with a wider window than 3 blocks, or write smaller chunks"),
    ],
)
def test_the_advice_follows_the_figures(cache_bytes: int, window: int, advice: str) -> None:
    assert report(cache_bytes, window).recommendation.startswith(advice)


def test_the_default_window_of_large_chunks_fits_into_a_cache() -> None:
    assert window_of_chunks(1024, 2 << 20) == 256
    assert window_of_chunks(1024, 4096) == 1024
    assert window_of_chunks(1024, 1 << 30) == 2
