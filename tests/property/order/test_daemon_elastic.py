"""All of an order together: ranks come and go, and the global batches stay what they were.

A mixture of packed sources that a filter has thinned out, with corrupt documents, balanced ranks,
steps that are left out and weights that change. Each time the ranks change, or are killed behind
batches that no cursor has, a planner is made of the cursor's bytes alone.
"""

from dataclasses import replace

import numpy as np
from gyre_daemon.datasets.dataset import pack_sources
from gyre_daemon.datasets.filters import apply_filter, numbered
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.order.balance import Balance, CostRule
from gyre_daemon.order.cursor import Cursor, decode_cursor, skipping
from gyre_daemon.order.mixture import MixtureState, check_mixture, planner_for
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.order.sequences import PackRule
from gyre_daemon.order.steps import Phase
from hypothesis import given
from hypothesis import strategies as st

from tests.mixtures import mixture

G, NUM_STEPS = 12, 30
# How many ranks read, how many batches until their state is saved, and how many more until a kill.
RANKS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 9), st.integers(0, 3)), max_size=5
)
TOKENS = FieldSpec("tokens", np.dtype("<i4"), (), ragged=True, codec="ids", token_ids=True)


def filtered(lengths: Int64Array, text: str) -> Int64Array:
    """The documents of one source that a filter leaves, as the daemon finds them in an index."""
    size = lengths[:, None] * TOKENS.element_bytes
    table = SampleTable([TOKENS], [len(size)], np.cumsum(size, axis=0) - size, size, identity=b"")
    index, kept = apply_filter(table, [TOKENS], text)
    assert index.num_samples == len(kept)
    return kept


@given(
    RANKS,
    st.integers(0, 2**32),
    st.lists(st.integers(5, 60), min_size=2, max_size=3),
    st.integers(1, 20),
    st.integers(0, 7),
)
def test_any_ranks_read_the_batches_of_one(
    segments: list[tuple[int, int, int]],
    seed: int,
    sizes: list[int],
    change_at: int,
    least: int,
) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 40, sum(sizes))
    lengths[np.cumsum(sizes) - 1] = 7  # no source is empty
    corrupt = np.sort(generator.choice(sum(sizes) - len(sizes), 3, replace=False))
    corrupt = corrupt[~np.isin(corrupt, np.cumsum(sizes) - 1)]
    sources = np.split(lengths, np.cumsum(sizes)[:-1])
    left = [filtered(its, f"length(tokens) >= {least}") for its in sources]
    sizes = [len(its) for its in left]
    kept = np.concatenate(
        [its + first for its, first in zip(left, np.cumsum([0, *map(len, sources)]), strict=False)]
    )
    lengths, corrupt = lengths[kept], numbered(corrupt, kept)
    assert lengths.min() >= least
    first, second = (
        (Phase(0, tuple(map(int, generator.integers(1, 9, len(sizes)))))) for _ in "ab"
    )
    documents = mixture(sizes, (first,), 32)
    names = tuple(documents.names)
    rule = PackRule(32, "split", seed=seed)
    sequences, mixed = pack_sources(documents, names, lengths.take, rule, corrupt)
    served = mixed.mixture
    assert [source.ordered.num_samples for source in served.sources] == np.diff(
        mixed.bounds
    ).tolist()
    owner = np.searchsorted(np.cumsum(sizes), sequences.documents, side="right")
    assert (
        owner
        == np.repeat(mixed.source_of(np.arange(sequences.num_samples)), np.diff(sequences.bounds))
    ).all()

    cost = CostRule(1.0, 0.5).cost(sequences.lengths.astype(np.int64))
    balance = Balance(np.add.reduceat(cost, sequences.bounds[:-1]).take)
    order = Order("full", "wrap", seed, G)
    state = MixtureState.of(served)
    start = skipping(Cursor("f", order, 0, mixture=state), ((3, 5), (change_at + 5, change_at + 9)))
    later = dict(zip(names, map(float, second.weights), strict=True))
    given = start.mixture and start.mixture.with_weights(later, change_at)
    start = replace(start, mixture=given)

    def planner(cursor: Cursor) -> BatchPlanner:
        assert cursor.mixture
        phases = cursor.mixture.phases
        return planner_for(cursor.order, served, balance=balance, phases=phases)

    def ids(parts: list[Int64Array]) -> list[list[int]]:
        found: list[list[int]] = np.sort(np.concatenate(parts, axis=1), axis=1).tolist()
        return found

    whole = ids([planner(start).batches(0, NUM_STEPS, 0, 1).sample_ids])
    found: list[list[int]] = []
    lost: list[list[int]] = []  # read by those who were killed, behind their last state
    data = start.encode()
    for num_ranks, num, num_lost in [*segments, (1, NUM_STEPS, 0)]:
        cursor = decode_cursor(data)
        check_mixture(cursor.mixture, served, "set")
        batch = cursor.order.batch_of(cursor.position // G)
        assert batch == len(found)
        its = [planner(cursor) for _ in range(num_ranks)]  # one daemon each
        parts = [
            each.batches(batch, num + num_lost, rank, num_ranks) for rank, each in enumerate(its)
        ]
        read = ids([part.sample_ids for part in parts])
        again = min(len(lost), len(read))
        assert read[:again] == lost[:again]
        found += read[:num]
        lost = read[num:]
        data = cursor.encoder().encode(cursor.order.position_behind(batch + num - 1))
    assert found[:NUM_STEPS] == whole
