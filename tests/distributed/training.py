"""Trains a small GPT in float64, on rotated ranks or in one process, for tests to compare."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.rotate import rotate_all
from gyre_trainer.rotation.rule import RotationPolicy
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.shards.layout import slice_bounds
from gyre_trainer.training.gpt import GPT, GPTConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

GLOBAL_BATCH = 24  # a multiple of 1, 2, 3 and 4 ranks
NUM_TOKENS = 8
NUM_STEPS = 20

EVEN = GPTConfig(
    vocab_size=36,
    num_layers=2,
    dim=24,
    num_heads=12,
    num_kv_heads=12,
    hidden_dim=48,
    max_seq_len=NUM_TOKENS,
    gated_mlp=False,
)
GATED_GROUPED = replace(EVEN, dim=48, num_heads=24, num_kv_heads=12, gated_mlp=True)
UNEVEN = replace(EVEN, vocab_size=37, hidden_dim=50, bias=True, norm="layer")


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    config: GPTConfig = EVEN
    policy: RotationPolicy = field(default_factory=RotationPolicy)
    dtype: torch.dtype = torch.float64
    max_norm: float = 0.0
    num_parts: int = 1
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The loss of every step, and every parameter after the last, whole."""

    losses: list[float]
    parameters: dict[str, Tensor]
    bytes_sent: list[int]


def build(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batch(step: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab_size, (GLOBAL_BATCH, NUM_TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def bytes_of_embedding(
    tokens: Sequence[Tensor], rank: int, shape: tuple[int, int], *, weight: int, grad: int
) -> int:
    """What a rank sends for an embedding in a step: ids and rows, or slices where tokens are many.

    Args:
        tokens: those of each rank.
        rank: the rank.
        shape: of the embedding.
        weight: bytes of an element on its way.
        grad: bytes of a gradient's element on its way; 0 where nothing travels in backward.
    """
    (num_rows, width), num_ranks = shape, len(tokens)
    longest = max(each.numel() for each in tokens)
    if num_ranks * longest < num_rows:
        return (num_ranks - 1) * longest * (8 + width * (weight + grad))
    starts = [slice_bounds(num_rows, index, num_ranks) for index in range(num_ranks)]
    sizes = [stop - start for start, stop in starts]
    sent = weight * (num_rows - sizes[(rank + 1) % num_ranks])
    if grad:
        sent += weight * (num_rows - sizes[rank - 1]) + grad * (num_rows - sizes[rank])
    return width * sent


def freeze(model: GPT, names: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(False)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def rotated_gpt(variant: Variant, replicate: int = 1, mesh: DeviceMesh | None = None) -> GPT:
    """The variant's model on this rank."""
    mesh = mesh or make_mesh("cpu", replicate=replicate)
    with default_dtype(variant.dtype):
        model = build(variant.config)
    if variant.frozen:
        freeze(model, variant.frozen)
    rotate_all(model, mesh=mesh, policy=variant.policy)
    materialize(model, seed=7)
    return model


def train_rotated(variant: Variant, num_steps: int = NUM_STEPS, replicate: int = 1) -> Outcome:
    """Train a variant's model on this rank."""
    mesh = make_mesh("cpu", replicate=replicate)
    model = rotated_gpt(variant, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ring = ring_of(mesh)  # torch may give parameters an equal mesh, of another process group
    losses, bytes_sent = [], []
    for step in range(num_steps):
        tokens, targets = (
            part.chunk(ring.num_parts)[ring.part] for part in batch(step, variant.config.vocab_size)
        )
        before = ring.bytes_sent
        loss = train_step(model, optimizer, tokens, targets, variant)
        bytes_sent.append(ring.bytes_sent - before)
        dist.all_reduce(loss)
        losses.append(loss.item() / ring.num_parts)
    return Outcome(losses, whole_parameters(model), bytes_sent)


@cache
def train_alone(variant: Variant, num_steps: int = NUM_STEPS) -> Outcome:
    """The same training without rotation, on the global batch."""
    with default_dtype(variant.dtype):
        model = build(variant.config)
    materialize(model, seed=7)
    if variant.frozen:
        freeze(model, variant.frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [
        train_step(model, optimizer, *batch(step, variant.config.vocab_size), variant).item()
        for step in range(num_steps)
    ]
    return Outcome(losses, whole_parameters(model), [])


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, variant: Variant
) -> Tensor:
    """Take one optimizer step; return the mean loss before it, over this process's tokens."""
    mean = torch.zeros((), dtype=torch.float64)
    for tokens_part, targets_part in zip(
        tokens.chunk(variant.num_parts), targets.chunk(variant.num_parts), strict=True
    ):
        loss = model.loss(tokens_part, targets_part) / variant.num_parts
        loss.backward()  # type: ignore[no-untyped-call]
        mean += loss.detach()
    if variant.max_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), variant.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return mean


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative distance between two parameters of the same name."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp_min(1e-9)) for n in one)


def outcome(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Loss and whole gradients of a model of transformers, for rows of which some end with padding.

    So its mask is used.
    """
    mask = torch.ones_like(rows)
    mask[rows[:, 0] % 2 == 0, -2:] = 0
    output = model(input_ids=rows, attention_mask=mask, labels=rows)
    output.loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **grads}
