"""A dry run predicts the bytes that real ranks measure, exactly."""

import gc
from typing import Any

import pytest
from gyre_trainer.accounting.baselines import Strategy, distribute
from gyre_trainer.accounting.step_cost import StepCost, dry_run, measure_step
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig

from tests.distributed.conftest import StartRanks
from tests.distributed.steps.step_costs import CPU, LLAMA, config, rows

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


def measured(settings: TrainConfig) -> dict[Strategy, StepCost]:
    """The cost of a step under each strategy, with real tensors and messages. Runs on each rank."""
    step_costs = {}
    for strategy in Strategy:
        gc.collect()  # models before, of other tests too, keep a ring that may have larger buffers
        model = distribute(settings, strategy, make_mesh("cpu"), CPU)
        if strategy is Strategy.GYRE:
            materialize(model, seed=0)
        here = rows(settings)
        step_costs[strategy] = measure_step(model, settings, Examples(here, here, None))
    return step_costs


@pytest.mark.parametrize(("num_ranks", "variant"), CONFIGS)
def test_a_dry_run_counts_the_bytes_of_a_real_step(
    num_ranks: int, variant: str, ranks: StartRanks
) -> None:
    settings = config(CONFIGS[num_ranks, variant])
    real = ranks(num_ranks).run(measured, settings)[0]
    for strategy in Strategy:
        dry = dry_run(settings, strategy, num_ranks)
        assert dry.timeline.peak() == real[strategy].timeline.peak(), strategy
        assert dry.sent_bytes == real[strategy].sent_bytes, strategy
        assert dry.timeline.at(-1) == real[strategy].timeline.at(-1), strategy
