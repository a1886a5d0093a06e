"""The configured model, rotated before it exists."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.rotate import RotationPolicy, materialize, rotate_all
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPT
from gyre_trainer.training.rank_context import RankContext


def rotated(config: TrainConfig, mesh: DeviceMesh) -> GPT:
    """The model, rotated before it exists, so that no rank ever holds more than its own shards.

    Its parameters have no values until `materialize`.
    """
    with torch.device("meta"):
        model = GPT(config.model)
    dtypes = config.precision
    policy = RotationPolicy(
        compute_dtype=getattr(torch, dtypes.compute_dtype),
        grad_dtype=getattr(torch, dtypes.grad_dtype),
        recompute=config.memory.recompute,
    )
    rotate_all(model, mesh=mesh, policy=policy)
    return model


def build_model(config: TrainConfig, context: RankContext) -> GPT:
    """The rotated model with its initial weights."""
    model = rotated(config, context.mesh)
    materialize(model, seed=config.run.seed, device=context.device)
    return model
