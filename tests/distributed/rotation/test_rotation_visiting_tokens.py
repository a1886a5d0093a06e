"""Tokens that visit a head's slices give what one process has, in fewer bytes than slices are."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.accounting.sent_bytes import SentBytes
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.comm.shared_memory import transport
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.head import slice_statistics
from gyre_trainer.layers.head.cross_entropy import linear_cross_entropy
from gyre_trainer.layers.head.logit_functions import Divided, Multiplied, Tanh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

NUM_CLASSES, WIDTH, IGNORED = 301, 6, -100  # no number of ranks divides the classes
CAP = 0.3
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "z_loss": 0.03},
    "none": {"reduction": "none", "label_smoothing": 0.1},
    "capped": {
        "reduction": "none",
        "z_loss": 0.02,
        "functions": (Divided(CAP), Tanh(), Multiplied(CAP)),
    },
}


class Classifier(nn.Module):
    """An embedding and a head."""

    def __init__(self, *, tied: bool = False, bias: bool = False, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, WIDTH)
        self.head = nn.Linear(WIDTH, num_classes, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def features(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens).sin()
        return found


def made(kind: dict[str, bool], num_classes: int = NUM_CLASSES) -> Classifier:
    torch.manual_seed(0)
    return Classifier(**kind, num_classes=num_classes).double()


def batch_of(rank: int, sizes: Sequence[int], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens and targets; some of rank 1 are ignored, and all of rank 2 where there is no mean."""
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = torch.randint(NUM_CLASSES, (2, sizes[rank]), generator=generator)
    if rank == 1:
        targets[::2] = IGNORED
    elif rank == 2 and "reduction" in options:
        targets[:] = IGNORED
    return tokens, targets


