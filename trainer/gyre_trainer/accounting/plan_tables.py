"""`gyre-train plan`: what becomes of each module, and what a step costs a rank, before training."""

import re
from collections.abc import Mapping, Sequence

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.dry_run import dry_run, on_fake_ranks
from gyre_trainer.accounting.live_bytes import CATEGORIES
from gyre_trainer.accounting.step_cost import StepCost
from gyre_trainer.inspection.rotation_plan import PlanEntry
from gyre_trainer.inspection.table import table
from gyre_trainer.rotate import plan_of
from gyre_trainer.training.build import rotated
from gyre_trainer.training.config import TrainConfig

StepCosts = Mapping[Strategy, StepCost]


def modules_table(config: TrainConfig, num_ranks: int) -> str:
    """A table of the configured model's modules, with their MiB and those on rank 0.

    Rank 0 has the largest slices. Modules that differ only in the numbers in their paths share a
    row. Tied parameters appear at their first module.

    Raises:
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    with on_fake_ranks(num_ranks) as mesh:
        entries = plan_of(rotated(config, mesh)).entries
    alike: dict[tuple[str, str, int], list[PlanEntry]] = {}
    for entry in entries:
        path = re.sub(r"\b\d+\b", "*", entry.path)
        alike.setdefault((path, entry.rule or entry.how, entry.num_bytes), []).append(entry)
    lines = [["module", "rule", "bytes", "per rank"]]
    for (path, rule, _), each in alike.items():
        name = f"{path} x{len(each)}" if len(each) > 1 else each[0].path
        lines.append([name, rule, *_sizes(each)])
    lines.append(["total", "", *_sizes(entries)])
    return table(lines, num_texts=2)


def _sizes(entries: Sequence[PlanEntry]) -> tuple[str, str]:
    """MiB of the whole parameters, and of those that rank 0 keeps."""
    whole = sum(entry.num_bytes for entry in entries)
    return mib(whole), mib(sum(entry.num_local_bytes for entry in entries))


def step_costs(config: TrainConfig, num_ranks: int) -> dict[Strategy, StepCost]:
    """What one step costs rank 0 under each strategy.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    return {strategy: dry_run(config, strategy, num_ranks) for strategy in Strategy}


def text(config: TrainConfig, num_ranks: int) -> str:
    """The whole plan, for printing."""
    num_samples, length = config.data.batch_size // num_ranks, config.data.sequence_length
    per_step = f"{num_samples} x {length} tokens on each per step"
    costs = step_costs(config, num_ranks)
    return "\n\n".join(
        [
            f"{num_ranks} ranks; {per_step}; all figures in MiB",
            modules_table(config, num_ranks),
            "Live bytes of a rank at the peak of a step:",
            peaks(costs),
        ]
    )


def peaks(costs: StepCosts) -> str:
    """A table of each strategy's live bytes at its peak, by category, and its bytes sent."""
    at_peak = {strategy: cost.timeline.peak() for strategy, cost in costs.items()}
    lines = [["", *costs]]
    lines += [
        [category, *(mib(peak[category]) for peak in at_peak.values())] for category in CATEGORIES
    ]
    lines.append(["peak", *(mib(cost.timeline.peak_bytes) for cost in costs.values())])
    lines.append(["sent per step", *(mib(cost.sent_bytes) for cost in costs.values())])
    return table(lines, num_texts=1)


def mib(num_bytes: int) -> str:
    """The number in MiB, with about four digits."""
    value = num_bytes / 2**20
    num_decimals = next(
        (num for num, least in enumerate((1000, 100, 1)) if value >= least), 4 if num_bytes else 0
    )
    return f"{value:,.{num_decimals}f}"
