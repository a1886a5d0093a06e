"""The tensors that recomputation keeps between forward and backward; gradients stay the same."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.counters import Counters
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.layers.attention import rope_table
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import RotationPolicy, no_sync, rotate_all
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.training.gpt import Block, GPTConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

BATCH, TIME, DIM = 6, 5, 24
STREAM_BYTES = BATCH * TIME * DIM * 4
CONFIG = GPTConfig(8, 1, DIM, 6, 6, 36, TIME, norm="layer")


class OwnNorm(nn.Module):
    """RMSNorm as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Residual(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, MLP(DIM, 36)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.mlp(self.norm(x))
        return output


class NormAfter(nn.Module):
    """norm(x + mlp(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = MLP(DIM, 36), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(x + self.mlp(x))
        return output


class InOneBlock(nn.Module):
    """Attention and an MLP, under torch's own checkpoint if that is asked for."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.block, self.checkpointed = Block(CONFIG), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        rope = rope_table(TIME, DIM // 6, 100.0, x.device)
        output: Tensor = (
            checkpoint(self.block, x, rope, use_reentrant=False)
            if self.checkpointed
            else self.block(x, rope)
        )
        return output


def tied() -> nn.Module:
    one, other = Residual(nn.LayerNorm(DIM)), Residual(nn.LayerNorm(DIM))
    other.mlp.up.weight, other.mlp.down.weight = one.mlp.up.weight, one.mlp.down.weight
    return nn.Sequential(one, other)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, 4, 36, dropout=0.2, norm_first=True)


@dataclass(frozen=True)
class Case:
    """Two modules of one kind, one after the other.

    Attributes:
        num_streams: tensors of the size of the residual stream that are alive before backward, the
            output among them.
    """

    build: Callable[[], nn.Module]
    num_streams: int


CASES = {
    "block": Case(InOneBlock, 5),
    "block, checkpointed": Case(lambda: InOneBlock(checkpointed=True), 3),
    "tied": Case(tied, 5),
    "norm after": Case(NormAfter, 4),  # the input, which no norm keeps, and each norm's
    # norms of unknown code keep as many as without recomputation
    "own norm": Case(lambda: Residual(OwnNorm()), 7),
    # one projection of all heads, their outputs, masks of dropout
    "encoder layer": Case(encoder_layer, 23),
}


def trained(case: Case, policy: RotationPolicy) -> tuple[dict[str, Tensor], int, int]:
    """All gradients after two backwards, tensors alive before the second one, and bytes sent."""
    mesh = make_mesh("cpu")
    torch.manual_seed(1)
    model = nn.Sequential(case.build(), case.build())
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    rotate_all(model, mesh=mesh, policy=policy)
    torch.manual_seed(2 + dist.get_rank())
    x = torch.randn(BATCH, TIME, DIM, requires_grad=True)
    with no_sync(model):
        model(x).square().mean().backward()
    before = ring_of(mesh).bytes_sent
    with Counters() as live:
        loss = model(x).square().mean()
        num_streams = sum(storage.nbytes == STREAM_BYTES for storage in live._known.values())
        loss.backward()
    found = {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert x.grad is not None
    return found | {"x": x.grad}, num_streams, ring_of(mesh).bytes_sent - before


def compared() -> dict[str, tuple[float, bool, int, int, int]]:
    """For each case, the distance of gradients from those without recomputation.

    Then whether bits agree, the streams that are alive, and the bytes sent.
    """
    found = {}
    for name, case in CASES.items():
        expected, _, num_bytes = trained(case, RotationPolicy())
        grads, num_streams, num_bytes_again = trained(case, RotationPolicy(recompute="block"))
        assert grads.keys() == expected.keys()
        far = max(apart(grads[key], expected[key]) for key in expected)
        same = all(torch.equal(grads[key], expected[key]) for key in expected)
        found[name] = far, same, num_streams, num_bytes, num_bytes_again
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_norm_and_the_module_after_it_keep_one_tensor(ranks: StartRanks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(compared):
        for name, (far, same, num_streams, num_bytes, num_bytes_again) in found.items():
            assert far <= 1e-6, name
            assert same, name
            assert num_streams == CASES[name].num_streams, name
            assert num_bytes_again == num_bytes, name


def errors_of_inputs_that_changed() -> list[str]:
    """The errors of backwards through modules whose input, or norm's input, was written to."""
    found = []
    for norm in (nn.LayerNorm(DIM), nn.Identity()):
        torch.manual_seed(0)
        model = Residual(norm)
        rotate_all(model, mesh=make_mesh("cpu"), policy=RotationPolicy(recompute="block"))
        x = torch.randn(BATCH, TIME, DIM, requires_grad=True) * 1
        loss = model(x).square().mean()
        x.add_(1)
        try:
            loss.backward()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_an_input_that_changed_since_forward_is_an_error(ranks: StartRanks) -> None:
    for found in ranks(2).run(errors_of_inputs_that_changed):
        assert ["modified by an inplace operation" in error for error in found] == [True, True]


class Noisy(nn.Module):
    """An MLP that draws random numbers once it is told to."""

    is_noisy = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 36), nn.Linear(36, DIM)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(x) * (torch.rand(()) if Noisy.is_noisy else 1))
        return output


def grads_of_late_noise() -> list[list[Tensor]]:
    """The gradients by kept and by recomputed slices, of the same seed."""
    found = []
    for policy in (RotationPolicy(), RotationPolicy(recompute="block")):
        torch.manual_seed(0)
        model, x = Noisy(), torch.randn(BATCH, DIM)
        rules: dict[type[nn.Module] | str, Rule | None] = {Noisy: MLPRule(("up",), "down")}
        rotate_all(model, mesh=make_mesh("cpu"), policy=policy, rules=rules, min_numel=0)
        model(x)  # it is compared with its layers
        Noisy.is_noisy = True
        torch.manual_seed(0)
        model(x).square().sum().backward()
        Noisy.is_noisy = False
        grads = [parameter.grad for parameter in model.parameters()]
        found.append([whole(grad) for grad in grads if grad is not None])
    return found


def test_random_numbers_are_drawn_again(ranks: StartRanks) -> None:
    for kept, recomputed in ranks(2).run(grads_of_late_noise):
        assert len(kept) == 4
        assert all(map(torch.equal, kept, recomputed))
