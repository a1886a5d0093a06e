"""Rotation is exact to the last bit if sums are formed in the same order, else nearly so."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import RotationPolicy, rotate
from gyre_trainer.shards.initialisation import materialize
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

DIM, HIDDEN_DIM, NUM_TOKENS, NUM_STEPS = 32, 96, 16, 4
LEARNING_RATE = 0.5


class Residuals(nn.Module):
    """Two MLPs, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(MLP(DIM, HIDDEN_DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x.square().mean()


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(1000 * step + rank))


def trained_on_ranks(policy: RotationPolicy) -> list[Tensor]:
    """This rank's slices of (up, down), by module, after some steps in float32."""
    model = Residuals()
    for mlp in model.mlps:
        rotate(mlp, mesh=make_mesh("cpu"), policy=policy)
    materialize(model, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        model(inputs(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]


class Oracle:
    """The same training in one process, without autograd, with sums in the ring's order."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        model = Residuals()
        materialize(model, seed=1)
        self.slices: list[list[tuple[Tensor, Tensor]]] = []
        for mlp in model.mlps:
            assert isinstance(mlp, MLP)
            ups, downs = (
                mlp.up.weight.detach().chunk(num_ranks, 0),
                mlp.down.weight.detach().chunk(num_ranks, 1),
            )
            self.slices.append(
                [(up.contiguous(), down.contiguous()) for up, down in zip(ups, downs, strict=True)]
            )

    def step(self, step: int) -> None:
        streams = [[inputs(step, rank)] for rank in range(self.num_ranks)]
        for slices in self.slices:
            for rank, stream in enumerate(streams):
                stream.append(stream[-1] + self._output(slices, stream[-1], rank))
        grads = [stream[-1] * 2 / stream[-1].numel() for stream in streams]
        for place in (1, 0):
            before = [stream[place] for stream in streams]
            self._backward(self.slices[place], before, grads)

    def _output(self, slices: list[tuple[Tensor, Tensor]], x: Tensor, rank: int) -> Tensor:
        """The output: the own slice first, then those of the previous ranks."""
        order = [(rank - hop) % self.num_ranks for hop in range(self.num_ranks)]
        outputs = [
            F.linear(F.gelu(F.linear(x, slices[index][0])), slices[index][1]) for index in order
        ]
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def _backward(
        self, slices: list[tuple[Tensor, Tensor]], sources: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Turn gradients after the module into gradients before it, and update the slices."""
        totals: list[Tensor | None] = [None] * self.num_ranks
        of_slices = [(torch.zeros_like(up), torch.zeros_like(down)) for up, down in slices]
        # a slice meets the rank before its owner first, its owner last
        for hop in range(1, self.num_ranks + 1):
            for rank in range(self.num_ranks):
                index = (rank + hop) % self.num_ranks
                (up, down), (of_up, of_down) = slices[index], of_slices[index]
                inner = F.linear(sources[rank], up)
                of_inner = torch.ops.aten.gelu_backward(grads[rank] @ down, inner)
                total = totals[rank]
                totals[rank] = of_inner @ up if total is None else total.addmm_(of_inner, up)
                scale, beta = 1 / self.num_ranks, 0 if hop == 1 else 1
                of_down.addmm_(grads[rank].t(), F.gelu(inner), alpha=scale, beta=beta)
                of_up.addmm_(of_inner.t(), sources[rank], alpha=scale, beta=beta)
        for rank, total in enumerate(totals):
            assert total is not None
            grads[rank] = grads[rank] + total
        for weights, of_weights in zip(slices, of_slices, strict=True):
            for weight, of_weight in zip(weights, of_weights, strict=True):
                weight.add_(of_weight, alpha=-LEARNING_RATE)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "policy", [RotationPolicy(), RotationPolicy(recompute="block")], ids=["kept", "recomputed"]
)
def test_float32_is_bit_equal_to_one_process_that_adds_in_the_same_order(
    ranks: StartRanks, policy: RotationPolicy, num_ranks: int
) -> None:
    oracle = Oracle(num_ranks)
    before = [weight.clone() for slices in oracle.slices for weight in slices[0]]
    for step in range(NUM_STEPS):
        oracle.step(step)
    for rank, found in enumerate(ranks(num_ranks).run(trained_on_ranks, policy)):
        expected = [weight for slices in oracle.slices for weight in slices[rank]]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    after = [weight for slices in oracle.slices for weight in slices[0]]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
