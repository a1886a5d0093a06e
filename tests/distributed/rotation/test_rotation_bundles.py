"""Small modules that travel together compute what they do alone, in fewer hops and bytes."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.live_bytes import LiveBytes
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import (
    RotationPolicy,
    linear_cross_entropy,
    quantize_frozen,
    rotate_all,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.distributed.comparing import distances
from tests.distributed.conftest import StartRanks
from tests.distributed.rotation.test_rotation_layers import CASES
from tests.distributed.training import (
    EVEN,
    UNEVEN,
    Variant,
    distance,
    train_alone,
    train_rotated,
)

TOGETHER = RotationPolicy(bundle_numel=2**18)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_call_equals_one_process(ranks: StartRanks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(distances, CASES, TOGETHER):
        assert {name: value for name, value in found.items() if not value <= 1e-12} == {}


VARIANTS = {
    "clipped, accumulated": Variant(EVEN, TOGETHER, max_norm=0.05, num_parts=2),
    "tied, uneven": Variant(replace(UNEVEN, tie_embeddings=True), TOGETHER),
    "some rotate, some are frozen": Variant(
        UNEVEN,
        RotationPolicy(bundle_numel=24 * 50 * 2 + 24),
        frozen=("embedding", "blocks.0.mlp", "blocks.1.attention.q"),
    ),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_parameters_equal_one_process(
    ranks: StartRanks, name: str, num_ranks: int
) -> None:
    alone = train_alone(replace(VARIANTS[name], policy=RotationPolicy()))
    for outcome in ranks(num_ranks).run(train_rotated, VARIANTS[name]):
        assert outcome.losses == pytest.approx(alone.losses, rel=1e-12, abs=0)
        assert distance(outcome.parameters, alone.parameters) <= 1e-12


def test_replicas_equal_one_process(ranks: StartRanks) -> None:
    alone = train_alone(Variant(EVEN), 3)
    for outcome in ranks(4).run(train_rotated, Variant(EVEN, TOGETHER), 3, 2):
        assert outcome.losses == pytest.approx(alone.losses, rel=1e-12, abs=0)
        assert distance(outcome.parameters, alone.parameters) <= 1e-12


def test_half_precision_stays_close(ranks: StartRanks) -> None:
    half = replace(TOGETHER, compute_dtype=torch.bfloat16)
    alone = train_alone(Variant(EVEN, dtype=torch.float32))
    for outcome in ranks(2).run(train_rotated, Variant(EVEN, half, torch.float32)):
        assert outcome.losses == pytest.approx(alone.losses, rel=2e-2)
        assert all(parameter.dtype == torch.float32 for parameter in outcome.parameters.values())


class Layers(nn.Module):
    """Layers of which each call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index in used:
            x = self.layers[index](x).sin()
        return x.sum()


def rotated_layers() -> tuple[Layers, Ring]:
    torch.manual_seed(0)
    model, mesh = Layers(), make_mesh("cpu")
    rotate_all(model, mesh=mesh, policy=TOGETHER)
    return model, ring_of(mesh)