def one_number(loss: Tensor) -> Tensor:
    """In which tokens have different weights."""
    return (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum()


def plain_loss(model: Classifier, batch: tuple[Tensor, Tensor], options: dict[str, Any]) -> Tensor:
    tokens, targets = batch
    logits: Tensor = model.head(model.features(tokens))
    if "functions" in options:
        logits = (logits / CAP).tanh() * CAP
    smoothing = options.get("label_smoothing", 0.0)
    losses: Tensor = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    counted = targets != IGNORED
    losses = losses + options.get("z_loss", 0.0) * logits.logsumexp(-1).square() * counted
    match options.get("reduction", "mean"):
        case "none":
            return losses
        case "sum":
            return losses.sum()
    return losses.sum() / counted.sum()


def alone(
    kind: dict[str, bool], options: dict[str, Any], sizes: Sequence[int]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each rank's loss, and the gradients of their mean, of the model as it is."""
    model = made(kind)
    losses = [
        plain_loss(model, batch_of(rank, sizes, options), options) for rank in range(len(sizes))
    ]
    total = torch.stack([one_number(loss) for loss in losses]).mean()
    torch.autograd.backward(total)
    return [loss.detach() for loss in losses], grads_of(model)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None
    }


@dataclass(frozen=True)
class Seen:
    """Of one rank: its loss, averaged gradients, and the head's bytes as two counters have them."""

    loss: Tensor
    grads: dict[str, Tensor]
    counted: list[int]


def visited(
    kind: dict[str, bool],
    options: dict[str, Any],
    sizes: Sequence[int],
    limits: tuple[int, int],
    policy: RotationPolicy | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Seen]:
    """The same step twice, with at most so many logits at once, and numbers in a buffer."""
    max_logits, largest = limits
    model, mesh = made(kind).to(dtype), make_mesh("cpu")
    rotate_all(model, mesh=mesh, policy=policy or RotationPolicy())
    rank, ring, found = dist.get_rank(), ring_of(mesh), []
    tokens, targets = batch_of(rank, sizes, options)
    with (
        patch.object(slice_statistics, "_MAX_LOGITS", max_logits),
        patch.object(ring.pool, "largest_whole_numel", largest),
    ):
        for _ in range(2):
            leaf = model.features(tokens).detach().requires_grad_()
            before = ring.bytes_sent
            with SentBytes(len(sizes)) as sent:
                loss = linear_cross_entropy(model.head, leaf, targets, **options)
                torch.autograd.backward(one_number(loss))
            counted = [ring.bytes_sent - before, sent.total]
            torch.autograd.backward(model.features(tokens), leaf.grad)
            found.append(Seen(loss.detach(), grads_of(model), counted))
            model.zero_grad()
            with torch.inference_mode():
                x = model.features(tokens)
                again = linear_cross_entropy(model.head, x, targets, **options)
            assert torch.equal(again, loss)
    return found


def bytes_sent(rank: int, sizes: Sequence[int], num_statistics: int, width: int = 8) -> int:
    """Of the head, where tokens travel: numbers of tokens, tokens and results, both ways."""

    def padded(size: int) -> int:
        return -(-size // 8) * 8

    def tokens(count: int, num_numbers: int) -> int:
        wide = max(4, width)
        return padded(count * WIDTH * width) + 8 * count + padded(count * num_numbers * wide)

    def statistics(count: int) -> int:
        return padded(count * num_statistics * max(4, width))

    num_ranks = len(sizes)
    total = 16 * (num_ranks - 1)
    for step in range(1, num_ranks):
        sent = sizes[(rank + step - 1) % num_ranks]
        total += tokens(sent, 0) + tokens(sent, 1 + num_statistics)
        followed = sizes[(rank + step) % num_ranks]
        total += statistics(followed) + padded(followed * WIDTH * width)
    return total


SIZES = {2: (7, 12), 3: (5, 9, 4)}
WAYS: dict[str, tuple[dict[str, bool], str, tuple[int, int]]] = {
    "untied": ({}, "mean", (2**23, 0)),
    "untied, with a bias, in chunks": ({"bias": True}, "sum", (2 * NUM_CLASSES, 0)),
    "tied": ({"tied": True}, "none", (2**23, 0)),
    "tied, with a bias, in rounds": ({"tied": True, "bias": True}, "capped", (2**23, 30)),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_visitors_give_what_one_process_has(ranks: StartRanks, num_ranks: int, way: str) -> None:
    kind, name, limits = WAYS[way]
    options, sizes = OPTIONS[name], SIZES[num_ranks]
    expected, grads = alone(kind, options, sizes)
    for rank, seen in enumerate(ranks(num_ranks).run(visited, kind, options, sizes, limits)):
        first, second = seen
        assert first.grads.keys() == grads.keys()
        for each in seen:
            assert torch.allclose(each.loss, expected[rank], rtol=1e-12, atol=0)
            for key, grad in each.grads.items():
                assert torch.allclose(grad, grads[key], rtol=1e-12, atol=1e-13), key
                assert torch.equal(grad, first.grads[key])
            if not (kind.get("tied") and kind.get("bias")):  # such a bias is whole, and averaged
                assert each.counted[0] == each.counted[1]
        assert second.counted == first.counted
        if not limits[1]:
            assert first.counted[0] == bytes_sent(rank, sizes, 3 if name == "none" else 2)


def test_a_rank_may_have_no_tokens(ranks: StartRanks) -> None:
    sizes, options = (0, 11), OPTIONS["none"]
    expected, grads = alone({}, options, sizes)
    for rank, seen in enumerate(ranks(2).run(visited, {}, options, sizes, (2**23, 0))):
        assert torch.allclose(seen[0].loss, expected[rank], rtol=1e-12, atol=0)
        for key, grad in seen[0].grads.items():
            assert torch.allclose(grad, grads[key], rtol=1e-12, atol=1e-13), key
        assert seen[0].counted[0] == bytes_sent(rank, sizes, 3)


def test_tokens_travel_in_bfloat16_and_gradients_add_up_in_float32(ranks: StartRanks) -> None:
    sizes, policy = SIZES[3], RotationPolicy(torch.bfloat16)
    _, grads = alone({}, OPTIONS["sum"], sizes)
    arguments: Any = {}, OPTIONS["sum"], sizes, (2**23, 0), policy, torch.float32
    for rank, (seen, again) in enumerate(ranks(3).run(visited, *arguments)):
        for key, grad in seen.grads.items():
            assert grad.dtype == torch.float32
            assert torch.equal(grad, again.grads[key])
            distance = (grad.double() - grads[key]).norm() / grads[key].norm()
            assert distance < 0.02, key
        assert seen.counted == [bytes_sent(rank, sizes, 2, width=2)] * 2


def bytes_of(sizes: Sequence[int], frozen: bool) -> int:
    """The head's, of one step."""
    model, mesh = made({}), make_mesh("cpu")
    model.head.requires_grad_(not frozen)
    rotate_all(model, mesh=mesh, policy=RotationPolicy())
    tokens, targets = batch_of(dist.get_rank(), sizes, {})
    x = model.features(tokens).detach().requires_grad_()
    before = ring_of(mesh).bytes_sent
    torch.autograd.backward(linear_cross_entropy(model.head, x, targets))
    return ring_of(mesh).bytes_sent - before


@pytest.mark.parametrize(("sizes", "frozen"), [((3, 300), False), ((3, 5), True)])
def test_slices_travel_where_that_is_less(
    ranks: StartRanks, sizes: tuple[int, int], frozen: bool
) -> None:
    rows = [len(each) for each in torch.arange(NUM_CLASSES).chunk(2)]
    for rank, sent in enumerate(ranks(2).run(bytes_of, sizes, frozen)):
        own, other = rows[rank], rows[1 - rank]
        classes = own if frozen else 2 * own + other
        assert sent == 8 * WIDTH * classes + (0 if frozen else 16)


def grads_in_two_rings(sizes: Sequence[int]) -> dict[str, Tensor]:
    """Of two calls, the second in a checkpoint, each with its own backward."""
    model, mesh = made({"bias": True}), make_mesh("cpu", replicate=2)
    rotate_all(model, mesh=mesh, policy=RotationPolicy())
    tokens, targets = batch_of(dist.get_rank(), sizes, {"reduction": "sum"})

    def loss(x: Tensor) -> Tensor:
        found: Tensor = linear_cross_entropy(model.head, x, targets, reduction="sum")
        return found

    torch.autograd.backward(loss(model.features(tokens)))
    torch.autograd.backward(checkpoint(loss, model.features(tokens), use_reentrant=False))
    return grads_of(model)


def test_rings_of_replicas_may_choose_differently(ranks: StartRanks) -> None:
    """Tokens travel in the first ring and slices in the second, where one rank has many tokens."""
    sizes = 3, 8, 2, 300
    _, grads = alone({"bias": True}, {"reduction": "sum"}, sizes)
    for found in ranks(4).run(grads_in_two_rings, sizes):
        for key, grad in found.items():
            assert torch.allclose(grad, 2 * grads[key], rtol=1e-12, atol=1e-12), key


def told_when_ranks_differ(reach: str, when: str) -> str:
    torch.manual_seed(0)
    with ExitStack() as context:
        if reach == "group":
            context.enter_context(
                patch.object(transport, "connect_neighbours", lambda group, timeout: {})
            )
        group = dist.new_group(timeout=timedelta(seconds=60))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("rotate",))
        heads = nn.ModuleDict({"one": nn.Linear(4, 90), "other": nn.Linear(4, 90)})
        rotate_all(heads, mesh=mesh, policy=RotationPolicy())
        told = _told(heads, when)
        dist.barrier()  # a rank that ends at once could be missed before the difference is seen
    return told


def _told(heads: nn.ModuleDict, when: str) -> str:
    x, targets, is_first = torch.ones(3, 4), torch.arange(3), dist.get_rank() == 0
    one, other = heads["one"], heads["other"]
    assert isinstance(one, nn.Linear)
    assert isinstance(other, nn.Linear)
    try:
        if when == "forward":
            linear_cross_entropy(other if is_first else one, x, targets)
        elif when == "logits":
            one(x) if is_first else linear_cross_entropy(one, x, targets)
        else:
            losses = [linear_cross_entropy(head, x, targets) for head in (one, other)]
            torch.autograd.backward(losses[is_first])
    except RotationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("num_ranks", "reach", "when"),
    [
        (2, "memory", "forward"),
        (3, "group", "forward"),
        (3, "memory", "backward"),
        (2, "group", "backward"),
        (2, "memory", "logits"),
        (3, "group", "logits"),
    ],
)
def test_ranks_that_call_different_heads_are_told_which(
    ranks: StartRanks, num_ranks: int, reach: str, when: str
) -> None:
    first = "one (forward" if when == "logits" else f"other ({when}"
    for message in ranks(num_ranks).run_to_the_end(told_when_ranks_differ, reach, when):
        assert f"rank 0 calls {first}" in message
        assert "calls one (" in message


def refused_target(target: int) -> str:
    model = made({})
    rotate_all(model, mesh=make_mesh("cpu"), policy=RotationPolicy())
    with pytest.raises(RuntimeError) as refused:
        linear_cross_entropy(model.head, torch.ones(2, WIDTH).double(), torch.tensor([1, target]))
    return str(refused.value)


@pytest.mark.parametrize("target", [-1, NUM_CLASSES])
def test_a_target_that_is_no_class_is_refused(ranks: StartRanks, target: int) -> None:
    assert all("out of bounds" in told for told in ranks(2).run(refused_target, target))
