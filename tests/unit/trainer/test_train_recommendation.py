"""What `gyre-train plan` recommends, and what it says of sequences that are too long."""

from typing import Any

import pytest
from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.depth import StepFigures
from gyre_trainer.accounting.estimate import Rates, recommendation
from gyre_trainer.accounting.live_bytes import CATEGORIES, Category
from gyre_trainer.training.models.library import num_positions

MIB = 2**20
NAMES = {each.name.lower(): each for each in Strategy}


def advice(costs: dict[str, tuple[float, float]], memory_gib: float | None = None) -> str:
    """What is said of strategies with these peaks in MiB, and seconds of a step."""
    figures = {
        NAMES[name]: StepFigures(
            dict.fromkeys(CATEGORIES, 0) | {Category.PARAMETERS: int(peak * MIB)},
            0,
            int(seconds * 1e9),
        )
        for name, (peak, seconds) in costs.items()
    }
    return recommendation(figures, Rates(1e9, 1e9), memory_gib and memory_gib * 2**30)


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
