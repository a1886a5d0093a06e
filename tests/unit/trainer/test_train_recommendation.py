"""What `gyre-train plan` recommends, and the time that it estimates."""

import numpy as np
import pytest
from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.counters import CATEGORIES, Category, Timeline
from gyre_trainer.accounting.plan import Rates, Way, recommendation
from gyre_trainer.accounting.step_cost import StepCost

MIB = 2**20
NAMES = {each.name.lower(): each for each in Strategy}


def advice(costs: dict[str, tuple[float, float]], memory_gib: float | None = None) -> str:
    """What is said of strategies with these peaks in MiB, and seconds of a step."""
    rates = Rates(operations_per_s=1e6, bytes_per_s=1.0)
    ways = [
        Way(NAMES[name], cost_of(int(peak * MIB), int(1e6 * seconds), 0, 0), rates, 1)
        for name, (peak, seconds) in costs.items()
    ]
    return recommendation(ways, memory_gib and memory_gib * 2**30)


ALIKE = {"gyre": (190.9, 1.0), "fsdp2_sub_block": (191.4, 1.01), "ddp": (300.0, 1.0)}


def test_less_than_a_twentieth_is_no_difference() -> None:
    assert advice(ALIKE) == (
        "Gyre and FSDP2 per sub-block differ by less than 5% in memory and time, which is not "
        "worth a change: keep the one that you have."
    )
    assert advice(ALIKE, 1.0).endswith("keep the one that you have.")


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
        (
            1.0,
            {"gyre": (100, 1.0), "ddp": (120, 1.0)},
            "Take Gyre: nothing that fits into 1 GiB",
        ),
        (1.0, {"gyre": (100, 1.2), "ddp": (120, 1.0)}, "Take DDP: nothing that fits into 1 GiB"),
        (
            0.11,
            {"gyre": (100, 1.2), "ddp": (120, 1.0)},
            "Take Gyre: nothing that fits into",
        ),
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


def test_replicas_average_their_part_of_the_gradients() -> None:
    """By an all-reduce among R replicas: 2 (R - 1) / R of a rank's 1/n of the gradients."""
    cost = cost_of(100, 10**9, 5000, 20)
    ways = [Way("Gyre", cost, Rates(), n, 8 // n, gradient_bytes=4800) for n in (2, 4, 8)]
    assert [each.averaged_bytes for each in ways] == [3600, 1200, 0]


def test_rings_with_replicas_name_their_key() -> None:
    rates = Rates(operations_per_s=1.0, bytes_per_s=1.0)
    ways = [
        Way("Gyre", cost_of(100, 20, 0, 0), rates, 4),
        Way("Gyre, rings of 2", cost_of(120, 10, 0, 0), rates, 2, 2),
    ]
    assert recommendation(ways, 1e6).endswith("faster by 5%. Set run.replicas = 2.")
    assert "replicas" not in recommendation(ways[:1], 1e6)


def test_a_step_is_bound_by_what_is_slowest() -> None:
    inside, between = 1e4, 1e3
    rates = Rates(1e9, inside, between, ranks_per_host=4, operator_s=0.001)
    ring = Way("Gyre", cost_of(1, 10**9, 5000, 0), rates, 4, 2)
    assert ring.step_s == 1.0  # computes for 1 s, sends for 0.5 s in its host
    whole = Way("Gyre", cost_of(1, 10**9, 5000, 0), rates, 8)
    assert whole.step_s == 5.0  # crosses the hosts' links
    ring = Way("Gyre", cost_of(1, 10**9, 0, 0), rates, 4, 2, gradient_bytes=4000)
    # four ranks of a host share its link while backward computes for two thirds of a second
    assert ring.step_s == pytest.approx(1 / 3 + 1000 / (between / 4))
    busy = Way(Strategy.FSDP2_LAYER, cost_of(1, 10**9, 0, 7000), rates, 8)
    assert busy.step_s == pytest.approx(7.0)  # the host
    sends = Way(Strategy.DDP, cost_of(1, 10**9, 5000, 0), rates, 8)
    assert sends.step_s == pytest.approx(1 / 3 + 5.0)  # in backward alone
