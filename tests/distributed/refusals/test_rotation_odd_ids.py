"""An id outside of a vocabulary on one rank alone: all ranks refuse it, and their ring lives on."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import linear_cross_entropy, rotate
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

VOCABULARY = 32


def told(odd: int, num_ids: int) -> list[str]:
    """The errors of an embedding and of a head; each is called with good ids before and after."""
    torch.manual_seed(0)
    embedding, head = (
        rotate(each, mesh=make_mesh("cpu"), sync_from=0)
        for each in (nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))
    )

    def loss(ids: Tensor) -> Tensor:
        targets: Any = torch.cat((ids, torch.tensor([-100])))  # which is ignored
        return linear_cross_entropy(head, torch.ones(len(targets), 4), targets)  # type: ignore[arg-type]

    good, errors = torch.arange(num_ids), []
    for call in (embedding, loss):
        before = call(good)
        with pytest.raises(IndexError) as refused:
            call(torch.tensor([odd, 1]) if dist.get_rank() == 1 else good)
        errors.append(str(refused.value))
        assert torch.equal(call(good), before)
        before.sum().backward()
    return errors


@pytest.mark.parametrize("num_ids", [4, VOCABULARY])  # by rows of tokens, or by slices
@pytest.mark.parametrize("odd", [-1, VOCABULARY, 2**40])
def test_all_ranks_refuse_an_id_of_one_rank(ranks: StartRanks, odd: int, num_ids: int) -> None:
    words = ("token", "the embedding"), ("target", "the head (nor ignore_index)")
    expected = [f"rank 1: {a} {odd} is not in {b}, which has {VOCABULARY} rows" for a, b in words]
    for errors in ranks(2).run(told, odd, num_ids):
        assert errors == expected
