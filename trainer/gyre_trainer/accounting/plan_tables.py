"""`gyre-train plan`: what becomes of each module, and what a step costs a rank, before training."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gyre_protos.text import counted
from torch import nn

from gyre_trainer.accounting.baselines import Strategy, add_fake_adapters
from gyre_trainer.accounting.counters import CATEGORIES
from gyre_trainer.accounting.depth import FigureJobs, Job, StepFigures, side_by_side
from gyre_trainer.accounting.dry_run import on_fake_ranks
from gyre_trainer.accounting.estimate import (
    THIN_ROWS,
    Rates,
    RingFigures,
    figures_of_rings,
    host_seconds,
    on_rings_of,
    recommendation,
    ring_seconds,
    ring_sizes,
    step_seconds,
)
from gyre_trainer.inspection.rotation_plan import table
from gyre_trainer.rotate import plan_of
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.shards.initialisation import allocate
from gyre_trainer.training.build import encode_frozen, has_adapters, rotated
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import library_config, num_positions

_NUMBER = r"\b\d+\b"
_Kind = tuple[str, str, int]
"""The path with its numbers replaced, the rule, the bytes of one module."""


@dataclass(frozen=True)
class ModuleCounts:
    """The modules of a model.

    Attributes:
        kinds: by kinds of modules: the path of the first one; number, bytes and rank 0's bytes of
            all.
        notes: a line for each class with the layers of a block that rotates layer by layer.
        thinnest: rows or columns of the matrix with the shortest cut dim, and its name.
    """

    kinds: Mapping[_Kind, tuple[str, npt.NDArray[np.int64]]]
    notes: tuple[str, ...]
    thinnest: tuple[int, str] = (0, "")


def module_counts(config: TrainConfig, num_ranks: int) -> ModuleCounts:
    """The modules of the configured model by kinds. Tied parameters are at their first module.

    Raises:
        ConfigError: there is no such model.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    with on_fake_ranks(num_ranks) as mesh:
        model = rotated(config, mesh)
        if has_adapters(config.model):
            allocate(model, torch.device("cpu"))
            encode_frozen(model, config, mesh)
            add_fake_adapters(model, config, torch.device("cpu"))
        plan = plan_of(model)
    counts: dict[_Kind, tuple[str, npt.NDArray[np.int64]]] = {}
    for entry in plan.entries:
        path = re.sub(_NUMBER, "*", entry.path)
        kind = path, entry.rule or entry.how, entry.num_bytes
        _, count = counts.setdefault(kind, (entry.path, np.zeros(3, np.int64)))
        count += 1, entry.num_bytes, entry.num_local_bytes
    return ModuleCounts(counts, tuple(plan.layer_lines(counts=False)), _thinnest(model))


def _thinnest(model: nn.Module) -> tuple[int, str]:
    """The matrix with the fewest rows or columns along its cut, of the modules that rotate."""
    cuts = (
        (cut.shape[cut.dim], f"{re.sub(_NUMBER, '*', path)}.{cut.name}")
        for path, module in model.named_modules()
        if isinstance(module, RotatedModule)
        for cut in module.rotation.layout.cuts
        if len(cut.shape) > 1
    )
    return min(cuts, default=(0, ""))


def modules_table(counts: ModuleCounts) -> str:
    """A table with one row for each kind of module: MiB, and those on rank 0.

    Rank 0 has the largest slices.
    """
    lines = [["module", "rule", "bytes", "per rank"]]
    total = np.zeros(3, np.int64)
    for (path, rule, _), (first, count) in counts.kinds.items():
        total += count
        number, *sizes = count.tolist()
        lines.append([f"{path} x{number}" if number > 1 else first, rule, *map(mib, sizes)])
    lines.append(["total", "", *map(mib, total[1:].tolist())])
    return "\n".join([table(lines, num_texts=2), *counts.notes])


def mib(num_bytes: int) -> str:
    """The number in MiB, with about four digits."""
    value = num_bytes / 2**20
    num_decimals = next(
        (num for num, least in enumerate((1000, 100, 1)) if value >= least), 4 if num_bytes else 0
    )
    return f"{value:,.{num_decimals}f}"


_GYRE = [Strategy.GYRE]


