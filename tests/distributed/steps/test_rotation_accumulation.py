"""Several backwards for one optimizer step are exact, with and without `no_sync`.

Inside `no_sync` the gradients of replicated parameters are not averaged; the last backward averages
their sum.
"""

from contextlib import nullcontext

import pytest
import torch
from gyre_trainer.accounting.counters import Counters
from gyre_trainer.rotate import no_sync
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.test_rotation_regressions import (
    VARIANT,
    backward,
    gradients,
    mine,
    reference,
)
from tests.distributed.training import batch, build, distance, rotated_gpt

NUM_PARTS = 3


def accumulated(holds_back: bool) -> tuple[list[float], list[int], list[bool]]:
    """Distances of the gradients from one process's and bytes sent, by step; then one check.

    The check is whether the norms' gradients were each rank's own inside `no_sync`.
    """
    model = rotated_gpt(VARIANT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distances, sent, own = [], [], []
    for step in range(2):
        alone = reference(model)
        data = [
            batch(NUM_PARTS * step + part, VARIANT.config.vocab_size) for part in range(NUM_PARTS)
        ]
        with Counters() as counted:
            with no_sync(model) if holds_back else nullcontext():
                for part in data[:-1]:
                    backward(model.loss(*mine(part)))
            own.append(differs_among_ranks(model.norm))
            backward(model.loss(*mine(data[-1])))
        for part in data:
            backward(alone.loss(*part))
        distances.append(distance(gradients(model), gradients(alone)))
        sent.append(counted.sent_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return distances, sent, own


def differs_among_ranks(norm: nn.Module) -> bool:
    """Whether the gradient of the module's weight differs among ranks."""
    grad = norm.weight.grad
    assert isinstance(grad, DTensor)
    local = grad.to_local().clone()
    torch.distributed.broadcast(local, src=0)
    found = torch.tensor(float(not torch.equal(local, grad.to_local())))
    torch.distributed.all_reduce(found)
    return bool(found.item())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_held_back_by_no_sync_are_averaged_with_the_last_part(
    ranks: StartRanks, num_ranks: int
) -> None:
    replicated = sum(
        8 * p.numel() + 2 * 4  # and whether any rank has a gradient of it, and trains it
        for name, p in build(VARIANT.config).named_parameters()
        if "norm" in name
    )
    all_reduce = round(replicated * 2 * (num_ranks - 1) / num_ranks)
    outcomes = zip(
        *(ranks(num_ranks).run(accumulated, holds_back) for holds_back in (True, False)),
        strict=True,
    )
    for (distances, sent, own), (each_distances, each_sent, each_own) in outcomes:
        assert max(*distances, *each_distances) <= 1e-12
        assert own == [num_ranks > 1] * 2
        assert each_own == [False] * 2
        assert [more - less for more, less in zip(each_sent, sent, strict=True)] == [
            (NUM_PARTS - 1) * all_reduce
        ] * 2
