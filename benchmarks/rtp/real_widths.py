"""Peaks of models of `transformers` at their real widths, counted on fake tensors for one rank.

    python -m benchmarks.rtp.models --widths real [--ranks 4] [--tokens 4096 16384]
        [--models gpt2-xl mixtral-8x7b]

Gyre recomputes blocks, or whole layers (`memory.recompute`). FSDP2 wraps each layer, or each
attention and MLP, with torch's checkpoint around each layer; ratios are to the smaller peak of
both. The loss is by slices of the vocabulary, or in chunks, bfloat16 travels and computes, and
parameters, gradients and AdamW's states are float32. *Shards* are 1/N of these: both keep them all
at the end of a backward, so no ratio can be smaller.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.step_cost import StepCost, step_costs
from gyre_trainer.training.build import plain
from gyre_trainer.training.config import TrainConfig, build

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}
_TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model by the keys of its configuration.

    Attributes:
        config: the keys.
        max_tokens: of one sequence.
    """

    config: Mapping[str, Any]
    max_tokens: int = 1 << 20


def _sizes(
    kind: str, width: int, hidden: int, layers: int, heads: tuple[int, int], vocabulary: int
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "max_position_embeddings": 1 << 17,
    }


MODELS = {
    "llama-3.2-1b": RealModel(_sizes("llama", 2048, 8192, 16, (32, 8), 128256) | _TIED),
    "qwen2-1.5b": RealModel(_sizes("qwen2", 1536, 8960, 28, (12, 2), 151936) | _TIED),
    "phi-3-mini": RealModel(
        _sizes("phi3", 3072, 8192, 32, (32, 32), 32064)
        | {"pad_token_id": 32000, "original_max_position_embeddings": 1 << 17}
    ),
    "gpt2-xl": RealModel(_GPT2_XL | _NO_DROPOUT, 1024),
    # on CPUs, attention that drops out has no kernel that does without the probabilities
    "gpt2-xl-dropout": RealModel(_GPT2_XL, 1024),
    "gpt2-xl-dropout-not-in-attention": RealModel(_GPT2_XL | {"attn_pdrop": 0.0}, 1024),
    "mixtral-8x7b": RealModel(
        _sizes("mixtral", 4096, 14336, 32, (32, 8), 32000)
        | {"num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "qwen3-30b-a3b": RealModel(
        _sizes("qwen3_moe", 2048, 6144, 48, (32, 4), 151936)
        | {"head_dim": 128, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8}
    ),
}
_WAYS = {
    "Gyre, blocks": (Strategy.GYRE, False),
    "Gyre, layers": (Strategy.GYRE, True),
    "FSDP2 per layer": (Strategy.FSDP2_LAYER, False),
    "FSDP2 per sub-block": (Strategy.FSDP2_SUB_BLOCK, False),
}


def config_of(
    model: RealModel, num_tokens: int, num_ranks: int, *, layers: bool = False
) -> TrainConfig:
    """A step in which each rank has so many tokens."""
    length = min(num_tokens, model.max_tokens)
    if num_tokens % length:
        raise ValueError(f"{num_tokens} tokens are no whole sequences of {length}")
    table: dict[str, Any] = {
        "run": {"out": "run", "steps": 1},
        "data": {
            "dataset": "none",
            "sequence_length": length,
            "batch_size": num_tokens // length * num_ranks,
        },
        "model": {"config": dict(model.config)},
        "memory": {"recompute": "layer" if layers else "block"},
        "precision": {"compute_dtype": "bfloat16"},
    }
    return build(TrainConfig, table)


def counted(model: RealModel, num_tokens: int, num_ranks: int) -> list[StepCost]:
    """The cost of a step for rank 0 in each way."""
    return step_costs(
        [
            (config_of(model, num_tokens, num_ranks, layers=layers), strategy, num_ranks)
            for strategy, layers in _WAYS.values()
        ]
    )


def shards_of(model: RealModel, num_ranks: int) -> int:
    """Bytes of 1/N of float32 parameters, gradients and two states."""
    with torch.device("meta"):
        built = plain(config_of(model, 1, num_ranks).model)
    return sum(each.numel() for each in built.parameters()) * 16 // num_ranks


def print_table(names: Sequence[str], tokens: Sequence[int], num_ranks: int) -> None:
    """Print a row for each model and number of tokens as soon as it is known."""
    ratios = "blocks to FSDP2 | layers to FSDP2 | shards to FSDP2"
    heads = f"tokens of a rank | {' | '.join(_WAYS)} | {ratios} | blocks sent | layers sent"
    print(f"{num_ranks} ranks; peaks in GiB\n\n| | {heads} |")
    print("|---" + "|---:" * 10 + "|", flush=True)
    for name, num_tokens in product(names, tokens):
        found = counted(MODELS[name], num_tokens, num_ranks)
        cells = _cells(found, shards_of(MODELS[name], num_ranks))
        print(f"| {name} | {num_tokens:,} | {' | '.join(cells)} |", flush=True)


def _cells(found: Sequence[StepCost], num_shard_bytes: int) -> Iterator[str]:
    *gyre, _, _ = found
    best = min(found[2:], key=lambda each: each.peak_bytes)
    yield from (f"{each.peak_bytes / 2**30:.2f}" for each in found)
    for num_bytes in (*(each.peak_bytes for each in gyre), num_shard_bytes):
        yield f"{num_bytes / best.peak_bytes:.2f}"
    for each in gyre:
        yield f"{each.sent_bytes / best.sent_bytes:.2f}"