_EVEN_ROUTING = (
    "Assumed: every expert is chosen equally often. Where tokens choose otherwise, a rank has\n"
    "more or fewer activations."
)


@dataclass(frozen=True)
class Plan:
    """Costs of a step under each strategy, and on rings of each size.

    Attributes:
        config: of the run.
        num_ranks: of the job.
        counts: the modules of the model.
        columns: figures by the names of strategies.
        rings: figures of the sizes of rings.
        by_layer: the peak with `memory.recompute = "layer"`, where modules rotate layer by layer
            and the configuration says otherwise; else None.
        rates: of a rank and its host.
    """

    config: TrainConfig
    num_ranks: int
    counts: ModuleCounts
    columns: Mapping[str, StepFigures]
    rings: Sequence[RingFigures]
    by_layer: int | None
    rates: Rates

    @property
    def seconds(self) -> dict[str, float]:
        """The time of a step by the names of strategies and of rings."""
        found = {
            name: step_seconds(name, each, self.rates, self.num_ranks)
            for name, each in self.columns.items()
        }
        rings = {each.name: ring_seconds(each, self.rates, self.num_ranks) for each in self.rings}
        return found | rings

    @property
    def peaks(self) -> dict[str, float]:
        """The most bytes of a rank, by the same names."""
        found = {name: float(each.peak_bytes) for name, each in self.columns.items()}
        return found | {each.name: float(each.figures.peak_bytes) for each in self.rings}

    def recommended(self, memory_bytes: float | None) -> str:
        """The strategy to take, in a few sentences."""
        advice = recommendation(self.peaks, self.seconds, memory_bytes)
        for ring in self.rings:
            if f"Take {ring.name}" in advice and ring.replicas > 1:
                advice += f" Set run.replicas = {ring.replicas}."
        if self.by_layer is not None:
            gyre = self.columns[Strategy.GYRE].peak_bytes
            advice += (
                '\nModules rotate layer by layer: with memory.recompute = "layer" the peak of '
                f"{Strategy.GYRE} is {mib(self.by_layer)} MiB in place of {mib(gyre)}."
            )
        return advice

    def text(self, memory_bytes: float | None) -> str:
        """The whole plan, for printing."""
        rows = self.config.data.batch_size // self.num_ranks
        per_step = f"{rows} x {self.config.data.sequence_length} tokens on each per step"
        seconds = [f"{self.seconds[name]:.3g}" for name in self.columns]
        host = [f"{host_seconds(each, self.rates):.3g}" for each in self.columns.values()]
        return "\n\n".join(
            [
                f"{counted(self.num_ranks, 'rank')}; {per_step}; all figures in MiB",
                *_too_long(self.config),
                modules_table(self.counts),
                "Live bytes of a rank at the peak of a step:",
                _peaks(self.columns, [["host, s", *host], ["step, s", *seconds]]),
                *self._rings(),
                *_assumption(self.columns),
                "Counted operator by operator. Seconds hide all communication that can be, at\n"
                + self.rates.described(),
                self.recommended(memory_bytes),
            ]
        )

    def _rings(self) -> list[str]:
        """A table of the sizes of rings, if there are several."""
        if len(self.rings) < 2:
            return []
        thinnest, name = self.counts.thinnest
        lines = [["rings", "peak", "sent", "averaged", "host, s", "thinnest", "step, s"]]
        for each in self.rings:
            rows = -(-thinnest // each.size)
            lines.append(
                [
                    f"{each.replicas} x {each.size}" + ("" if each.is_counted else " ~"),
                    mib(each.figures.peak_bytes),
                    mib(each.figures.sent_bytes),
                    mib(each.averaged_bytes),
                    f"{host_seconds(each.figures, self.rates):.3g}",
                    f"{rows}{' !' if rows < THIN_ROWS else ''}",
                    f"{self.seconds[each.name]:.3g}",
                ]
            )
        return [
            "Rings (replicas x ranks of a ring):\n"
            + table(lines, num_texts=1)
            + "\n~ between the sizes that were counted; averaged: sent between replicas\n"
            f"thinnest: rows or columns of a slice of {name}\n"
            f"! fewer than {THIN_ROWS}, which leave a part of a GPU's matrix units idle"
        ]

    def as_object(self, memory_bytes: float | None) -> dict[str, Any]:
        """The plan's figures, for JSON."""
        return {
            "ranks": self.num_ranks,
            "strategies": {
                name: {
                    "peak_bytes": each.peak_bytes,
                    "at_peak": {str(category): n for category, n in each.at_peak.items()},
                    "sent_bytes": each.sent_bytes,
                    "operations": each.operations,
                    "operators": each.num_operators,
                    "host_s": host_seconds(each, self.rates),
                    "step_s": self.seconds[name],
                }
                for name, each in self.columns.items()
            },
            "rings": [
                {
                    "size": each.size,
                    "replicas": each.replicas,
                    "counted": each.is_counted,
                    "peak_bytes": each.figures.peak_bytes,
                    "sent_bytes": each.figures.sent_bytes,
                    "averaged_bytes": each.averaged_bytes,
                    "host_s": host_seconds(each.figures, self.rates),
                    "thinnest": -(-self.counts.thinnest[0] // each.size),
                    "step_s": self.seconds[each.name],
                }
                for each in self.rings
            ],
            "layer_by_layer": list(self.counts.notes),
            "peak_bytes_by_layer": self.by_layer,
            "recommendation": self.recommended(memory_bytes),
        }


def make_plan(config: TrainConfig, num_ranks: int, given: Rates) -> Plan:
    """Count the costs of a step.

    Args:
        config: of the run.
        num_ranks: ranks of the job.
        given: the rates of a rank, where they are known.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``, or there is no such model.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    config.require_divisible(num_ranks)
    dtype = getattr(torch, config.precision.compute_dtype)
    rates = given.completed(dtype, num_ranks)
    jobs = FigureJobs.of(config)
    size = num_ranks // config.run.replicas
    # Another size tells about all: the smallest, whose few slices are counted fast.
    possible = ring_sizes(num_ranks) or [size]
    sizes = dict.fromkeys([size, possible[0] if size != possible[0] else possible[-1]])
    of_rings = [replace(jobs, config=on_rings_of(config, each, num_ranks)) for each in sizes]
    others = [each for each in Strategy if each != Strategy.GYRE]
    counts = module_counts(config, size)
    again = None
    if counts.notes and config.memory.recompute != "layer":
        layers = replace(config, memory=replace(config.memory, recompute="layer"))
        again = replace(jobs, config=on_rings_of(layers, size, num_ranks))
    to_do: list[Job[Any]] = [
        *(job for each, n in zip(of_rings, sizes, strict=True) for job in each.run(_GYRE, n)),
        *(again.run(_GYRE, size) if again else ()),
        *jobs.run(others, num_ranks),
    ]
    results = iter(side_by_side(to_do))
    by_size = {
        n: each.figures(Strategy.GYRE, results) for each, n in zip(of_rings, sizes, strict=True)
    }
    by_layer = again.figures(Strategy.GYRE, results).peak_bytes if again else None
    by_strategy = {Strategy.GYRE: by_size[size]}
    by_strategy |= {each: jobs.figures(each, results) for each in others}
    width = getattr(torch, config.precision.grad_dtype).itemsize
    return Plan(
        config,
        num_ranks,
        counts,
        {str(strategy): each for strategy, each in by_strategy.items()},
        figures_of_rings(
            by_size,
            num_ranks,
            size,
            0 if has_adapters(config.model) else jobs.num_weights * width,
        ),
        by_layer,
        rates,
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


def _assumption(columns: Mapping[str, StepFigures]) -> list[str]:
    """The assumptions about the tokens, if any."""
    if not any(each.assumes_even_routing for each in columns.values()):
        return []
    return [_EVEN_ROUTING]


def _peaks(columns: Mapping[str, StepFigures], more: Sequence[Sequence[str]]) -> str:
    lines: list[Sequence[str]] = [["", *columns]]
    lines += [
        [category, *(mib(each.at_peak[category]) for each in columns.values())]
        for category in CATEGORIES
    ]
    lines.append(["peak", *(mib(each.peak_bytes) for each in columns.values())])
    lines.append(["sent per step", *(mib(each.sent_bytes) for each in columns.values())])
    return table([*lines, *more], num_texts=1)
