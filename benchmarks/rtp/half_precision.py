"""How far losses in bfloat16 are from float32: rotated, sharded by FSDP2, and by autocast alone.

    python -m benchmarks.rtp.half_precision [--ranks 2 4] [--seeds 16]

A small Llama of transformers, AdamW, float32 parameters. Each seed draws other initial values and
other tokens. The distance of a run is the root mean square of the differences between its losses
and those of float32 in one process; printed are the median and the quartiles over the seeds.
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.rtp.ranks import run_on_ranks

_NUM_STEPS, _NUM_SEQUENCES, _NUM_TOKENS = 12, 8, 12
_CONFIG: Any = cast("Any", LlamaConfig)(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=2,
    use_cache=False,
)


def _rotate(model: Any, residual_dtype: torch.dtype) -> None:
    policy = RotationPolicy(
        compute_dtype=torch.bfloat16,
        residual_dtype=residual_dtype,
    )
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy, min_numel=0)


def _shard(model: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


_WAYS: dict[str, Callable[[Any], None]] = {
    "rotated": lambda model: _rotate(model, torch.bfloat16),
    "rotated, `residual_dtype=torch.float32`": lambda model: _rotate(model, torch.float32),
    "FSDP2": _shard,
}


def losses(seed: int, *, autocast: bool = False, way: str = "") -> list[float]:
    """The global batch's mean loss before each step; with a way, each rank computes its part."""
    torch.manual_seed(seed)
    model = cast("Any", LlamaForCausalLM)(_CONFIG)
    num_parts, part = 1, 0
    if way:
        num_parts, part = dist.get_world_size(), dist.get_rank()
        _WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    found = []
    for step in range(_NUM_STEPS):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(64, (_NUM_SEQUENCES, _NUM_TOKENS), generator=generator)
        tokens = tokens.chunk(num_parts)[part]
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().float())
    means = torch.stack(found)
    if way:
        dist.all_reduce(means)
    return (means / num_parts).tolist()


def _on_ranks(way: str, num_seeds: int) -> list[list[float]]:
    return [losses(seed, way=way) for seed in range(num_seeds)]


def _distances(found: list[list[float]], exact: list[list[float]]) -> list[float]:
    apart = torch.tensor(found) - torch.tensor(exact)
    return apart.square().mean(1).sqrt().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    exact = [losses(seed) for seed in range(options.seeds)]
    found = {
        "autocast, one process": [losses(seed, autocast=True) for seed in range(options.seeds)]
    }
    for num_ranks, way in product(options.ranks, _WAYS):
        found[f"{way}, {num_ranks} ranks"] = run_on_ranks(num_ranks, _on_ranks, way, options.seeds)[
            0
        ]
    print("| | median distance to float32 | quartiles |\n|---|---:|---:|")
    for name, runs in found.items():
        low, middle, high = statistics.quantiles(_distances(runs, exact), n=4)
        print(f"| {name} | {middle:.1e} | {low:.1e} to {high:.1e} |")


if __name__ == "__main__":
    main()
