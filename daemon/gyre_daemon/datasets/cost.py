"""What reading a dataset costs in each order: requests, bytes, memory, money and shuffle quality. Pure, and no sample is read.

Whatever depends on single samples or blocks is estimated from a few thousand of them, spread evenly over the dataset, so that a
billion samples take no longer than a million. Requests follow the rules of remote storage: the fields of a sample come with one
request where they lie close together, and a block comes with one. The cache takes whole blocks of its own while it has room,
and evicts none; what it has no room for is read sample by sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_daemon.datasets.dataset import block_ranges
from gyre_daemon.datasets.formats import Extents, SampleIndex
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.plan import Order, plan_of
from gyre_daemon.order.quality import ShuffleQuality, expected_quality
from gyre_daemon.storage.base import MAX_GAP_BYTES

GOOD_QUALITY = 0.95

_NUM_LOOKED_AT = 4096
_WORTH_WHILE = 4  # samples of a block, below which its one request saves little


@dataclass(frozen=True, slots=True)
class Prices:
    """In any currency; None: not known, and no money is reckoned.

    Attributes:
        per_1000_requests: what a storage asks for a thousand GET requests.
        per_gb: for 10**9 bytes that leave it.
    """

    per_1000_requests: float | None = None
    per_gb: float | None = None

    def of(self, num_requests: int, num_bytes: int) -> float | None:
        """What so much reading costs."""
        if self.per_1000_requests is None and self.per_gb is None:
            return None
        return num_requests / 1e3 * (self.per_1000_requests or 0.0) + num_bytes / 1e9 * (self.per_gb or 0.0)


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be estimated.

    Attributes:
        order: of mode `block`, with seed, G, blocks and window; `full` takes seed and G of it.
        num_epochs: how often the data is gone through.
        cache_bytes: of the node; 0 for a cache as large as the data.
        cache_block_bytes: about how large the cache's blocks are.
        prices: of the storage.
        is_local: the data lies on this machine and has no prices, so that a request costs next to nothing.
    """

    order: Order
    num_epochs: int
    cache_bytes: int
    cache_block_bytes: int
    prices: Prices
    is_local: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """One order's.

    Attributes:
        order: its name.
        num_requests: in all epochs.
        num_bytes: read in all epochs.
        amplification: bytes read for each byte that is served.
        memory_bytes: beside the prefetch window, which all orders need.
        quality: of the shuffle.
        money: where prices are known.
    """

    order: str
    num_requests: int
    num_bytes: int
    amplification: float
    memory_bytes: int
    quality: ShuffleQuality
    money: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """All orders' estimates, and which one to take."""

    estimates: Sequence[Estimate]
    recommendation: str
    num_bytes_served: int


@dataclass(frozen=True, slots=True)
class _Averages:
    """Of a dataset: what a sample and a block take."""

    num_samples: int
    num_blocks: int
    sample_requests: float
    sample_bytes: float  # that its requests bring
    served_bytes: float
    block_bytes: float

    @property
    def data_bytes(self) -> float:
        """Of all blocks together."""
        return self.num_blocks * self.block_bytes


def estimate_costs(index: SampleIndex, question: Question) -> Report:
    """What each order costs on a dataset.

    Raises:
        InvalidRequest: the order cannot go through the dataset; see `Plan`.
    """
    order, epochs = question.order, question.num_epochs
    averages = _look_at(index, order.io_block_bytes)
    cached = _look_at(index, question.cache_block_bytes)
    full = expected_quality(plan_of(replace(order, mode="full", io_block_bytes=0, window_blocks=0), index))
    block = expected_quality(plan_of(order, index))
    served = averages.num_samples * averages.served_bytes * epochs

    def estimate(name: str, num_requests: float, num_bytes: float, memory_bytes: float, quality: ShuffleQuality) -> Estimate:
        requests, read = round(num_requests), round(num_bytes)
        return Estimate(
            name,
            requests,
            read,
            num_bytes / max(served, 1),
            round(memory_bytes),
            quality,
            question.prices.of(requests, read),
        )

    one_by_one = averages.num_samples * averages.sample_requests, averages.num_samples * averages.sample_bytes
    held = min(1.0, question.cache_bytes / max(cached.data_bytes, 1)) if question.cache_bytes else 1.0
    window_blocks = min(order.window_blocks + 2, averages.num_blocks)
    estimates = [
        estimate("full", epochs * one_by_one[0], epochs * one_by_one[1], 0, full),
        estimate(
            "block",
            epochs * averages.num_blocks,
            epochs * averages.data_bytes,
            window_blocks * averages.block_bytes,
            block,
        ),
        estimate(
            "full with the cache",
            held * cached.num_blocks + (1 - held) * epochs * one_by_one[0],
            held * cached.data_bytes + (1 - held) * epochs * one_by_one[1],
            held * cached.data_bytes,
            full,
        ),
    ]
    return Report(estimates, _recommend(question, averages, estimates, held), round(served))


def _recommend(question: Question, averages: _Averages, estimates: Sequence[Estimate], held: float) -> str:
    full, block, cached = estimates
    samples_per_block = averages.num_samples / averages.num_blocks
    if question.is_local:
        return "Take `full`: the data lies on this machine, where every order costs the same and nothing shuffles better."
    if question.cache_bytes and held == 1.0:
        return (
            "Take `full` with the cache: it holds all of the data, so each byte is asked for once, and the shuffle is global."
        )
    if samples_per_block < _WORTH_WHILE:
        return (
            f"Take `full`: a block of {question.order.io_block_bytes} bytes would bring only {samples_per_block:.1f} samples, "
            "so the order `block` saves few requests."
        )
    if block.quality.worst < GOOD_QUALITY:
        return (
            f"Take `full`, or `block` with a wider window than {question.order.window_blocks} blocks: this one shuffles only "
            f"{block.quality.worst:.2f} as well as a global shuffle."
        )
    fewer = f"{full.num_requests / max(block.num_requests, 1):,.0f} times fewer"
    return (
        f"Take `block`: it asks for {fewer} requests than `full`{_saved(full, block)}, and shuffles {block.quality.worst:.2f} "
        f"as well{_would_spare(question, cached)}."
    )


def _saved(full: Estimate, block: Estimate) -> str:
    if full.money is None or block.money is None or block.money > full.money:
        return ""
    return f", saves {full.money - block.money:,.2f} of {full.money:,.2f}"


def _would_spare(question: Question, cached: Estimate) -> str:
    if question.cache_bytes or question.num_epochs == 1:
        return ""
    return f"; where there are {cached.memory_bytes / 1e9:,.1f} GB for a cache, `full` asks for each byte only once"


def _look_at(index: SampleIndex, io_block_bytes: int) -> _Averages:
    """The averages, from evenly spread samples and blocks."""
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
    """How many requests each sample takes, and the bytes that they bring; empty fields take none."""
    by_start = np.argsort(extents.start, axis=1, kind="stable")
    start, size = (np.take_along_axis(part, by_start, axis=1) for part in (extents.start, extents.size))
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
    """Some of `[0, count)`, evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, _NUM_LOOKED_AT)).astype(np.int64))
