"""Which samples make a batch, against the definition spelled out position by position."""

from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.mixture import check_ranks
from gyre_daemon.order.permutation import MAX_SAMPLES, Permutation, epoch_key
from gyre_daemon.order.planner import BatchPlanner, Order, Tail
from gyre_daemon.order.steps import EpochOrder
from hypothesis import given
from hypothesis import strategies as st

TAILS: tuple[Tail, ...] = ("wrap", "drop", "pad")

seeds = st.integers(0, 2**64 - 1)
tails = st.sampled_from(TAILS)
sizes = st.integers(1, 40)


def by_definition(order: Order, num_samples: int, step: int) -> tuple[list[int], list[bool]]:
    """Sample ids and mask of a global step."""
    size = order.global_batch_size
    lengths = {
        "wrap": num_samples,
        "drop": num_samples - num_samples % size,
        "pad": num_samples + -num_samples % size,
    }
    length = lengths[order.tail]
    ids, mask = [], []
    for position in range(step * size, (step + 1) * size):
        epoch, place = divmod(position, length)
        permutation = Permutation(epoch_key(order.seed, epoch), num_samples)
        ids.append(int(permutation(np.array([place % num_samples]))[0]))
        mask.append(place < num_samples)
    return ids, mask


def world_sizes(size: int) -> list[int]:
    return [divisor for divisor in range(1, min(size, 40) + 1) if size % divisor == 0]


def usable(tail: Tail, num_samples: int, size: int) -> bool:
    return tail != "drop" or size <= num_samples


@given(tails, seeds, sizes, sizes, st.integers(0, 50))
def test_a_step_is_what_its_definition_says(
    tail: Tail, seed: int, num_samples: int, size: int, step: int
) -> None:
    if not usable(tail, num_samples, size):
        return
    order = Order("full", tail, seed, size)
    batch = BatchPlanner(order, num_samples).batch(step)
    ids, mask = by_definition(order, num_samples, step)
    assert batch.sample_ids.tolist() == ids
    assert batch.sample_ids.dtype == np.int64
    assert (batch.mask is None) == (tail != "pad")
    assert batch.mask is None or batch.mask.tolist() == mask
    assert batch.step == step