def hops_and_bytes(num_steps: int) -> list[tuple[int, int]]:
    """Hops, and bytes sent, of each step; in an odd one, an evaluation comes first."""
    model, ring = rotated_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hops, shift = [0], ring.shift

    def counted(*args: object) -> object:
        hops[0] += 1
        return shift(*args)  # type: ignore[arg-type]

    ring.shift = counted  # type: ignore[method-assign, assignment]
    found = []
    for step in range(num_steps):
        before = hops[0], ring.bytes_sent
        if step % 2:
            with torch.no_grad():
                model(torch.ones(2, 6))
                model(torch.ones(2, 6))
        model(torch.ones(2, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((hops[0] - before[0], ring.bytes_sent - before[1]))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_layers_share_their_hops(ranks: StartRanks, num_ranks: int) -> None:
    """Weights travel once for forward and backward; with gradients go six numbers.

    A call of the model gathers what the one before it held: a write to a shard may be unseen.
    """
    num_bytes = 4 * 3 * (6 * 6 + 6) // num_ranks
    trained = 2 * num_bytes + 4 * 6
    for found in ranks(num_ranks).run(hops_and_bytes, 2):
        one = num_ranks - 1
        assert found == [(2 * one, trained * one), (4 * one, (trained + 2 * num_bytes) * one)]


def told(which: str) -> tuple[str, list[bool]]:
    """What this rank is told, and which layers got a gradient."""
    model, _ = rotated_layers()
    x, rank = torch.ones(2, 6), dist.get_rank()
    try:
        match which:
            case "a layer is not used":
                model(x, (0, 2)).backward()
            case "ranks use other layers":
                model(x, (0, 1 + rank)).backward()
            case "two forwards before the backwards":
                first, second = model(x), model(2 * x)
                first.backward()
                second.backward()
                expected = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
                model.zero_grad()
                (model(x) + model(2 * x)).backward()
                for parameter, grad in zip(model.parameters(), expected, strict=True):
                    assert isinstance(parameter.grad, DTensor)
                    assert torch.allclose(parameter.grad.to_local(), grad)
            case "torch's checkpoint":
                model(x).backward()
                expected = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
                model.zero_grad()
                checkpoint(model, x, use_reentrant=False).backward()
                for parameter, grad in zip(model.parameters(), expected, strict=True):
                    assert isinstance(parameter.grad, DTensor)
                    assert torch.equal(parameter.grad.to_local(), grad)
            case "a copy":
                copied = deepcopy(model)
                assert not any(layer.bundle for layer in copied.layers)
                assert torch.allclose(copied(x), model(x))
            case _:
                loss = model(x)
                with torch.no_grad():
                    next(model.parameters()).add_(1)
                loss.backward()
    except RotationError as error:
        return str(error), []
    return "", [layer.weight.grad is not None for layer in model.layers]


def test_a_layer_that_no_rank_uses_has_no_gradient(ranks: StartRanks) -> None:
    assert ranks(2).run(told, "a layer is not used") == [("", [True, False, True])] * 2


def test_two_forwards_before_their_backwards_add_up(ranks: StartRanks) -> None:
    assert ranks(3).run(told, "two forwards before the backwards") == [("", [True] * 3)] * 3


@pytest.mark.parametrize("which", ["torch's checkpoint", "a copy"])
def test_other_ways_to_call_give_the_same(ranks: StartRanks, which: str) -> None:
    assert [message for message, _ in ranks(2).run(told, which)] == ["", ""]


def test_ranks_that_use_other_layers_are_told_which(ranks: StartRanks) -> None:
    for message, _ in ranks(2).run(told, "ranks use other layers"):
        assert "rank 0: layers.1.weight, layers.1.bias; rank 1: layers.2.weight" in message


def test_parameters_that_change_before_backward_are_refused(ranks: StartRanks) -> None:
    for message, _ in ranks(2).run(told, "changed"):
        assert "changed between forward and backward" in message


WIDE = 512  # so that each layer is a bundle of its own, and a rank holds one whole
NUM_LAYERS = 3


def wide_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDE, WIDE, dtype=torch.float64) for _ in range(NUM_LAYERS))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def wide_step(surroundings: str) -> tuple[float, int, int, int]:
    """How far gradients are off, hops, the bytes at the peak, and those saved by outer hooks."""
    rotated, plain, mesh = wide_model(), wide_model(), make_mesh("cpu")
    rotate_all(rotated, mesh=mesh, policy=RotationPolicy(bundle_numel=WIDE * (WIDE + 1)))
    x = torch.randn(4, WIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain(x).sum().backward()
    hops, ring = [0], ring_of(mesh)
    shift = ring.shift

    def counted(*args: object) -> object:
        hops[0] += 1
        return shift(*args)  # type: ignore[arg-type]

    ring.shift = counted  # type: ignore[method-assign, assignment]
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor.clone()

    with LiveBytes() as live:
        match surroundings:
            case "a checkpoint":
                y = checkpoint(rotated, x, use_reentrant=False)
            case "hooks":
                with saved_tensors_hooks(save, lambda tensor: tensor):
                    y = rotated(x)
            case _:
                y = rotated(x)
        live.mark("forward")
        y.sum().backward()
        peak = live.timeline().since("forward").peak_bytes
    del ring.shift
    off = max(
        (one.grad.full_tensor() - other.grad).abs().max().item()  # type: ignore[union-attr]
        for one, other in zip(rotated.parameters(), plain.parameters(), strict=True)
    )
    return off, hops[0], peak, sum(saved)


def test_whole_parameters_are_let_go_and_gathered_again(ranks: StartRanks) -> None:
    """All but two bundles are gathered once more.

    The last one of forward is the first of backward, and the first layer's backward needs no
    weights: its input takes no gradient.
    """
    whole = 8 * WIDE * (WIDE + 1)
    for off, hops, peak, _ in ranks(2).run(wide_step, "nothing"):
        assert off <= 1e-12
        assert hops == NUM_LAYERS + (NUM_LAYERS - 2) + NUM_LAYERS
        # half of all gradients stay; weights, their gradients, and what is formed of both
        assert peak < NUM_LAYERS * whole / 2 + 4.5 * whole


def test_a_checkpoint_around_bundles_is_exact(ranks: StartRanks) -> None:
    assert [off <= 1e-12 for off, *_ in ranks(2).run(wide_step, "a checkpoint")] == [True] * 2


def test_hooks_around_bundles_save_activations_alone(ranks: StartRanks) -> None:
    for off, _, _, saved in ranks(2).run(wide_step, "hooks"):
        assert off <= 1e-12
        assert 0 < saved < 8 * WIDE * WIDE


def bundles_left(what: str) -> tuple[list[bool], float]:
    """Which layers are still in a bundle, and how far the output is off after that."""
    torch.manual_seed(0)
    head, mesh = nn.Linear(6, 8), make_mesh("cpu")
    model = nn.Sequential(nn.Linear(6, 6), head)
    plain, x = deepcopy(model), torch.ones(2, 6)
    rotate_all(model, mesh=mesh, policy=TOGETHER)
    expected = plain(x)
    match what:
        case "few bits":
            model(x).sum().backward()
            quantize_frozen(model.requires_grad_(False), "int8", mesh=mesh, keep=("1",))
        case _:
            targets = torch.tensor([1, 2])
            expected = nn.functional.cross_entropy(expected, targets)
            for _ in range(2):  # its bundle is gathered in the first call
                found = linear_cross_entropy(head, model[0](x), targets)
                found.backward()  # type: ignore[no-untyped-call]
            assert all(parameter.grad is not None for parameter in model.parameters())
            return [bool(each.bundle) for each in model], (found - expected).abs().item()
    return [bool(each.bundle) for each in model], (model(x) - expected).abs().max().item()


@pytest.mark.parametrize(
    ("what", "left", "most"),
    [
        ("few bits", [False, True], 2e-2),
        ("a loss by slices", [True, False], 1e-6),
    ],
)
def test_what_needs_slices_leaves_its_bundle(
    ranks: StartRanks, what: str, left: list[bool], most: float
) -> None:
    for found, off in ranks(2).run(bundles_left, what):
        assert found == left
        assert off <= most
