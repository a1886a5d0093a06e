"""Every factorisation of 1 to 8 ranks into a mesh reads the global batches of one process.

The dims are those of data, context, tensor, pipeline and expert parallelism. Experts lie inside the
data dims, or are peers. At each change of the mesh, a planner is made of the cursor's bytes alone.
"""

import itertools
import warnings
from math import prod

import numpy as np
import pytest
from gyre_client.loader.ranks import Ranks, ranks_at
from gyre_daemon.order.balance import Balance, BucketRule, CostRule
from gyre_daemon.order.cursor import Cursor, decode_cursor
from gyre_daemon.order.planner import BatchPlanner, Order
from hypothesis import given, settings
from hypothesis import strategies as st

DIMS = ("pp", "dp", "ep", "cp", "tp")
MESHES = [sizes for sizes in itertools.product(range(1, 9), repeat=len(DIMS)) if prod(sizes) <= 8]
DATA_DIMS = [("dp",), ("dp", "ep")]
G, N, NUM_STEPS = 840, 5003, 16  # any number of ranks from 1 to 8 divides G
LENGTHS = np.random.default_rng(3).lognormal(4, 1, N).astype(np.int64) + 1
CORRUPT = np.array([17, 18, 2001, N - 1])
ORDERS = {
    "balanced": Order("full", "wrap", 5, G, skipped=((3, 5),)),
    "sorted by length": Order("full", "drop", 5, G, bucket=BucketRule("tokens", 2)),
}


def planner(name: str, order: Order) -> BatchPlanner:
    balance = Balance(CostRule(1.0, 0.5).cost(LENGTHS).take) if name == "balanced" else None
    lengths_of = LENGTHS.take if order.bucket else None
    return BatchPlanner(order, N, None, CORRUPT, (), balance, lengths_of)


def ranks_in(sizes: tuple[int, ...], data_dims: tuple[str, ...]) -> list[Ranks]:
    """Those of all processes of a mesh."""
    named, places = dict(zip(DIMS, sizes, strict=True)), itertools.product(*map(range, sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts may be left out
        return [
            ranks_at(
                named, dict(zip(DIMS, place, strict=True)), data_dims, "cp", number, prod(sizes)
            )
            for number, place in enumerate(places)
        ]


@pytest.mark.parametrize("data_dims", DATA_DIMS)
def test_every_mesh_has_its_data_ranks_and_tells_all_peers_apart(
    data_dims: tuple[str, ...],
) -> None:
    for sizes in MESHES:
        its = ranks_in(sizes, data_dims)
        num_data = prod(size for size, dim in zip(sizes, DIMS, strict=True) if dim in data_dims)
        assert {each.world_size for each in its} == {num_data}
        assert sorted(each.rank for each in its) == sorted(
            [*range(num_data)] * (len(its) // num_data)
        )
        assert len({(each.rank, each.peer) for each in its}) == len(its)
        for rank in range(num_data):
            cuts = [(each.cp_rank, each.cp_size) for each in its if each.rank == rank]
            assert set(cuts) == {(cp_rank, sizes[3]) for cp_rank in range(sizes[3])}


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(MESHES), st.sampled_from(DATA_DIMS), st.integers(1, 4)),
        max_size=4,
    )
)
def test_global_batches_are_the_same_on_any_meshes(
    name: str, segments: list[tuple[tuple[int, ...], tuple[str, ...], int]]
) -> None:
    start = Cursor("f", ORDERS[name], 0)
    whole = planner(name, start.order).batches(0, NUM_STEPS, 0, 1).sample_ids
    data, batch = start.encode(), 0
    for sizes, data_dims, num in segments:
        cursor = decode_cursor(data)
        assert batch == cursor.order.batch_of(cursor.position // G)
        its = planner(name, cursor.order)
        ranks = {(each.rank, each.world_size) for each in ranks_in(sizes, data_dims)}
        parts = [its.batches(batch, num, *each).sample_ids for each in sorted(ranks)]
        found = np.concatenate(parts, axis=1)
        expected = whole[batch : batch + num]
        if name == "balanced":  # which rank reads which of them changes
            found, expected = np.sort(found, axis=1), np.sort(expected, axis=1)
        assert (found == expected).all()
        batch += num
        data = cursor.encoder().encode(cursor.order.position_behind(batch - 1))