@given(tails, seeds, sizes, sizes, st.integers(0, 50))
def test_every_world_size_reads_the_same_global_batches(
    tail: Tail, seed: int, num_samples: int, size: int, step: int
) -> None:
    if not usable(tail, num_samples, size):
        return
    order = Order("full", tail, seed, size)
    whole = BatchPlanner(order, num_samples).batch(step)
    for world_size in world_sizes(size):
        plans = [BatchPlanner(order, num_samples) for _ in range(world_size)]  # one daemon each
        parts = [plans[rank].batch(step, rank, world_size) for rank in range(world_size)]
        assert {len(part.sample_ids) for part in parts} == {size // world_size}
        assert (
            np.concatenate([part.sample_ids for part in parts]).tolist()
            == whole.sample_ids.tolist()
        )
        assert {part.epoch for part in parts} == {whole.epoch}, (
            "an epoch is the global batch's, not the rank's"
        )
        if whole.mask is not None:
            assert (
                np.concatenate([_mask(part.mask) for part in parts]).tolist() == whole.mask.tolist()
            )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("num_samples", "size"),
    [
        (24, 6),
        (25, 6),
        (29, 6),
        (6, 6),
        (7, 6),
        (5, 6),
        (1, 6),
        (1, 1),
        (4097, 1022),
        (10_000, 1000),
    ],
)
def test_ranks_share_an_epoch_out_once(tail: Tail, num_samples: int, size: int) -> None:
    if not usable(tail, num_samples, size):
        with pytest.raises(InvalidRequest, match="no whole batch"):
            BatchPlanner(Order("full", tail, 3, size), num_samples)
        return
    for world_size in world_sizes(size):
        plan = BatchPlanner(Order("full", tail, 3, size), num_samples)
        num_steps = -(-num_samples // size) if tail != "drop" else num_samples // size
        ranks = [
            [plan.batch(step, rank, world_size) for step in range(num_steps)]
            for rank in range(world_size)
        ]
        # positions in order: step by step, rank by rank
        ids = np.concatenate(
            [
                ranks[rank][step].sample_ids
                for step in range(num_steps)
                for rank in range(world_size)
            ]
        )
        if tail == "pad":
            mask = np.concatenate(
                [
                    _mask(ranks[rank][step].mask)
                    for step in range(num_steps)
                    for rank in range(world_size)
                ]
            )
            assert sorted(ids[mask]) == list(range(num_samples))
            assert (~mask).sum() == -num_samples % size
        elif tail == "wrap":
            assert sorted(ids[:num_samples]) == list(range(num_samples)), (
                "the rest belongs to the next epoch"
            )
        else:
            assert len(set(ids.tolist())) == len(ids) == num_samples // size * size


def test_wrapping_loses_nothing_between_epochs() -> None:
    """Three epochs of 7 in batches of 4.

    Each sample three times, each epoch's positions one permutation.
    """
    plan = BatchPlanner(Order("full", "wrap", 1, 4), 7)
    stream = np.concatenate([plan.batch(step).sample_ids for step in range(6)])[:21]
    for epoch in range(3):
        assert sorted(stream[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert [plan.batch(step).epoch for step in range(6)] == [0, 0, 1, 1, 2, 2]


def test_steps_may_be_planned_in_any_order() -> None:
    order, num_samples = Order("full", "wrap", 8, 64), 50
    plan = BatchPlanner(order, num_samples)
    forward = [plan.batch(step).sample_ids.tolist() for step in range(40)]
    for step in (39, 0, 20, 1, 39, 38, 5):
        assert plan.batch(step).sample_ids.tolist() == forward[step]
    assert plan._epochs.cache_info().currsize <= 3, "memory does not grow with the epochs"


def test_each_epoch_s_order_is_made_once_by_a_job_that_plans_an_epoch_ahead() -> None:
    """It needs three at a time.

    That of the samples that are read now, that of their next use, and that of what is planned.
    """
    plan, made = BatchPlanner(Order("full", "wrap", 8, 16), 100), list[int]()
    make = plan._make_epoch_order

    def counted(epoch: int) -> EpochOrder:
        made.append(epoch)
        return make(epoch)

    plan._epochs = lru_cache(plan._epochs.cache_parameters()["maxsize"])(counted)
    plan._uses._epochs = plan._epochs
    num_planned = 0
    for step in range(120):
        while num_planned <= step + 6:
            plan.batches(num_planned, 2, 0, 1)
            num_planned += 2
        plan.next_use(np.arange(0, 100, 7), step * 16)
    assert made == list(range(21))


@given(tails, sizes, sizes, st.integers(0, 2**40), st.integers(1, 12), st.data())
def test_many_steps_at_once_are_the_same_steps(
    tail: Tail, num_samples: int, size: int, first: int, num_steps: int, data: st.DataObject
) -> None:
    if not usable(tail, num_samples, size):
        return
    world_size = data.draw(st.sampled_from(world_sizes(size)))
    rank = data.draw(st.integers(0, world_size - 1))
    plan, order = (
        BatchPlanner(Order("full", tail, 5, size), num_samples),
        Order("full", tail, 5, size),
    )
    together = plan.batches(first, num_steps, rank, world_size)
    assert [batch.step for batch in together] == list(range(first, first + num_steps))
    for batch in together:
        alone = BatchPlanner(order, num_samples).batch(batch.step, rank, world_size)
        assert batch.sample_ids.tolist() == alone.sample_ids.tolist()
        assert batch.epoch == alone.epoch
        assert (batch.mask is None) == (alone.mask is None)
        assert batch.mask is None or batch.mask.tolist() == _mask(alone.mask).tolist()


@given(tails, sizes, sizes, st.integers(1, 5))
def test_the_number_of_steps_that_begin_in_some_epochs(
    tail: Tail, num_samples: int, size: int, num_epochs: int
) -> None:
    if not usable(tail, num_samples, size):
        return
    plan = BatchPlanner(Order("full", tail, 0, size), num_samples)
    expected = {
        "wrap": -(-num_epochs * num_samples // size),
        "drop": num_epochs * (num_samples // size),
        "pad": num_epochs * -(-num_samples // size),
    }
    assert plan.num_steps(num_epochs) == expected[tail]


def test_the_far_end_of_the_positions() -> None:
    plan = BatchPlanner(Order("full", "wrap", 2**64 - 1, 1 << 10), MAX_SAMPLES)
    last = plan.batch((1 << 62) // (1 << 10) - 1)
    assert len(set(last.sample_ids.tolist())) == 1 << 10
    assert last.epoch == 0
    tiny = BatchPlanner(Order("full", "wrap", 0, 1), 1)
    assert tiny.batch((1 << 63) - 1).sample_ids.tolist() == [0]


@pytest.mark.parametrize(
    ("num_samples", "size", "sentence"),
    [
        (0, 1, "has 0"),
        (-1, 1, "1 to 2"),
        (MAX_SAMPLES + 1, 1, "1 to 2"),
        (10, 0, "global batch size must be 1 to 2"),
        (10, -4, "but is -4"),
        (10, (1 << 32) + 1, "global batch size"),
        (3, 3 * 4096 + 1, "more than 4096 times"),
    ],
)
def test_orders_that_make_no_sense(num_samples: int, size: int, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        BatchPlanner(Order("full", "wrap", 0, size), num_samples)


def test_a_batch_of_many_epochs() -> None:
    ids = BatchPlanner(Order("full", "wrap", 0, 4096), 1).batch(3).sample_ids
    assert ids.tolist() == [0] * 4096


@given(st.integers(-2, 20), st.integers(-2, 20), st.integers(1, 60))
def test_ranks_that_do_not_divide_the_batch_are_refused(
    rank: int, world_size: int, size: int
) -> None:
    order = Order("full", "wrap", 0, size)
    if world_size >= 1 and 0 <= rank < world_size and gcd(size, world_size) == world_size:
        check_ranks(order, rank, world_size)
    else:
        with pytest.raises(InvalidRequest, match=r"does not exist|not divisible"):
            check_ranks(order, rank, world_size)


def _mask(mask: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
    assert mask is not None
    return mask
