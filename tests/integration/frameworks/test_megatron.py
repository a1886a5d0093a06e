"""Megatron-Core's ranks with their iterators; its schedules need a GPU."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from gyre_client import Loader
from gyre_client.errors import InvalidRequest

from tests.conftest import StartDaemon
from tests.distributed.conftest import StartRanks
from tests.frameworks import framework

with warnings.catch_warnings(action="ignore"):
    framework("megatron.core")
    from gyre_client.integrations.megatron import data_iterator
    from megatron.core import parallel_state

NUM_SAMPLES, SEQ_LENGTH, BATCH_SIZE = 50, 8, 8
SAVE_AT, NUM_STEPS = 3, 6

Steps = list[list[list[int]]]  # of each step, the rows of tokens of a rank


@pytest.fixture
def corpus(gyred: StartDaemon, tmp_path: Path) -> str:
    """The address of a daemon that has windows of SEQ_LENGTH + 1 tokens."""
    tokens = np.arange(NUM_SAMPLES * (SEQ_LENGTH + 1), dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    table = {"uri": str(tmp_path / "tokens.bin"), "format": "tokens", "dtype": "uint16"}
    return gyred({"datasets": {"corpus": {**table, "sequence_length": SEQ_LENGTH + 1}}}).address


def iterator(address: str, micro_batch_size: int) -> Any:
    return data_iterator(
        "corpus",
        global_batch_size=BATCH_SIZE,
        micro_batch_size=micro_batch_size,
        seq_length=SEQ_LENGTH,
        address=address,
    )


def train(address: str, sizes: list[tuple[int, int, int]]) -> tuple[list[int], list[Steps | None]]:
    """A rank's part of one run after the other, each with other sizes, from the state before.

    Of each, its data-parallel rank, and its steps; None where no data is read.
    """
    ranks, parts, state = [], [], None
    for tensor, pipeline, micro_batch_size in sizes:
        parallel_state.initialize_model_parallel(tensor, pipeline)
        ranks.append(parallel_state.get_data_parallel_rank())
        num_ranks = parallel_state.get_data_parallel_world_size()
        batches = iterator(address, micro_batch_size)
        steps: Steps | None = None
        if batches is not None:
            if state:
                batches.load_state_dict(state)
            steps = []
            for _ in range(SAVE_AT):
                rows = []
                for _ in range(BATCH_SIZE // num_ranks // micro_batch_size):
                    part = next(batches)
                    assert part["position_ids"].tolist() == [[*range(SEQ_LENGTH)]] * len(
                        part["tokens"]
                    )
                    assert part["loss_mask"].all()
                    assert part["tokens"][:, 1:].equal(part["labels"][:, :-1])
                    rows += part["tokens"].tolist()
                steps.append(rows)
            state = batches.state_dict()
            batches.close()
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)  # as a checkpoint would keep it
        state = states[0]
        parts.append(steps)
        parallel_state.destroy_model_parallel()
    return ranks, parts


def test_a_run_goes_on_with_other_parallel_sizes(corpus: str, ranks: StartRanks) -> None:
    """Tensor 2 x pipeline 2, then data 4, then data 2 x tensor 2, then four pipeline stages."""
    sizes = [(2, 2, 4), (1, 1, 2), (2, 1, 2), (1, 4, 8)]
    with Loader("corpus", batch_size=BATCH_SIZE, address=corpus) as loader:
        planned = [next(loader)["tokens"][:, :-1].tolist() for _ in range(SAVE_AT * len(sizes))]
    found = ranks(4).run(train, corpus, sizes)
    for number in range(len(sizes)):
        read = [(ranks[number], parts[number]) for ranks, parts in found]
        by_rank = {rank: steps for rank, steps in read if steps is not None}
        assert all(steps in (None, by_rank[rank]) for rank, steps in read)
        joined = [
            [row for rank in sorted(by_rank) for row in by_rank[rank][step]]
            for step in range(SAVE_AT)
        ]
        assert joined == planned[number * SAVE_AT : (number + 1) * SAVE_AT], sizes[number]
    assert [parts[3] is None for _, parts in found] == [False, True, True, False]


def test_a_state_inside_a_step_is_refused(corpus: str, ranks: StartRanks) -> None:
    ranks(4).run(inside_a_step, corpus)


def inside_a_step(address: str) -> None:
    parallel_state.initialize_model_parallel(2, 1)
    batches = iterator(address, 2)
    next(batches)
    with pytest.raises(InvalidRequest, match="Save between two steps"):
        batches.state_dict()
    batches.close()
    parallel_state.destroy_model_parallel()
