"""What `gyre-train plan` recommends, and what it says of sequences that are too long."""

from typing import Any

import numpy as np
import pytest
from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.counters import CATEGORIES, Category, Timeline
from gyre_trainer.accounting.plan import Rates, Way, recommendation, rings
from gyre_trainer.accounting.step_cost import StepCost
from gyre_trainer.training.library import num_positions

MIB = 2**20
NAMES = {each.name.lower(): each for each in Strategy}


def advice(costs: dict[str, tuple[float, float]], memory_gib: float | None = None) -> str:
    """What is said of strategies with these peaks in MiB, and seconds of a step."""
    peaks = {str(NAMES[name]): peak * MIB for name, (peak, _) in costs.items()}
    seconds = {str(NAMES[name]): seconds for name, (_, seconds) in costs.items()}
    return recommendation(peaks, seconds, memory_gib and memory_gib * 2**30)


ALIKE = {"gyre": (190.9, 1.0), "fsdp2_sub_block": (191.4, 1.01), "ddp": (300.0, 1.0)}


def test_less_than_a_twentieth_is_no_difference() -> None:
    assert advice(ALIKE) == (
        "Gyre and FSDP2 per sub-block differ by less than 5% in memory and time, which is not "
        "worth a change: keep the one that you have."
    )
    assert advice(ALIKE, 1.0).endswith("keep the one that you have. They fit into 1 GiB.")


@pytest.mark.parametrize(
    ("memory_gib", "costs", "said"),
    [
        (
            None,
            {"gyre": (100, 1.0), "ddp": (120, 1.0)},
            "Take Gyre: nothing is smaller or faster by 5%.",
        ),
        (
            None,
            {"gyre": (100, 1.2), "fsdp2_layer": (130, 1.01), "ddp": (150, 1.0)},
            "Take FSDP2 per layer where a rank has 0.141 GiB or more; otherwise Gyre, the",
        ),
        (1.0, {"gyre": (100, 1.0), "ddp": (120, 1.0)}, "Take Gyre: the smallest of those that fit"),
        (1.0, {"gyre": (100, 1.2), "ddp": (120, 1.0)}, "Take DDP: the fastest of those that fit"),
        (0.11, {"gyre": (100, 1.2), "ddp": (120, 1.0)}, "Take Gyre: the fastest of those that fit"),
        (
            0.01,
            {"gyre": (100, 1.2), "ddp": (120, 1.0)},
            "Nothing fits into 90% of 0.01 GiB; Gyre is",
        ),
    ],
)
def test_a_difference_that_counts_is_told(
    memory_gib: float | None, costs: dict[str, tuple[float, float]], said: str
) -> None:
    assert advice(costs, memory_gib).startswith(said)


def cost_of(peak: int, operations: int, sent_bytes: int, num_operators: int) -> StepCost:
    live = np.array([[peak * (each is Category.PARAMETERS) for each in CATEGORIES]])
    return StepCost(Timeline(["step"], live), sent_bytes, operations, num_operators=num_operators)


def test_sizes_of_rings_lie_between_those_that_were_counted() -> None:
    """Of 8 ranks: a part of each figure is 1/n of something, and operators grow with n."""
    counted = {n: cost_of(100 + 800 // n, 10**9, 5000 - 4000 // n, 10 * n) for n in (2, 8)}
    two, four, eight = rings(counted, 8, 8, gradient_bytes=4800).values()
    assert [(each.size, each.replicas, each.is_counted) for each in (two, four, eight)] == [
        (2, 4, True),
        (4, 2, False),
        (8, 1, True),
    ]
    assert (four.cost.peak_bytes, four.cost.sent_bytes) == (300, 4000)
    assert (four.cost.operations, four.cost.num_operators) == (10**9, 40)
    # an all-reduce among R replicas: 2 (R - 1) / R of a rank's 1/n of the gradients
    assert [each.averaged_bytes for each in (two, four, eight)] == [3600, 1200, 0]


def test_a_step_is_bound_by_what_is_slowest() -> None:
    inside, between = 1e4, 1e3
    rates = Rates(1e9, inside, between, ranks_per_host=4, operator_s=0.001)
    ring = rings({4: cost_of(1, 10**9, 5000, 0)}, 8, 4, gradient_bytes=0)[4]
    assert ring.seconds(rates) == 1.0  # computes for 1 s, sends for 0.5 s in its host
    whole = rings({8: cost_of(1, 10**9, 5000, 0)}, 8, 8, gradient_bytes=0)[8]
    assert whole.seconds(rates) == 5.0  # crosses the hosts' links
    ring = rings({4: cost_of(1, 10**9, 0, 0)}, 8, 4, gradient_bytes=4000)[4]
    # four ranks of a host share its link while backward computes for two thirds of a second
    assert ring.seconds(rates) == pytest.approx(1 / 3 + 1000 / (between / 4))
    busy = Way(Strategy.FSDP2_LAYER, cost_of(1, 10**9, 0, 7000), 8)
    assert busy.seconds(rates) == pytest.approx(7.0)  # the host
    sends = Way(Strategy.DDP, cost_of(1, 10**9, 5000, 0), 8)
    assert sends.seconds(rates) == pytest.approx(1 / 3 + 5.0)  # in backward alone


LONG: dict[str, Any] = {"max_position_embeddings": 100}
FROM_50 = {"original_max_position_embeddings": 50}


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("GPT2", {"n_positions": 70}, 70),
        ("Bert", {"max_position_embeddings": 12}, 12),
        ("Llama", LONG, 100),
        ("Llama", {**LONG, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 400),
        ("Qwen2", {**LONG, "rope_scaling": {"rope_type": "yarn", **FROM_50, "factor": 4.0}}, 200),
        (
            "Llama",
            {
                **LONG,
                "rope_scaling": {
                    "rope_type": "llama3",
                    **FROM_50,
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
            100,
        ),
        ("Bloom", {}, None),
        ("T5", {}, None),
    ],
)
def test_positions_are_those_that_the_model_was_made_for(
    name: str, options: dict[str, Any], most: int | None
) -> None:
    import transformers

    assert num_positions(getattr(transformers, f"{name}Config")(**options)) == most
