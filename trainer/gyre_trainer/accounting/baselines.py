# ruff: noqa: N803, N806  # names carry shape letters
"""The baselines of rotation: the same model under FSDP2 and under data parallelism."""

from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from gyre_trainer.layers.causal_loss import LossHead
from gyre_trainer.rotate import linear_cross_entropy
from gyre_trainer.shards.initialisation import allocate
from gyre_trainer.shards.sharded_parameters import same_storage
from gyre_trainer.training.build import add_adapters, blocks_of, plain, rotated, set_resting_dtype
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPT, Block, GPTConfig


class Strategy(StrEnum):
    """How parameters are distributed over the ranks."""

    GYRE = "Gyre"
    FSDP2_SUB_BLOCK = "FSDP2 per sub-block"
    FSDP2_LAYER = "FSDP2 per layer"
    DDP = "DDP"


def distribute(
    config: TrainConfig, strategy: Strategy, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    """The configured model as one of the mesh's ranks holds it.

    A rotated one has no values yet, and others are made on ``device``.
    """
    if strategy is Strategy.GYRE:
        return rotated(config, mesh)
    shards = strategy is not Strategy.DDP
    with device:
        model = (
            FullySharded(config.model)
            if shards and isinstance(config.model, GPTConfig)
            else plain(config.model)
        )
        set_resting_dtype(model, config)
    add_fake_adapters(model, config, device)
    if shards and not isinstance(model, GPT):
        model.set_output_embeddings(LossHead(model.get_output_embeddings()))  # type: ignore[operator]
    if config.memory.recompute != "none":
        _recompute(model)
    if strategy is Strategy.DDP:
        return data_parallel(model, mesh)
    return fully_sharded(model, config, mesh, per_layer=strategy is Strategy.FSDP2_LAYER)


def add_fake_adapters(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Put the configured adapters into a model of fake tensors, whose values nobody reads.

    They are made on `meta` first: peft moves others to the device, which fake tensors refuse.
    """
    with torch.device("meta"):
        add_adapters(model, config)
    allocate(model, device)


def _recompute(model: nn.Module) -> None:
    """Keep only the inputs of norms by means of torch's checkpoints, as rotation does.

    Of a model of transformers only the inputs of layers are kept, as that library has it.
    """
    for block in blocks_of(model):
        if isinstance(block, Block):
            block.forward = partial(_by_parts, block)  # type: ignore[method-assign]
        else:
            block.forward = partial(_again, block.forward)


_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _by_parts(block: Block, x_BTD: Tensor, rope_TC: Tensor) -> Tensor:
    x_BTD = x_BTD + _again(lambda x: block.attention(block.attention_norm(x), rope_TC), x_BTD)
    output: Tensor = x_BTD + _again(lambda x: block.mlp(block.mlp_norm(x)), x_BTD)
    return output


class FullySharded(GPT):
    """A GPT whose head computes the loss, so that FSDP2 gathers the head around it.

    The logits never exist as a whole.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.end = LossHead(self.head)
        del self.head

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """As the loss of a GPT, for targets of equal weight."""
        assert weights_BT is None
        self.end.compute = partial(linear_cross_entropy, targets=targets_BT)
        loss: Tensor = self.end(self._features(tokens_BT))
        self.end.loss = None  # not for longer than the caller holds it
        return loss


def fully_sharded(
    model: nn.Module, config: TrainConfig, mesh: DeviceMesh, *, per_layer: bool
) -> nn.Module:
    """FSDP2 over whole blocks, or over each attention and each MLP.

    Embedding and head are sharded by themselves unless they are tied.
    """
    dtype = getattr(torch, config.precision.compute_dtype)
    mixed = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=getattr(torch, config.precision.grad_dtype)
    )
    shard = partial(fully_shard, mesh=mesh, mp_policy=mixed)
    for block in blocks_of(model):
        for part in [block] if per_layer else sub_blocks(block):
            shard(part)
    library: Any = model
    if isinstance(model, FullySharded):
        ends = [model.embedding, model.end]
    else:
        ends = [library.get_input_embeddings(), library.get_output_embeddings()]
    if ends[0].weight is not ends[1].weight:
        for end in ends:
            shard(end)
    shard(model)
    if isinstance(model, FullySharded):
        register_fsdp_forward_method(model, "loss")
    return model


def sub_blocks(block: nn.Module) -> list[nn.Module]:
    """The parts of a block that have matrices, such as attention and MLP; of a list each item."""
    parts = [
        part
        for child in block.children()
        for part in (child if isinstance(child, nn.ModuleList) else [child])
    ]
    return [part for part in parts if any(each.ndim > 1 for each in part.parameters())]


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """DDP with `gradient_as_bucket_view=True`; its own C++ cannot run on fake tensors.

    Each gradient has separate memory from the start, as in DDP's buckets, and one all-reduce.
    """
    averaging = SimpleNamespace(postponed=False)  # `no_sync` finds it at the model, and sets it

    def average(kept: Tensor, parameter: Tensor) -> None:
        if parameter.grad is not None and not same_storage(parameter.grad, kept):
            parameter.grad = kept.copy_(parameter.grad)
        if not averaging.postponed:
            kept /= mesh.size()
            dist.all_reduce(kept, group=mesh.get_group())

    for parameter in model.parameters():
        if parameter.requires_grad:
            hook = partial(average, torch.zeros_like(parameter))
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    model.grad_averaging = averaging  # type: ignore[assignment]
    return model
