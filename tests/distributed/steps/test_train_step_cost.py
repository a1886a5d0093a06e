"""A dry run predicts the bytes that real ranks measure: exactly, but for choices of experts."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.baselines import Strategy, distribute
from gyre_trainer.accounting.step_cost import StepCost, dry_run, measure_step
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.build import encode_frozen
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig, build
from torch import Tensor

from tests.distributed.conftest import StartRanks

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


PLAIN = {
    "vocab_size": 512,
    "num_layers": 2,
    "dim": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "hidden_dim": 192,
    "max_seq_len": 32,
}
UNEVEN = PLAIN | {
    "vocab_size": 500,
    "dim": 48,
    "num_heads": 6,
    "num_kv_heads": 3,
    "hidden_dim": 100,
    "bias": True,
}
CONFIGS: dict[tuple[int, str], dict[str, Any]] = {
    (2, "plain"): {"model": PLAIN},
    (2, "wide vocabulary, recomputation, no clipping"): {
        "model": PLAIN | {"vocab_size": 8192},
        "memory": {"recompute": "block"},
        "optimizer": {"clip_norm": 0.0},
    },
    (2, "of transformers, recomputation"): {
        "model": {"config": LLAMA},
        "memory": {"recompute": "block"},
    },
    (2, "of transformers, small modules replicated"): {
        "model": {"config": LLAMA},
        "memory": {"min_numel": 2**18},
    },
    (3, "tied, uneven, bfloat16, in two parts"): {
        "model": UNEVEN | {"tie_embeddings": True, "gated_mlp": False, "norm": "layer"},
        "precision": {"compute_dtype": "bfloat16"},
        "optimizer": {"accumulation_steps": 2},
    },
}
FROZEN = ("int8", "nf4")  # of one layer
for _frozen in FROZEN:
    _model = {"config": LLAMA | {"num_hidden_layers": 1}, "lora": {"rank": 2, "frozen": _frozen}}
    CONFIGS[2, _frozen] = {"model": _model}


def measured(settings: TrainConfig, strategies: Sequence[Strategy]) -> dict[Strategy, StepCost]:
    """The cost of a step under each strategy, with real tensors and messages. Runs on each rank."""
    step_costs = {}
    for strategy in strategies:
        gc.collect()  # models before, of other tests too, keep a ring that may have larger buffers
        model = distribute(settings, strategy, make_mesh("cpu"), torch.device("cpu"))
        if strategy is Strategy.GYRE:
            materialize(model, seed=0)
            encode_frozen(model, settings, make_mesh("cpu"))
        here = rows(settings)
        step_costs[strategy] = measure_step(model, settings, Examples(here, here, None))
    return step_costs


@pytest.mark.parametrize(("num_ranks", "variant"), CONFIGS)
def test_a_dry_run_counts_the_bytes_of_a_real_step(
    num_ranks: int, variant: str, ranks: StartRanks
) -> None:
    settings = config(CONFIGS[num_ranks, variant])
    strategies = [Strategy.GYRE] if variant in FROZEN else [*Strategy]
    for strategy, real in ranks(num_ranks).run(measured, settings, strategies)[0].items():
        dry = dry_run(settings, strategy, num_ranks)
        assert dry.timeline.peak() == real.timeline.peak(), strategy
        assert dry.sent_bytes == real.sent_bytes, strategy
        assert dry.timeline.at(-1) == real.timeline.at(-1), strategy


EXPERTS = {
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16},
}


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        *(pytest.param(each, marks=pytest.mark.models) for each in ("mixtral", "qwen3_moe")),
    ],
)
def test_a_plan_of_experts_counts_within_a_twentieth_of_what_tokens_choose(
    family: str, ranks: StartRanks
) -> None:
    sizes = LLAMA | {"use_cache": False, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    settings = config({"model": {"config": sizes | EXPERTS[family] | {"model_type": family}}})
    real = ranks(2).run(measured, settings, [Strategy.GYRE])[0][Strategy.GYRE]
    dry = dry_run(settings, Strategy.GYRE, 2)
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert dry.sent_bytes == real.sent_bytes
    assert dry.assumes_even_routing
