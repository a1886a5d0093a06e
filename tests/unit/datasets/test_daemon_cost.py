"""What each order costs, compared with figures that are easy to compute by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
from gyre_daemon.datasets.cost import (
    CostQuery,
    Estimate,
    estimate_costs,
    in_units,
)
from gyre_daemon.datasets.formats import Extents, FieldSpec, SampleIndex
from gyre_daemon.order.permutation import BlockTable, blocks_of_unequal_samples
from gyre_daemon.order.planner import Order
from gyre_daemon.storage.shard import Shard

from tests.shard_formats import shard_format

MIB = 1 << 20


def tokens(num_samples: int) -> SampleIndex:
    """Samples of 2 KiB in one shard."""
    tokens_format = shard_format("tokens", dtype="uint16", sequence_length=1024)
    return tokens_format.assemble([Shard("a", num_samples * 2048, "1")], [])


class Members:
    """Samples of two members each: 100 bytes, then after a gap 5000."""

    fields = (FieldSpec("a", np.dtype("u1"), (), ragged=True, codec="bytes"),) * 2

    def __init__(self, num_samples: int, gap: int) -> None:
        self.num_samples = num_samples
        self._gap = gap

    def locate(self, sample_ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Extents:
        first = sample_ids[:, None] * (5100 + 2 * self._gap)
        # columns are in no order of place
        size = np.tile(np.array([5000, 100]), (len(sample_ids), 1))
        return Extents(np.zeros_like(sample_ids), first + np.array([100 + self._gap, 0]), size)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        everyone = np.arange(self.num_samples)
        extents = self.locate(everyone)
        stop = (extents.start + extents.size).max(axis=1)
        return blocks_of_unequal_samples(
            extents.shard, extents.start.min(axis=1), stop, io_block_bytes
        )

    def max_ragged_bytes(self, num_samples: int) -> int:
        return 5100 * num_samples

    def digest(self) -> bytes:
        return b""


def question(
    io_block: int = MIB,
    epochs: int = 1,
    cache: int = 0,
    *,
    window: int = 1024,
    cache_block: int = MIB,
    local: bool = False,
) -> CostQuery:
    return CostQuery(
        Order("block", "wrap", 1, 256, io_block, window),
        epochs,
        cache,
        cache_block,
        local,
    )


def by_name(estimates: Sequence[Estimate]) -> dict[str, Estimate]:
    return {each.order: each for each in estimates}


def test_samples_of_one_size() -> None:
    """400 MiB: 204,800 samples, 400 blocks of 1 MiB."""
    report = estimate_costs(tokens(204_800), question(epochs=3))
    of = by_name(report.estimates)
    assert list(of) == ["full", "block", "full with the cache"]
    assert [each.num_requests for each in report.estimates] == [3 * 204_800, 3 * 400, 400]
    assert [each.num_bytes for each in report.estimates] == [1200 * MIB, 1200 * MIB, 400 * MIB]
    assert report.num_bytes_served == 1200 * MIB
    assert [each.amplification for each in report.estimates] == pytest.approx([1, 1, 1 / 3])
    assert [each.memory_bytes for each in report.estimates] == [0, 400 * MIB, 400 * MIB], (
        "no more than the data"
    )
    assert all(each.quality.worst > 0.95 for each in report.estimates)


def test_a_wide_dataset_takes_the_memory_of_its_window() -> None:
    of = by_name(estimate_costs(tokens(10**7), question(window=256)).estimates)
    assert of["block"].memory_bytes == pytest.approx(258 * MIB, rel=0.01)


def test_a_cache_of_half_the_data() -> None:
    """It holds 200 of 400 blocks for ever.

    The other half is asked for sample by sample in each of four epochs.
    """
    of = by_name(estimate_costs(tokens(204_800), question(epochs=4, cache=200 * MIB)).estimates)
    assert of["full with the cache"].num_requests == 200 + 4 * 102_400
    assert of["full with the cache"].num_bytes == 200 * MIB + 4 * 200 * MIB
    assert of["full with the cache"].memory_bytes == 200 * MIB


def test_the_cache_has_blocks_of_its_own() -> None:
    of = by_name(estimate_costs(tokens(204_800), question(cache_block=256 << 10)).estimates)
    assert of["full with the cache"].num_requests == 1600
    assert of["block"].num_requests == 400


@pytest.mark.parametrize(
    ("gap", "requests", "num_bytes"), [(1000, 1, 6100), (4096, 1, 9196), (4097, 2, 5100)]
)
def test_fields_that_lie_close_together_come_with_one_request(
    gap: int, requests: int, num_bytes: int
) -> None:
    report = estimate_costs(Members(5000, gap), question())
    full = by_name(report.estimates)["full"]
    assert full.num_requests == requests * 5000
    assert full.num_bytes == num_bytes * 5000
    assert full.amplification == pytest.approx(num_bytes / 5100)
    assert report.num_bytes_served == 5100 * 5000
    block = by_name(report.estimates)["block"]
    assert block.num_bytes == pytest.approx((5100 + 2 * gap) * 5000, rel=0.01), (
        "a block brings its gaps along"
    )


def test_a_billion_samples_are_estimated_from_a_few_thousand() -> None:
    of = by_name(estimate_costs(tokens(10**9), question()).estimates)
    assert of["full"].num_requests == 10**9
    assert of["block"].num_requests == round(10**9 / 512)
    assert of["block"].quality.worst > 0.95


@pytest.mark.parametrize(
    ("index", "asked", "words"),
    [
        (tokens(10**6), question(local=True), "Take `full`: the data lies on this machine"),
        (
            tokens(10**6),
            question(),
            "Take `block`: it asks for 512 times fewer requests than `full`, and shuffles",
        ),
        (
            tokens(10**6),
            question(epochs=2),
            "; where there are 1.9 GiB for a cache, `full` asks for each byte only once.",
        ),
        (tokens(10**6), question(cache=1 << 40), "Take `full` with the cache: it holds all"),
        (
            tokens(10**6),
            question(io_block=4096),
            "Take `full`: a block of 4096 bytes would bring only 2.0 samples",
        ),
        (
            tokens(10**6),
            question(window=8),
            "with a wider window than 8 blocks: this one shuffles only 0.0",
        ),
    ],
)
def test_a_recommendation_is_one_sentence_and_says_why(
    index: SampleIndex, asked: CostQuery, words: str
) -> None:
    recommendation = estimate_costs(index, asked).recommendation
    assert words in recommendation
    assert recommendation.endswith(".")
    assert recommendation.count(". ") == 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (5 << 50, "5,120.0 TiB"),
        (2 << 30, "2.0 GiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (2048, "2.0 KiB"),
        (0, "0 B"),
    ],
)
def test_sizes_are_told_in_the_unit_that_shows_them(num_bytes: float, text: str) -> None:
    assert in_units(num_bytes) == text
