"""A dry run of a model of transformers predicts the bytes that real ranks measure."""

import gc

import pytest
from gyre_trainer.accounting.baselines import Strategy, distribute
from gyre_trainer.accounting.step_cost import dry_run, measure_step
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.build import encode_frozen
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig

from tests.distributed.conftest import StartRanks
from tests.distributed.steps.step_costs import CPU, LLAMA, config, rows


def measured_by_family(families: dict[str, TrainConfig]) -> dict[str, tuple[int, int]]:
    """By family: the live bytes at the peak of a rotated step, and the bytes sent."""
    found = {}
    for family, settings in families.items():
        gc.collect()
        model = distribute(settings, Strategy.GYRE, make_mesh("cpu"), CPU)
        materialize(model, seed=0)
        encode_frozen(model, settings, make_mesh("cpu"))
        here = rows(settings)
        cost = measure_step(model, settings, Examples(here, here, None))
        found[family] = cost.timeline.peak_bytes, cost.sent_bytes
        del model, cost
    return found


@pytest.mark.parametrize("frozen", ["int8", "nf4"])
def test_a_dry_run_counts_the_codes_of_frozen_weights(frozen: str, ranks: StartRanks) -> None:
    settings = config(
        {
            "model": {
                "config": LLAMA | {"num_hidden_layers": 1},
                "lora": {"rank": 2, "frozen": frozen},
            }
        }
    )
    real = ranks(2).run(measured_by_family, {frozen: settings})[0][frozen]
    dry = dry_run(settings, Strategy.GYRE, 2)
    assert (dry.timeline.peak_bytes, dry.sent_bytes) == real


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
    peak, sent = ranks(2).run(measured_by_family, {family: settings})[0][family]
    dry = dry_run(settings, Strategy.GYRE, 2)
    assert dry.timeline.peak_bytes == pytest.approx(peak, rel=0.05)
    assert dry.sent_bytes == sent
    assert dry.assumes_even_routing
