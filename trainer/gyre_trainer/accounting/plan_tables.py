"""`gyre-train plan`: what becomes of each module, and what a step takes of a rank, before anything is trained."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.dry_run import dry_run, on_fake_ranks
from gyre_trainer.accounting.live_bytes import CATEGORIES
from gyre_trainer.accounting.step_cost import StepCost
from gyre_trainer.inspection.rotation_plan import plan_of
from gyre_trainer.inspection.table import table
from gyre_trainer.training.build import rotated
from gyre_trainer.training.config import TrainConfig

StepCosts = Mapping[Strategy, StepCost]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one module's parameters, or of those of several modules that are alike.

    Attributes:
        path: with * for the numbers where they are several.
        rule: the name of its class, or "replicated".
        num_modules: that this row is about.
        num_bytes: of their whole parameters.
        num_bytes_here: of what rank 0 keeps, which has the largest slices.
    """

    path: str
    rule: str
    num_modules: int
    num_bytes: int
    num_local_bytes: int


def rows(config: TrainConfig, num_ranks: int) -> list[Row]:
    """The configured model's modules in their order, as they lie on rank 0 of so many; what is tied stands where it is first.

    Raises:
        RotationError: the model cannot be shared among so many ranks.
    """
    with on_fake_ranks(num_ranks) as mesh:
        entries = plan_of(rotated(config, mesh)).entries
    merged: dict[tuple[str, str, int], Row] = {}
    for entry in entries:
        path, rule = re.sub(r"\b\d+\b", "*", entry.path), entry.rule or entry.how
        before = merged.get((path, rule, entry.num_bytes))
        row = Row(entry.path, rule, 1, entry.num_bytes, entry.num_local_bytes)
        merged[path, rule, entry.num_bytes] = row if before is None else _joined(path, before, row)
    return list(merged.values())


def _joined(path: str, one: Row, other: Row) -> Row:
    num_modules = one.num_modules + other.num_modules
    return Row(path, one.rule, num_modules, one.num_bytes + other.num_bytes, one.num_local_bytes + other.num_local_bytes)


def step_costs(config: TrainConfig, num_ranks: int) -> dict[Strategy, StepCost]:
    """What one step takes of rank 0 under each strategy.

    Raises:
        ConfigError: the batch cannot be shared among so many ranks.
        RotationError: the model cannot.
    """
    return {strategy: dry_run(config, strategy, num_ranks) for strategy in Strategy}


def text(config: TrainConfig, num_ranks: int) -> str:
    """The whole plan, to be printed."""
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
            "What is alive on a rank at the moment of a step when it is most:",
            peaks(costs),
        ]
    )


def peaks(costs: StepCosts) -> str:
    """A table: each strategy's live bytes at its peak by category, their sum, and what it sends per step."""
    at_peak = {strategy: measure_step.timeline.peak() for strategy, measure_step in costs.items()}
    lines = [["", *costs]]
    lines += [[category, *(mib(peak[category]) for peak in at_peak.values())] for category in CATEGORIES]
    lines.append(["peak", *(mib(measure_step.timeline.peak_bytes) for measure_step in costs.values())])
    lines.append(["sent per step", *(mib(measure_step.sent_bytes) for measure_step in costs.values())])
    return table(lines, num_texts=1)


def mib(num_bytes: int) -> str:
    """In MiB, to four digits or so."""
    value = num_bytes / 2**20
    num_decimals = next((num for num, least in enumerate((1000, 100, 1)) if value >= least), 4 if num_bytes else 0)
    return f"{value:,.{num_decimals}f}"
