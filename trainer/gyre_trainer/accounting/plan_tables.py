"""`gyre-train plan`: what becomes of each module, and what a step costs a rank, before training."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.dry_run import dry_run, on_fake_ranks
from gyre_trainer.accounting.live_bytes import CATEGORIES
from gyre_trainer.accounting.step_cost import StepCost
from gyre_trainer.inspection.table import table
from gyre_trainer.rotate import plan_of
from gyre_trainer.training.build import rotated
from gyre_trainer.training.config import TrainConfig

StepCosts = Mapping[Strategy, StepCost]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of the parameters of one module, or of several modules that are alike.

    Attributes:
        path: the module's path; with * for the numbers where there are several modules.
        rule: the name of the rule's class, or "replicated".
        num_modules: the number of modules.
        num_bytes: bytes of their whole parameters.
        num_local_bytes: bytes that rank 0 keeps, which has the largest slices.
    """

    path: str
    rule: str
    num_modules: int
    num_bytes: int
    num_local_bytes: int


def rows(config: TrainConfig, num_ranks: int) -> list[Row]:
    """The configured model's modules in their order, on rank 0 of ``num_ranks``.

    Tied parameters appear at their first module.

    Raises:
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    with on_fake_ranks(num_ranks) as mesh:
        entries = plan_of(rotated(config, mesh)).entries
    merged: dict[tuple[str, str, int], Row] = {}
    for entry in entries:
        path, rule = re.sub(r"\b\d+\b", "*", entry.path), entry.rule or entry.how
        before = merged.get((path, rule, entry.num_bytes))
        row = Row(entry.path, rule, 1, entry.num_bytes, entry.num_local_bytes)
        merged[path, rule, entry.num_bytes] = row if before is None else _merged(path, before, row)
    return list(merged.values())


def _merged(path: str, one: Row, other: Row) -> Row:
    num_modules = one.num_modules + other.num_modules
    return Row(path, one.rule, num_modules, one.num_bytes + other.num_bytes, one.num_local_bytes + other.num_local_bytes)


def step_costs(config: TrainConfig, num_ranks: int) -> dict[Strategy, StepCost]:
    """What one step costs rank 0 under each strategy.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    return {strategy: dry_run(config, strategy, num_ranks) for strategy in Strategy}


def text(config: TrainConfig, num_ranks: int) -> str:
    """The whole plan, for printing."""
    costs, found = step_costs(config, num_ranks), rows(config, num_ranks)
    modules = [["module", "rule", "bytes", "per rank"]]
    for row in found:
        name = f"{row.path} x{row.num_modules}" if row.num_modules > 1 else row.path
        modules.append([name, row.rule, mib(row.num_bytes), mib(row.num_local_bytes)])
    modules.append(["total", "", mib(sum(row.num_bytes for row in found)), mib(sum(row.num_local_bytes for row in found))])
    num_samples, length = config.data.batch_size // num_ranks, config.data.sequence_length
    return "\n\n".join(
        [
            f"{num_ranks} ranks; {num_samples} x {length} tokens on each per step; all figures in MiB",
            table(modules, num_texts=2),
            "Live bytes of a rank at the peak of a step:",
            peaks(costs),
        ]
    )


def peaks(costs: StepCosts) -> str:
    """A table of each strategy's live bytes at its peak, by category, and its bytes sent."""
    at_peak = {strategy: cost.timeline.peak() for strategy, cost in costs.items()}
    lines = [["", *costs]]
    lines += [[category, *(mib(peak[category]) for peak in at_peak.values())] for category in CATEGORIES]
    lines.append(["peak", *(mib(cost.timeline.peak_bytes) for cost in costs.values())])
    lines.append(["sent per step", *(mib(cost.sent_bytes) for cost in costs.values())])
    return table(lines, num_texts=1)


def mib(num_bytes: int) -> str:
    """The number in MiB, with about four digits."""
    value = num_bytes / 2**20
    num_decimals = next((num for num, least in enumerate((1000, 100, 1)) if value >= least), 4 if num_bytes else 0)
    return f"{value:,.{num_decimals}f}"
