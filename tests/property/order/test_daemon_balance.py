"""Balance: global batches keep their samples, and the parts of ranks cost about the same."""

import tracemalloc
from functools import cache

import numpy as np
import pytest
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.fetching import prefetch
from gyre_daemon.order import balance as balance_module
from gyre_daemon.order import planner as planner_module
from gyre_daemon.order.balance import Balance, CostRule
from gyre_daemon.order.planner import NO_SAMPLES, BatchPlanner, Order, Tail
from gyre_daemon.order.sequences import PackRule, Sequences, pack_documents
from hypothesis import given
from hypothesis import strategies as st

RULE = CostRule(6 * 2048, 1)


@cache
def web_text(length: int) -> Sequences:
    """Documents of log-normal lengths, mean 900 tokens, packed into sequences of one length."""
    lengths = np.random.default_rng(0).lognormal(6.2, 1.1, 150_000).astype(np.int64) + 1
    rule = PackRule(length, "split")
    return pack_documents(len(lengths), lambda documents: lengths[documents], rule, NO_SAMPLES)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=60),
    st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 8), (24, 4)]),
    st.sampled_from(["wrap", "pad"]),
    st.integers(0, 99),
)
def test_only_who_reads_a_sample_changes(
    lengths: list[int], ranks: tuple[int, int], tail: Tail, seed: int
) -> None:
    size, world_size = ranks
    costs, order = RULE.cost(np.array(lengths)), Order("full", tail, seed, size)
    corrupt = np.array([0], np.int64) if len(lengths) > 1 else NO_SAMPLES
    plain = BatchPlanner(order, len(lengths), corrupt=corrupt)
    balanced = BatchPlanner(order, len(lengths), corrupt=corrupt, balance=Balance(costs.take))
    assert balanced.batches(3, 0, 0, world_size).sample_ids.shape == (0, size // world_size)
    for step in (0, 3):
        whole, epochs = plain.batches(step, 4, 0, 1), plain.epochs(step, 4, 0, 1)
        parts = [balanced.batches(step, 4, rank, world_size) for rank in range(world_size)]
        its = [balanced.epochs(step, 4, rank, world_size) for rank in range(world_size)]
        for row in range(4):
            expected = list(zip(whole.sample_ids[row], epochs[row], strict=True))
            found = [
                pair
                for part, epoch in zip(parts, its, strict=True)
                for pair in zip(part.sample_ids[row], epoch[row], strict=True)
            ]
            assert sorted(found) == sorted(expected)
        assert sum(part.num_substitutes for part in parts) == whole.num_substitutes


def test_packed_web_text_is_balanced_within_two_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(6.2, 1.1, 20_000).astype(np.int64) + 1
    packed = pack_documents(
        len(lengths), lambda documents: lengths[documents], PackRule(4096, "split"), NO_SAMPLES
    )
    costs = np.add.reduceat(RULE.cost(packed.lengths.astype(np.int64)), packed.bounds[:-1])
    balance = Balance(costs.take)
    planner = BatchPlanner(Order("full", "drop", 1, 64), packed.num_samples)
    for step in range(40):
        ids = planner.batch(step).sample_ids
        parts = costs[ids].reshape(8, -1).sum(axis=1)
        assert balance.spread(ids, 8) <= min(0.02, parts.max() / parts.mean() - 1)


@pytest.mark.parametrize(
    ("length", "linear", "size", "world_size"),
    [
        (2048, 12288, 64, 8),
        (8192, 12288, 64, 8),
        (8192, 12288, 256, 64),
        (8192, 0, 64, 8),
        (8192, 0, 256, 64),
    ],
)
def test_packed_web_text_is_full_and_even(
    length: int, linear: float, size: int, world_size: int
) -> None:
    packed, rule = web_text(length), CostRule(linear, 1)
    assert packed.num_tokens >= 0.98 * packed.num_samples * length
    costs = np.add.reduceat(rule.cost(packed.lengths.astype(np.int64)), packed.bounds[:-1])
    balance, plain, spreads = Balance(costs.take), [], []
    planner = BatchPlanner(Order("full", "drop", 1, size), packed.num_samples)
    for step in range(50):
        ids = planner.batch(step).sample_ids
        parts = costs[ids].reshape(world_size, -1).sum(axis=1)
        plain.append(parts.max() / parts.mean() - 1)
        spreads.append(balance.spread(ids, world_size))
    assert np.mean(spreads) <= 0.02 < np.mean(plain)


def test_a_rank_that_the_cheapest_cannot_relieve_exchanges_with_another() -> None:
    # exchanges with the cheapest rank alone leave one rank with 27
    costs = np.array([14.0, 12, 12, 9, 9, 8, 7, 3, 1])
    balance = Balance(costs.take)
    parts = [balance.arrangement(np.arange(9)[None], rank, 3)[0] for rank in range(3)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(9))
    assert [costs[part].sum() for part in parts] == [25, 25, 25]


def test_one_costly_sample_leaves_its_rank_the_cheapest_others() -> None:
    balance = Balance(np.array([100.0, 1, 2, 3, 4, 5]).take)
    parts = [balance.arrangement(np.arange(6)[None], rank, 2)[0].tolist() for rank in range(2)]
    assert sorted(parts) == [[0, 1, 2], [3, 4, 5]]


@given(
    st.sampled_from([(2, 600, 2), (1, 1200, 4), (3, 512, 2)]),
    st.sampled_from([8, 300, 1 << 20]),
    st.integers(0, 99),
)
def test_many_samples_are_exchanged_as_few_are(
    shape: tuple[int, int, int], most: int, seed: int
) -> None:
    """Beyond some samples per rank not all pairs are compared, and the same exchange is found."""
    num_steps, size, world_size = shape
    costs = np.random.default_rng(seed).integers(0, most, (num_steps, size)).astype(np.float64)
    dealt = np.sort(costs.reshape(num_steps, world_size, -1), axis=1)
    dear, cheap = dealt[:, -1], dealt[:, 0]
    gap = dear.sum(axis=1) - cheap.sum(axis=1)
    found = balance_module._best_exchange(dear, cheap, gap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance_module, "_MAX_COMPARED", size)
        expected = balance_module._best_exchange(dear, cheap, gap)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_the_memory_of_an_exchange_grows_with_the_samples_alone() -> None:
    costs = np.random.default_rng(0).integers(1, 5000, 60_000).astype(np.float64)
    tracemalloc.start()
    try:
        spread = Balance(costs.take).spread(np.arange(len(costs)), 2)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spread < 0.001
    assert peak_bytes < 200 * len(costs), "all pairs of 30,000 samples would take 7 GB"


def test_parts_of_steps_that_are_planned_apart_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = RULE.cost(np.arange(1, 101))
    order = Order("full", "wrap", 3, 12)

    def planned() -> tuple[list[list[int]], list[list[int]]]:
        planner = BatchPlanner(order, len(costs), balance=Balance(costs.take))
        return planner.batches(2, 11, 1, 3).sample_ids.tolist(), planner.epochs(
            2, 11, 1, 3
        ).tolist()

    together = planned()
    monkeypatch.setattr(planner_module, "_LOOKED_AT_ONCE", 25)
    assert planned() == together


def test_what_takes_long_to_share_out_is_not_planned_on_the_event_loop() -> None:
    """`cost_of` decides; a step of 16,384 samples took a second there."""
    num_samples, order = 100_000, Order("full", "wrap", 3, 1 << 14)
    balance = Balance(RULE.cost(np.arange(num_samples)).take)
    plain = BatchPlanner(order, num_samples)
    balanced = BatchPlanner(order, num_samples, balance=balance)
    assert balanced.cost_of(1, 64) > prefetch._MAX_COST_ON_LOOP
    assert balanced.cost_of(1, 64) > 30 * plain.cost_of(1, 1)


@pytest.mark.parametrize(("size", "world_size"), [((1 << 17) + 1, 1), (1 << 17, 1 << 15)])
def test_what_takes_too_long_to_share_out_is_refused(size: int, world_size: int) -> None:
    CostRule(1, 0).check(1 << 17, 1 << 14)
    with pytest.raises(InvalidRequest, match="`balance` shares out at most"):
        CostRule(1, 0).check(size, world_size)


@pytest.mark.parametrize("factors", [(0, 0), (-1, 2), (1, float("nan")), (float("inf"), 0)])
def test_factors_that_are_no_cost_are_refused(factors: tuple[float, float]) -> None:
    with pytest.raises(InvalidRequest, match="must be numbers of at least 0"):
        CostRule(*factors)
