"""Estimates the cost of reading a dataset of chunks in each order: how often chunks are decoded.

Pure; no sample is read. A batch decodes each chunk that it touches once, unless the cache has it.
"""

from dataclasses import replace

import numpy as np

from gyre_daemon.datasets.cost import (
    GOOD_QUALITY,
    CostQuery,
    CostReport,
    Estimate,
    estimate_costs,
    in_units,
)
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.indexes.chunk_index import Chunks, chunks_of
from gyre_daemon.order.mixture import planner_for
from gyre_daemon.order.quality import ShuffleQuality, expected_quality
from gyre_daemon.storage.cache.blocks import whole_pages


def estimate_all(index: SampleIndex, query: CostQuery) -> CostReport:
    """The cost of each order, for samples of any kind.

    Raises:
        InvalidRequest: the order does not fit the dataset; see `BatchPlanner`.
    """
    if chunks := chunks_of(index):
        return _estimate_chunk_costs(index, chunks, query)
    return estimate_costs(index, query)


def _estimate_chunk_costs(index: SampleIndex, chunks: Chunks, query: CostQuery) -> CostReport:
    """The cost of each order on a dataset of chunks.

    Raises:
        InvalidRequest: the order does not fit the dataset; see `BatchPlanner`.
    """
    order, epochs, num_chunks = query.order, query.num_epochs, chunks.num_chunks
    pieces = [chunks.pieces(chunk) for chunk in range(num_chunks)]
    requests = sum(map(len, pieces)) / num_chunks
    stored = sum(stop - start for its in pieces for start, stop in its) / num_chunks
    decoded = float(chunks.chunk_bytes.mean())
    data_bytes = decoded * num_chunks
    num_batches = epochs * index.num_samples / order.global_batch_size
    batch, window = order.global_batch_size, min(order.window_blocks + 2, num_chunks)

    def touched(count: int) -> float:
        """How many chunks a batch touches that comes evenly from so many."""
        return float(count * -np.expm1(batch * np.log1p(-1 / count))) if count > 1 else 1.0

    def held(num_bytes: float) -> float:
        return min(1.0, query.cache_bytes / max(num_bytes, 1)) if query.cache_bytes else 1.0

    def estimate(
        name: str, num_decoded: float, memory_bytes: float, quality: ShuffleQuality
    ) -> Estimate:
        num_requests, num_bytes = round(num_decoded * requests), round(num_decoded * stored)
        return Estimate(
            name,
            num_requests,
            num_bytes,
            num_decoded * decoded / max(epochs * data_bytes, 1),
            round(memory_bytes),
            quality,
            query.prices.of(num_requests, num_bytes),
            round(num_decoded),
            round(num_decoded * decoded),
        )

    full_order = replace(order, mode="full", io_block_bytes=0, window_blocks=0)
    full_quality = expected_quality(planner_for(full_order, index))
    block_quality = expected_quality(planner_for(order, index))
    taken = whole_pages(chunks.chunk_bytes)  # in the cache
    window_bytes, cached_bytes = window * float(taken.mean()), float(taken.sum())
    of_full, in_window = num_batches * touched(num_chunks), held(window_bytes)
    in_cache = held(cached_bytes)
    of_block = in_window * epochs * num_chunks + (1 - in_window) * num_batches * touched(window)
    of_cached = in_cache * num_chunks + (1 - in_cache) * of_full
    estimates = [
        estimate("full", of_full, 0, full_quality),
        estimate("block", of_block, window_bytes, block_quality),
        estimate("full with the cache", of_cached, in_cache * cached_bytes, full_quality),
    ]
    advice = _recommend(chunks.noun, query, estimates, in_window, cached_bytes)
    return CostReport(estimates, advice, round(epochs * data_bytes))


def _recommend(
    noun: str,
    query: CostQuery,
    estimates: list[Estimate],
    in_window: float,
    cached_bytes: float,
) -> str:
    full, block, _ = estimates
    needed, window = in_units(cached_bytes), query.order.window_blocks
    fewer = f"{full.num_chunks_decoded / max(block.num_chunks_decoded, 1):,.0f}"
    quality = block.quality.worst
    if query.cache_bytes >= cached_bytes:
        return (
            f"Take `full` with the cache: it holds all of the decoded data ({needed}), so each "
            f"{noun} is decoded once, and the shuffle is global."
        )
    if in_window < 1.0:
        return (
            f"Take `block` with a narrower window than {window} blocks, or a larger cache: this "
            f"window takes {in_units(block.memory_bytes)}, and the rest that does not fit "
            "into the cache is decoded again and again."
        )
    if quality < GOOD_QUALITY:
        return (
            f"Take `block` with a wider window than {window} blocks, or write smaller chunks: this "
            f"window shuffles only {quality:.2f} as well as a global shuffle. `full` decodes "
            f"{fewer} times as much without a cache."
        )
    return (
        f"Take `block`: it decodes each {noun} once per epoch, {fewer} times fewer than "
        f"`full`, and shuffles {quality:.2f} as well; where there are {needed} for a cache, `full` "
        "decodes each only once."
    )
