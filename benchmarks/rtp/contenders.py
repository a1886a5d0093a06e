"""The contenders: one process, DDP, FSDP2 in its two usual wrappings, and Gyre."""

from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import torch
from gyre_trainer.accounting.baselines import data_parallel
from gyre_trainer.rotate import SMALL_NUMEL, RotationPolicy, rotate
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.gpt import GPT, Block
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rtp.workloads import Model, Workload, recomputed


class How(StrEnum):
    """How parameters are spread over the ranks."""

    ALONE = "one process"
    DDP = "DDP"
    FSDP2_LAYER = "FSDP2 per layer"
    FSDP2_SUB_BLOCK = "FSDP2 per sub-block"
    GYRE = "Gyre"
    BY_SLICE = "Gyre, slice by slice"  # small modules, too


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        recompute: each norm, with the attention or MLP after it, keeps only its input; Gyre
            recomputes one slice at a time.
        eager_loss: all logits at once in float32; otherwise cross-entropy is taken in chunks.
        per_block: recompute whole blocks, which keep only their input; Gyre does so by torch's
            checkpoint around them.
    """

    how: How
    recompute: bool = False
    eager_loss: bool = False
    per_block: bool = False

    @property
    def label(self) -> str:
        recomputation = ", recomputation per block" if self.per_block else ", recomputation"
        extra = [recomputation] * self.recompute + [", eager loss"] * self.eager_loss
        return f"{self.how}{''.join(extra)}"


def build(
    contender: Contender,
    workload: Workload,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    fake: bool,
) -> nn.Module:
    """The model as one rank holds it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(workload.dtype)
    try:
        if contender.how in (How.GYRE, How.BY_SLICE):
            assert mesh is not None
            return _rotated(contender, workload, mesh, fake=fake)
        with device:
            model = Model(workload, eager_loss=contender.eager_loss)
    finally:
        torch.set_default_dtype(before)
    if contender.recompute:
        for block in model.blocks:
            assert isinstance(block, Block)
            recomputed(block, whole=contender.per_block)
    if contender.how is How.DDP:
        assert mesh is not None
        return (
            data_parallel(cast("GPT", model), mesh)
            if fake
            else DistributedDataParallel(model, gradient_as_bucket_view=True)
        )
    if contender.how is not How.ALONE:
        _fully_shard(model, mesh, per_layer=contender.how is How.FSDP2_LAYER)
    return model


def _rotated(contender: Contender, workload: Workload, mesh: DeviceMesh, *, fake: bool) -> Model:
    policy = RotationPolicy(recompute="block" if contender.recompute else "none")
    min_numel = 0 if contender.how is How.BY_SLICE else SMALL_NUMEL

    def turn(module: nn.Module) -> None:
        if max(parameter.numel() for parameter in module.parameters()) >= min_numel:
            rotate(module, mesh=mesh, policy=policy)

    with torch.device("meta"):
        model = Model(workload, eager_loss=contender.eager_loss)
    if workload.vocabulary:
        turn(model.embedding)
        turn(model.head.linear)
    for block in model.blocks:
        assert isinstance(block, Block)
        turn(block.attention)
        turn(block.mlp)
    rotate(model, mesh=mesh, policy=policy)
    if contender.per_block:
        for block in model.blocks:
            assert isinstance(block, Block)
            recomputed(block, whole=True)
    if not fake:
        materialize(model, seed=0)
    return model


def _fully_shard(model: Model, mesh: DeviceMesh | None, *, per_layer: bool) -> None:
    for block in model.blocks:
        assert isinstance(block, Block)
        for part in [block] if per_layer else [block.attention, block.mlp]:
            fully_shard(part, mesh=mesh)
    for name, child in model.named_children():
        if name != "blocks":
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
