"""Estimates the cost of reading a dataset in each order: requests, bytes, memory and quality.

Pure; no sample is read. Averages come from a few thousand samples and blocks, spread evenly over
the dataset, so that a billion samples take no longer than a million. Requests follow the rules of
remote storage: fields of a sample that lie close together come with one request, and so does a
block. The cache takes whole blocks of its own while it has room and evicts none; the rest is read
sample by sample.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct

from gyre_daemon.datasets.dataset import block_ranges
from gyre_daemon.datasets.formats import Extents, SampleIndex
from gyre_daemon.datasets.formats.chunk_index import Chunks, chunks_of
from gyre_daemon.order.mixture import planner_for
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import Order, ShuffleQuality, expected_quality
from gyre_daemon.storage.cache.blocks import whole_pages
from gyre_daemon.storage.reads import MAX_GAP_BYTES

# The order `block` is recommended only if it shuffles at least this well. A lower bound would give
# up quality to save requests; a higher one would ask for windows that take more memory.
GOOD_QUALITY = 0.95
# Samples and blocks looked at. The estimates of sizes that vary by their own mean are then
# right to about 2 %; four times as many would halve that and take four times as long.
_NUM_SAMPLED = 4096
# With fewer samples in a block, its one request saves too little to give up a global shuffle.
_MIN_SAMPLES_PER_BLOCK = 4
_CACHED = "full with the cache"


class CostQuery(Struct, frozen=True):
    """The request for an estimate.

    Attributes:
        order: of mode `block`; its seed and G also stand for `full`.
        num_epochs: how often the data is read.
        cache_bytes: of the node; 0 for a cache as large as the data.
        cache_block_bytes: about the size of the cache's blocks.
        is_local: whether a fast mount of this machine has the data, so that a request costs next to
            nothing.
        is_by_file: whether each sample is a file, so that a block takes a request for each sample.
        opens_files: whether each of these requests opens a file of a mount.
    """

    order: Order
    num_epochs: int
    cache_bytes: int
    cache_block_bytes: int
    is_local: bool
    is_by_file: bool = False
    opens_files: bool = False


class Estimate(Struct, frozen=True):
    """The cost of one order.

    Attributes:
        order: its name.
        num_requests: in all epochs.
        num_bytes: read in all epochs.
        amplification: bytes read for each byte that is served; where chunks are decoded, bytes
            decoded.
        memory_bytes: besides the prefetch window, which all orders need.
        quality: of the shuffle.
        num_chunks_decoded: in all epochs; 0 where samples are byte ranges of shards.
        num_bytes_decoded: of these chunks.
        num_opens: files that are opened in all epochs, each an operation on metadata; 0 where all
            samples are in a few open shards, or in object storage.
    """

    order: str
    num_requests: int
    num_bytes: int
    amplification: float
    memory_bytes: int
    quality: ShuffleQuality
    num_chunks_decoded: int = 0
    num_bytes_decoded: int = 0
    num_opens: int = 0


class CostReport(Struct, frozen=True):
    """The estimates of all orders, and the recommended one in a sentence."""

    estimates: Sequence[Estimate]
    recommendation: str
    num_bytes_served: int


class _Averages(Struct, frozen=True):
    """The average samples and blocks of a dataset.

    Attributes:
        num_samples: N.
        num_blocks: of the dataset.
        sample_requests: requests for a sample.
        sample_bytes: bytes that these requests read.
        served_bytes: bytes of a sample that are served.
        block_bytes: bytes of a block.
    """

    num_samples: int
    num_blocks: int
    sample_requests: float
    sample_bytes: float
    served_bytes: float
    block_bytes: float

    @property
    def data_bytes(self) -> float:
        """The bytes of all blocks together."""
        return self.num_blocks * self.block_bytes


def estimate_costs(index: SampleIndex, query: CostQuery) -> CostReport:
    """The cost of each order on a dataset, for samples of any kind.

    Where samples are rows of chunks, a batch decodes each chunk that it touches once, unless the
    cache has it.

    Raises:
        InvalidRequest: the order does not fit the dataset; see `BatchPlanner`.
    """
    full = replace(query.order, mode="full", io_block_bytes=0, window_blocks=0)
    qualities = [expected_quality(planner_for(each, index)) for each in (full, query.order)]
    if chunks := chunks_of(index):
        return _estimate_chunk_costs(index, chunks, query, qualities)
    return _estimate_range_costs(index, query, qualities)


def _estimate_range_costs(
    index: SampleIndex, query: CostQuery, qualities: Sequence[ShuffleQuality]
) -> CostReport:
    """The cost where samples are byte ranges; with the qualities of `full` and `block`."""
    order, epochs = query.order, query.num_epochs
    full_quality, block_quality = qualities
    averages = _average(index, order.io_block_bytes)
    cache = _average(index, query.cache_block_bytes)
    served = averages.num_samples * averages.served_bytes * epochs

    sample_requests = epochs * averages.num_samples * averages.sample_requests
    sample_bytes = epochs * averages.num_samples * averages.sample_bytes
    held = min(1.0, query.cache_bytes / max(cache.data_bytes, 1)) if query.cache_bytes else 1.0
    block_requests, cached_requests = float(epochs * averages.num_blocks), float(cache.num_blocks)
    if query.is_by_file:
        block_requests, cached_requests = sample_requests, sample_requests / epochs
    window_blocks = min(order.window_blocks + 2, averages.num_blocks)
    held_bytes, window_bytes = held * cache.data_bytes, window_blocks * averages.block_bytes
    of_cached = held * cached_requests + (1 - held) * sample_requests
    rows = [
        ("full", sample_requests, sample_bytes, 0, full_quality),
        ("block", block_requests, epochs * averages.data_bytes, window_bytes, block_quality),
        (_CACHED, of_cached, held_bytes + (1 - held) * sample_bytes, held_bytes, full_quality),
    ]
    estimates = [
        Estimate(
            name,
            round(requests),
            round(num_bytes),
            num_bytes / max(served, 1),
            round(memory_bytes),
            quality,
            num_opens=round(requests) if query.opens_files else 0,
        )
        for name, requests, num_bytes, memory_bytes, quality in rows
    ]
    return CostReport(estimates, _recommend(query, averages, estimates, held), round(served))


def _recommend(
    query: CostQuery, averages: _Averages, estimates: Sequence[Estimate], held: float
) -> str:
    full, block, cached = estimates
    samples_per_block = averages.num_samples / averages.num_blocks
    if query.is_local:
        return (
            "Take `full`: the data lies on this machine, where every order costs the same and "
            "nothing shuffles better."
        )
    if query.cache_bytes and held == 1.0:
        return (
            "Take `full` with the cache: it holds all of the data, so each byte is asked for once, "
            "and the shuffle is global."
        )
    if query.is_by_file:
        return (
            "Take `full`: each sample is a file, and takes a request in every order. The cache, or "
            "shards of many samples, would save some."
        )
    if samples_per_block < _MIN_SAMPLES_PER_BLOCK:
        return (
            f"Take `full`: a block of {query.order.io_block_bytes} bytes would bring only "
            f"{samples_per_block:.1f} samples, so the order `block` saves few requests."
        )
    quality = block.quality.worst
    if quality < GOOD_QUALITY:
        return (
            f"Take `full`, or `block` with a wider window than {query.order.window_blocks} blocks: "
            f"this one shuffles only {quality:.2f} as well as a global shuffle."
        )
    fewer = f"{full.num_requests / max(block.num_requests, 1):,.0f} times fewer"
    with_cache = ""
    if not query.cache_bytes and query.num_epochs > 1:
        with_cache = (
            f"; where there are {in_units(cached.memory_bytes)} for a cache, `full` asks for "
            "each byte only once"
        )
    return (
        f"Take `block`: it asks for {fewer} requests than `full`, and shuffles "
        f"{quality:.2f} as well{with_cache}."
    )


def _average(index: SampleIndex, io_block_bytes: int) -> _Averages:
    """Averages over evenly spread samples and blocks."""
    table = index.blocks(io_block_bytes)
    extents = index.locate(_spread(index.num_samples))
    num_requests, num_bytes = _requests(extents)
    ranges = block_ranges(index, table, _spread(table.num_blocks))
    return _Averages(
        num_samples=index.num_samples,
        num_blocks=table.num_blocks,
        sample_requests=float(num_requests.mean()),
        sample_bytes=float(num_bytes.mean()),
        served_bytes=float(extents.size.sum(axis=1).mean()),
        block_bytes=float((ranges.stop - ranges.start).mean()),
    )


def _requests(extents: Extents) -> tuple[Int64Array, Int64Array]:
    """The requests for each sample and the bytes that they read; empty fields need none."""
    by_start = np.argsort(extents.start, axis=1, kind="stable")
    start = np.take_along_axis(extents.start, by_start, axis=1)
    size = np.take_along_axis(extents.size, by_start, axis=1)
    num_requests = (size[:, 0] > 0).astype(np.int64)
    num_bytes, stop = size[:, 0].copy(), start[:, 0] + size[:, 0]
    for field in range(1, start.shape[1]):
        some = size[:, field] > 0
        gap = start[:, field] - stop
        joined = (num_requests > 0) & (gap >= 0) & (gap <= MAX_GAP_BYTES)
        num_requests += some & ~joined
        num_bytes += np.where(some, size[:, field] + np.where(joined, gap, 0), 0)
        stop = np.where(some, start[:, field] + size[:, field], stop)
    return num_requests, num_bytes


def _spread(count: int) -> Int64Array:
    """Some numbers of `[0, count)`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, _NUM_SAMPLED)).astype(np.int64))


