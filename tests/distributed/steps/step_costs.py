"""Models whose steps are measured on real ranks and counted in dry runs."""

from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.training.config import TrainConfig, build
from torch import Tensor

CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(sections: dict[str, Any]) -> TrainConfig:
    """Slice by slice, unless the sections say otherwise, as these models are small."""
    memory = {"min_numel": 0} | sections.get("memory", {})
    required = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {"dataset": "none", "batch_size": 12, "sequence_length": 32},
    }
    return build(TrainConfig, required | sections | {"memory": memory}, "")


def rows(settings: TrainConfig) -> Tensor:
    """Tokens as a plan takes them to be: those of a rank's part of a step all differ, where the
    vocabulary has as many, and lie evenly in the vocabulary. Ranks have them in other orders.
    """
    num_rows = settings.data.batch_size // dist.get_world_size()
    num_parts = settings.optimizer.accumulation_steps
    numel = num_rows * settings.data.sequence_length // num_parts
    size = settings.model.vocab_size
    tokens = torch.arange(numel) * size // numel if numel < size else torch.arange(numel) % size
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = [tokens[torch.randperm(numel, generator=generator)] for _ in range(num_parts)]
    return torch.cat(parts).view(num_rows, -1)
