"""An id outside of a vocabulary on one rank alone: all ranks refuse it, and their ring lives on."""

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import linear_cross_entropy, rotate
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

VOCABULARY = 32


def embedded(layer: nn.Module, ids: Tensor) -> Tensor:
    """A sum of an embedding's rows."""
    return torch.as_tensor(layer(ids).square().sum())


def loss(layer: nn.Module, ids: Tensor) -> Tensor:
    """A loss of a head, of which some targets are ignored."""
    assert isinstance(layer, nn.Linear)
    x = torch.ones(*ids.shape, 4)
    return linear_cross_entropy(layer, x, torch.cat((ids[:1], ids[1:] * 0 - 100)), reduction="sum")


def told(odd: int, num_ids: int) -> list[str]:
    """The errors of an embedding and of a head; each is called with good ids before and after."""
    torch.manual_seed(0)
    errors = []
    for layer, call in ((nn.Embedding(VOCABULARY, 4), embedded), (nn.Linear(4, VOCABULARY), loss)):
        rotated = rotate(layer, mesh=make_mesh("cpu"), sync_from=0)
        good = torch.arange(num_ids)
        before = call(rotated, good)
        torch.autograd.backward(before)
        ids = good.clone()
        if dist.get_rank() == 1:
            ids[0] = odd
        try:
            call(rotated, ids)
        except IndexError as error:
            errors.append(str(error))
        again = call(rotated, good)
        torch.autograd.backward(again)
        assert torch.equal(before, again)
    return errors


@pytest.mark.parametrize("num_ids", [4, VOCABULARY])  # by rows of tokens, or by slices
@pytest.mark.parametrize("odd", [-1, VOCABULARY, 2**40])
def test_all_ranks_refuse_an_id_of_one_rank(ranks: StartRanks, odd: int, num_ids: int) -> None:
    where = "the embedding", "the head (nor ignore_index)"
    expected = [
        f"rank 1: {what} {odd} is not in {each}, which has {VOCABULARY} rows"
        for what, each in zip(("token", "target"), where, strict=True)
    ]
    for errors in ranks(2).run(told, odd, num_ids):
        assert errors == expected