def in_units(num_bytes: float) -> str:
    """Returns a size in binary units, as the table of costs has them: "2.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _estimate_chunk_costs(
    index: SampleIndex, chunks: Chunks, query: CostQuery, qualities: Sequence[ShuffleQuality]
) -> CostReport:
    """The cost where samples are rows of chunks; with the qualities of `full` and `block`."""
    full_quality, block_quality = qualities
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

    taken = whole_pages(chunks.chunk_bytes)  # in the cache
    window_bytes, cached_bytes = window * float(taken.mean()), float(taken.sum())
    of_full, in_window = num_batches * touched(num_chunks), held(window_bytes)
    in_cache = held(cached_bytes)
    of_block = in_window * epochs * num_chunks + (1 - in_window) * num_batches * touched(window)
    of_cached = in_cache * num_chunks + (1 - in_cache) * of_full
    rows = [
        ("full", of_full, 0, full_quality),
        ("block", of_block, window_bytes, block_quality),
        (_CACHED, of_cached, in_cache * cached_bytes, full_quality),
    ]
    estimates = [
        Estimate(
            name,
            round(num_decoded * requests),
            round(num_decoded * stored),
            num_decoded * decoded / max(epochs * data_bytes, 1),
            round(memory_bytes),
            quality,
            round(num_decoded),
            round(num_decoded * decoded),
        )
        for name, num_decoded, memory_bytes, quality in rows
    ]
    advice = _recommend_of_chunks(chunks.noun, query, estimates, in_window, cached_bytes)
    return CostReport(estimates, advice, round(epochs * data_bytes))


def _recommend_of_chunks(
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
