"""`gyre-train plan`: what becomes of each module, and what a step costs a rank, before training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gyre_common.counts import counted

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.depth import FigureJobs, StepFigures
from gyre_trainer.accounting.estimate import (
    TENSOR_PARALLEL,
    Rates,
    measured_bytes_per_s,
    measured_operations_per_s,
    recommendation,
    step_seconds,
    tensor_parallel,
)
from gyre_trainer.accounting.live_bytes import CATEGORIES
from gyre_trainer.accounting.modules_table import mib, module_counts, modules_table
from gyre_trainer.accounting.side_by_side import Job, side_by_side
from gyre_trainer.inspection.table import table
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.models.gpt import GPTConfig
from gyre_trainer.training.models.library import library_config, num_positions
from gyre_trainer.training.models.library import shape_of as library_shape


@dataclass(frozen=True, slots=True)
class GivenRates:
    """Rates of a rank, as far as they are given."""

    operations_per_s: float | None = None
    bytes_per_s: float | None = None

    @property
    def operations_origin(self) -> str:
        """Where the rate of operations is from."""
        return "given" if self.operations_per_s else "measured here: a matrix product"

    @property
    def bytes_origin(self) -> str:
        """Where the rate of the link is from."""
        return "given" if self.bytes_per_s else "measured here: a copy in memory"

    def measured(self, dtype: torch.dtype) -> Rates:
        """The rates; what is not given is measured on this machine."""
        return Rates(
            self.operations_per_s or measured_operations_per_s(dtype),
            self.bytes_per_s or measured_bytes_per_s(),
        )


_MEASURED = GivenRates()
_EVEN_ROUTING = (
    "Assumed: every expert is chosen equally often. Where tokens choose otherwise, a rank has\n"
    "more or fewer activations."
)


def text(
    config: TrainConfig,
    num_ranks: int,
    given: GivenRates = _MEASURED,
    memory_bytes: float | None = None,
) -> str:
    """The whole plan, for printing.

    Args:
        config: of the run.
        num_ranks: ranks of the job.
        given: the rates of a rank, where they are known.
        memory_bytes: the memory of a rank's device, for the recommendation; None where unknown.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``, or there is no such model.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    num_samples, length = config.data.batch_size // num_ranks, config.data.sequence_length
    per_step = f"{num_samples} x {length} tokens on each per step"
    config.require_divisible(num_ranks)
    jobs = FigureJobs.of(config)
    to_do: list[Job[Any]] = [
        *jobs.run(list(Strategy), num_ranks),
        *(partial(module_counts, each, num_ranks) for each in jobs.configs()),
    ]
    results = iter(side_by_side(to_do))
    by_strategy = {strategy: jobs.figures(strategy, results) for strategy in Strategy}
    rates = given.measured(getattr(torch, config.precision.compute_dtype))
    num_layers, dim = shape_of(config)
    columns: dict[str, StepFigures] = {
        **{str(strategy): each for strategy, each in by_strategy.items()},
        TENSOR_PARALLEL: tensor_parallel(
            by_strategy[Strategy.DDP], config, num_ranks, num_layers, dim
        ),
    }
    seconds = [f"{step_seconds(name, each, rates):.3g}" for name, each in columns.items()]
    return "\n\n".join(
        [
            f"{counted(num_ranks, 'rank')}; {per_step}; all figures in MiB",
            *_too_long(config),
            modules_table(*results, num_more_layers=jobs.num_more_layers()),
            "Live bytes of a rank at the peak of a step:",
            _peaks(columns, [["step, s", *seconds]]),
            *_assumption(by_strategy),
            _notes(rates, given),
            recommendation(by_strategy, rates, memory_bytes),
        ]
    )


def _too_long(config: TrainConfig) -> list[str]:
    """The warning of sequences longer than the model's positions."""
    if isinstance(config.model, GPTConfig):
        return []  # refused when the configuration is read
    described, length = library_config(config.model), config.data.sequence_length
    most = num_positions(described)
    if most is None or length <= most:
        return []
    kind = described.model_type
    return [
        (
            f"Warning: `data.sequence_length` is {length}, but this {kind} has {most} positions.\n"
            "Later ones do not exist, or were never trained: take shorter sequences, or set "
            "`rope_scaling`."
        )
    ]


def _assumption(columns: Mapping[Strategy, StepFigures]) -> list[str]:
    """What was assumed of the tokens, if anything was."""
    if not any(each.assumes_even_routing for each in columns.values()):
        return []
    return [_EVEN_ROUTING]


def _notes(rates: Rates, given: GivenRates) -> str:
    return (
        "* by formula; all others are counted, operator by operator.\n"
        f"Seconds at {rates.operations_per_s:.2e} operations/s ({given.operations_origin}) and "
        f"{rates.bytes_per_s:.2e} bytes/s ({given.bytes_origin})\n"
        "of a rank, with all communication hidden that can be."
    )


def shape_of(config: TrainConfig) -> tuple[int, int]:
    """The number of layers, and the width of the residual stream."""
    if isinstance(config.model, GPTConfig):
        return config.model.num_layers, config.model.dim
    return library_shape(library_config(config.model))


def _peaks(columns: Mapping[str, StepFigures], more: Sequence[Sequence[str]]) -> str:
    lines: list[Sequence[str]] = [["", *columns]]
    lines += [
        [category, *(mib(each.at_peak[category]) for each in columns.values())]
        for category in CATEGORIES
    ]
    lines.append(["peak", *(mib(each.peak_bytes) for each in columns.values())])
    lines.append(["sent per step", *(mib(each.sent_bytes) for each in columns.values())])
    return table([*lines, *more], num_texts=1)
