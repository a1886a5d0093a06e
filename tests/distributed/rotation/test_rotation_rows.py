"""An embedding sends tokens and their rows: exact, repeatable, and no more bytes than these."""

from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.counters import Counters
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.distributed.conftest import StartRanks
from tests.distributed.training import bytes_of_embedding, whole

NUM_ROWS, WIDTH, PADDING = 1001, 6, 7  # no number of ranks divides the rows
SHAPE = NUM_ROWS, WIDTH


class Lookup(nn.Module):
    """An embedding, called twice as encoders and decoders do, and a head."""

    def __init__(self, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_ROWS, WIDTH, padding_idx=PADDING)
        self.head = nn.Linear(WIDTH, NUM_ROWS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self._rows(tokens) + self.embedding(input=tokens.flip(-1)).sin()
        logits: Tensor = self.head(rows)
        return logits

    def _rows(self, tokens: Tensor) -> Tensor:
        if not self.checkpointed:
            return self.embedding(tokens)  # type: ignore[no-any-return]
        return checkpoint(self.embedding, tokens, use_reentrant=False)  # type: ignore[no-any-return]


def made(options: dict[str, bool], dtype: torch.dtype = torch.float64) -> Lookup:
    torch.manual_seed(0)
    return Lookup(**options).to(dtype)


def tokens_of(rank: int, num_ranks: int) -> Tensor:
    """Other numbers of tokens on each rank, none on the last of three; few of all, some often."""
    if rank == 2:
        return torch.zeros(1, 0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(rank)
    found = torch.randint(NUM_ROWS, (2, 5 + rank), generator=generator, dtype=torch.int32)
    found[0, :3] = torch.tensor([PADDING, NUM_ROWS - 1, NUM_ROWS - 1])
    return found


@dataclass(frozen=True)
class Seen:
    """Of one rank: its logits, averaged gradients, and bytes sent as two counters have them."""

    logits: Tensor
    grads: dict[str, Tensor]
    counted: list[int]


def looked_up(policy: RotationPolicy, options: dict[str, bool], dtype: torch.dtype) -> list[Seen]:
    """The same step twice."""
    model, mesh = made(options, dtype), make_mesh("cpu")
    rotate_all(model, mesh=mesh, policy=policy)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found, ring = [], ring_of(mesh)
    for _ in range(2):
        before = ring.bytes_sent
        with Counters() as counted:
            logits = model(tokens_of(rank, num_ranks))
            (logits.cos().sum() * num_ranks).backward()
        here = ring.bytes_sent - before
        with torch.inference_mode():
            assert torch.equal(model(tokens_of(rank, num_ranks)), logits)
        grads = {name: whole(_grad(each)) for name, each in model.named_parameters()}
        model.zero_grad()
        found.append(Seen(logits.detach(), grads, [here, counted.sent_bytes]))
    return found


def alone(num_ranks: int, options: dict[str, bool]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each rank's logits, and the gradients of all ranks' sum, of the model as it is."""
    model = made(options)
    logits = [model(tokens_of(rank, num_ranks)) for rank in range(num_ranks)]
    torch.stack([each.cos().sum() for each in logits]).sum().backward()  # type: ignore[no-untyped-call]
    grads = {name: _grad(each) for name, each in model.named_parameters()}
    return [each.detach() for each in logits], grads


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


WAYS: dict[str, tuple[RotationPolicy, dict[str, bool]]] = {
    "untied": (RotationPolicy(), {}),
    "tied, recomputed": (RotationPolicy(recompute="block"), {"tied": True}),
    "in a checkpoint": (RotationPolicy(), {"tied": True, "checkpointed": True}),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_rows_give_what_one_process_has_and_are_all_that_is_sent(
    ranks: StartRanks, num_ranks: int, way: str
) -> None:
    policy, options = WAYS[way]
    expected, grads = alone(num_ranks, options)
    tokens = [tokens_of(rank, num_ranks) for rank in range(num_ranks)]
    for rank, seen in enumerate(ranks(num_ranks).run(looked_up, policy, options, torch.float64)):
        for each in seen:
            assert torch.allclose(each.logits, expected[rank], rtol=1e-12, atol=1e-13)
            for name, grad in each.grads.items():
                assert torch.allclose(grad, grads[name], rtol=1e-12, atol=1e-13), name
            assert each.counted[0] == each.counted[1]
        first, second = seen
        assert all(torch.equal(first.grads[name], second.grads[name]) for name in first.grads)
        rows = bytes_of_embedding(tokens, rank, SHAPE, weight=8, grad=8)
        again = (
            bytes_of_embedding(tokens, rank, SHAPE, weight=8, grad=0)
            if options.get("checkpointed")
            else 0
        )
        head = _head_bytes(rank, num_ranks)
        assert first.counted[0] == head + 2 * rows + again
        assert 2 * rows < head  # which the embedding would send four thirds of


def _head_bytes(rank: int, num_ranks: int) -> int:
    """Of the head's slices: see `test_bytes_sent_of_uneven_slices`."""
    sizes = [len(each) for each in torch.arange(NUM_ROWS).chunk(num_ranks)]
    left_out = sizes[(rank + 1) % num_ranks] + sizes[rank - 1] + sizes[rank]
    return 8 * WIDTH * (3 * NUM_ROWS - left_out)


def told_when_ranks_differ(when: str) -> str:
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=60))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("rotate",))
    tables = nn.ModuleDict({"one": nn.Embedding(NUM_ROWS, 4), "other": nn.Embedding(NUM_ROWS, 4)})
    tables["layer"] = nn.Linear(4, 30)
    rotate_all(tables, mesh=mesh, policy=RotationPolicy())
    told = _told(tables, when)
    dist.barrier()  # a rank that ends at once could be missed before the difference is seen
    return told


def _told(tables: nn.ModuleDict, when: str) -> str:
    tokens, is_first = torch.arange(8), dist.get_rank() == 0
    try:
        if when == "forward":
            tables["other" if is_first else "one"](tokens)
        elif when == "a layer's":
            tables["layer"](torch.ones(2, 4)) if is_first else tables["one"](tokens)
        else:
            outputs: Any = tables["one"](tokens), tables["other"](tokens)
            outputs[is_first].sum().backward()
    except RotationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("num_ranks", "when"), [*product((2, 3), ("forward", "backward")), (3, "a layer's")]
)
def test_ranks_that_look_up_in_different_tables_are_told_which(
    ranks: StartRanks, num_ranks: int, when: str
) -> None:
    first = "layer (forward" if when == "a layer's" else f"other ({when}"
    for message in ranks(num_ranks).run_to_the_end(told_when_ranks_differ, when):
        assert f"rank 0 calls {first}" in message
        assert "calls one (" in message
