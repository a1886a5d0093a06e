"""`gyre-train plan`: the rule of each module, and the cost of a step for a rank, before training.

Next to FSDP2 and DDP, and on rings of other sizes: N ranks are R replicas of rings of N / R.

Times are estimates: they take the host's time to start operators as that of additions, and assume
that all communication is hidden where it can be.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gyre_protos.text import counted
from torch import nn
from torch.utils.benchmark import Timer

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.counters import CATEGORIES
from gyre_trainer.accounting.step_cost import Step, StepCost, fake_model, on_fake_ranks, step_costs
from gyre_trainer.errors import ConfigError
from gyre_trainer.inspection.rotation_plan import RotationPlan, any_number, lines_of, mib, table
from gyre_trainer.rotate import plan_of
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.training.config import TrainConfig


def modules_of(config: TrainConfig, num_ranks: int) -> tuple[RotationPlan, tuple[int, str]]:
    """The modules of the configured model, on rank 0, whose slices are the largest.

    Returns:
        Their plan; and the rows or columns of the matrix with the shortest cut dim, and its name.

    Raises:
        ConfigError: there is no such model.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    with on_fake_ranks(num_ranks) as mesh:
        model = fake_model(config, Strategy.GYRE, mesh)
        return plan_of(model), min(_cut_dims(model), default=(0, ""))


def _cut_dims(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Of the modules that rotate: rows or columns of each matrix along its cut, and its name."""
    for path, module in model.named_modules():
        if isinstance(module, RotatedModule):
            for cut in module.rotation.layout.cuts:
                if len(cut.shape) > 1:
                    yield cut.shape[cut.dim], f"{any_number(path)}.{cut.name}"


# Large enough for a matrix product's full rate, and for a copy that no cache holds.
_MATRIX_DIM, _COPY_BYTES, _TRIAL_S = 1024, 2**26, 0.05


@dataclass(frozen=True, slots=True)
class Rates:
    """The speeds of one rank's device, host and links; 0 where one is to be measured.

    Attributes:
        operations_per_s: floating-point operations.
        bytes_per_s: bytes that it sends to a rank of its host.
        bytes_per_s_between: bytes that a host sends to another one; None for one host.
        ranks_per_host: ranks that share a host and its link.
        operator_s: seconds of the host to start an operator.
    """

    operations_per_s: float = 0.0
    bytes_per_s: float = 0.0
    bytes_per_s_between: float | None = None
    ranks_per_host: int = 8
    operator_s: float = 0.0

    def completed(self, dtype: torch.dtype, num_ranks: int) -> "Rates":
        """The same with missing rates measured on this machine's device.

        Raises:
            ConfigError: there are several hosts, but no rate of the link between them.
        """
        if num_ranks > self.ranks_per_host and self.bytes_per_s_between is None:
            raise ConfigError(
                f"{num_ranks} ranks are on several hosts ({self.ranks_per_host} on each). Give "
                "--bytes-per-s-between, the bytes that a host sends to another one in a second, or "
                "--ranks-per-host"
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        matrix = torch.randn(_MATRIX_DIM, _MATRIX_DIM, dtype=dtype, device=device)
        copied = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, device=device)
        small = torch.zeros(1, device=device)
        return replace(
            self,
            operations_per_s=self.operations_per_s
            or 2 * _MATRIX_DIM**3 / _seconds("x @ x", x=matrix),
            # a copy in memory is a hop between ranks of one host
            bytes_per_s=self.bytes_per_s or _COPY_BYTES / _seconds("x[1].copy_(x[0])", x=copied),
            operator_s=_seconds("x.add_(1)", x=small),
        )

    def described(self) -> str:
        """The rates, for the end of a table."""
        lines = [
            f"{self.operations_per_s:.2e} operations/s of a rank",
            f"{self.bytes_per_s:.2e} bytes/s inside a host",
            f"{self.operator_s * 1e6:.1f} us of the host for an addition; a real step takes more",
        ]
        if self.bytes_per_s_between is not None:
            lines.append(f"{self.bytes_per_s_between:.2e} bytes/s of the link between hosts")
        return "\n".join(lines)

    def of_ring(self, num_ranks: int, num_sharing: int = 1) -> float:
        """Bytes per second of a ring, where ``num_sharing`` rings share the link of each host."""
        if self.bytes_per_s_between is None or num_ranks <= self.ranks_per_host:
            return self.bytes_per_s
        num_sharing = min(num_sharing, self.ranks_per_host)
        return min(self.bytes_per_s, self.bytes_per_s_between / num_sharing)


def _seconds(statement: str, x: torch.Tensor) -> float:
    """The median time of a statement about ``x``."""
    timer = Timer(statement, globals={"x": x}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=_TRIAL_S).median)


@dataclass(frozen=True)
class Way:
    """One way to distribute a step, and its cost.

    Attributes:
        name: in tables and recommendations.
        cost: of a rank, of its ring alone.
        rates: of a rank and its host.
        size: ranks that share a copy of the parameters: of a ring, or all.
        replicas: copies in the job.
        gradient_bytes: of all gradients that replicas average.
    """

    name: str
    cost: StepCost
    rates: Rates
    size: int
    replicas: int = 1
    gradient_bytes: int = 0

    @property
    def averaged_bytes(self) -> int:
        """Bytes that a rank sends to average its gradients over replicas."""
        return 2 * (self.replicas - 1) * self.gradient_bytes // self.size // self.replicas

    @property
    def host_s(self) -> float:
        """The time that the host of a rank takes to start all operators of a step."""
        return self.cost.num_operators * self.rates.operator_s

    @property
    def step_s(self) -> float:
        """The time of a step.

        Rotation and FSDP2 can hide all that they send. DDP sends in backward, which is two thirds
        of the operations, and so do replicas. No step is shorter than its host takes to start the
        operators.
        """
        computes_s = self.cost.operations / self.rates.operations_per_s
        sends_s = self.cost.sent_bytes / self.rates.of_ring(self.size)
        between_replicas = self.rates.of_ring(self.size * self.replicas, self.size)
        averages_s = self.averaged_bytes / between_replicas
        if self.name == Strategy.DDP:
            sends_s, averages_s = 0.0, sends_s
        return max(computes_s, sends_s, computes_s / 3 + averages_s, self.host_s)

    def as_object(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "size": self.size,
            "replicas": self.replicas,
            "peak_bytes": self.cost.peak_bytes,
            "at_peak": {str(key): n for key, n in self.cost.timeline.peak().items()},
            "sent_bytes": self.cost.sent_bytes,
            "averaged_bytes": self.averaged_bytes,
            "operations": self.cost.operations,
            "operators": self.cost.num_operators,
            "host_s": self.host_s,
            "step_s": self.step_s,
        }


# Of the memory that a rank has: the rounding of an allocator and caches of libraries need some.
_USABLE = 0.9
# A smaller difference of peaks or times is not worth a change: the figures are no more exact.
_WORTH = 0.05


def recommendation(ways: Sequence[Way], memory_bytes: float | None) -> str:
    """Which way to take, in a sentence or two; differences below 5 % are none.

    Args:
        ways: with names that differ.
        memory_bytes: a rank's memory; None if it is not given.
    """
    peaks = {each.name: float(each.cost.peak_bytes) for each in ways}
    seconds = {each.name: each.step_s for each in ways}
    usable = float("inf") if memory_bytes is None else _USABLE * memory_bytes
    where = "" if memory_bytes is None else f"{memory_bytes / 2**30:.4g} GiB"
    fitting = [each for each in peaks if peaks[each] <= usable]
    if not fitting:
        return (
            f"Nothing fits into {_USABLE:.0%} of {where}; {min(peaks, key=peaks.__getitem__)} is "
            "the smallest. Use more ranks, fewer tokens per rank, bfloat16 or recomputation."
        )
    fast = _lowest({each: seconds[each] for each in fitting})
    best, *others = _lowest({each: peaks[each] for each in fast})
    if others:
        return (
            f"{', '.join([best, *others[:-1]])} and {others[-1]} differ by less than {_WORTH:.0%} "
            "in memory and time, which is not worth a change: keep the one that you have."
        )
    replicas = {each.name: each.replicas for each in ways}[best]
    advice = f" Set run.replicas = {replicas}." if replicas > 1 else ""
    if where:
        return f"Take {best}: nothing that fits into {where} is faster by {_WORTH:.0%}.{advice}"
    small = _lowest(peaks)
    if best in small:
        return f"Take {best}: nothing is smaller or faster by {_WORTH:.0%}.{advice}"
    return (
        f"Take {best} where a rank has {peaks[best] / _USABLE / 2**30:.3g} GiB or more; otherwise "
        f"{min(small, key=seconds.__getitem__)}, the smallest.\n--memory GIB decides for a device."
        f"{advice}"
    )


def _lowest(values: Mapping[str, float]) -> list[str]:
    """Those whose value is the lowest, or less than 5 % above it."""
    lowest = min(values.values())
    return [each for each, value in values.items() if value <= lowest * (1 + _WORTH)]


_EVEN_ROUTING = (
    "Assumed: every expert is chosen equally often. Where tokens choose otherwise, a rank has\n"
    "more or fewer activations."
)
# Matrix units of GPUs take tiles of 128 rows or columns, and thinner slices leave a part idle.
_THIN_ROWS = 128


@dataclass(frozen=True)
class Plan:
    """Costs of a step under each strategy, and on rings of each size.

    Attributes:
        config: of the run.
        num_ranks: of the job.
        modules: of the model, on rank 0.
        thinnest: rows or columns of the matrix with the shortest cut dim, and its name.
        columns: each strategy; rotation is the first, on rings of the configured size.
        rings: each size of rings, the smallest first.
        by_layer: the peak with `memory.recompute = "layer"`, where modules rotate layer by layer
            and the configuration says otherwise; else None.
    """

    config: TrainConfig
    num_ranks: int
    modules: RotationPlan
    thinnest: tuple[int, str]
    columns: Sequence[Way]
    rings: Sequence[Way]
    by_layer: int | None

    def recommended(self, memory_bytes: float | None) -> str:
        """The strategy to take, in a few sentences."""
        advice = recommendation(
            [*{each.name: each for each in (*self.columns, *self.rings)}.values()], memory_bytes
        )
        if self.by_layer is None:
            return advice
        return (
            f'{advice}\nModules rotate layer by layer: with memory.recompute = "layer" the peak of '
            f"{Strategy.GYRE} is {mib(self.by_layer)} MiB in place of "
            f"{mib(self.columns[0].cost.peak_bytes)}."
        )

    def text(self, memory_bytes: float | None) -> str:
        """The whole plan, for printing."""
        rows = self.config.data.batch_size // self.num_ranks
        per_step = f"{rows} x {self.config.data.sequence_length} tokens on each per step"
        return "\n\n".join(
            [
                f"{counted(self.num_ranks, 'rank')}; {per_step}; all figures in MiB",
                str(self.modules),
                "Live bytes of a rank at the peak of a step:",
                self._peaks(),
                *self._rings(),
                *[_EVEN_ROUTING] * any(each.cost.assumes_even_routing for each in self.columns),
                "Counted operator by operator. Seconds hide all communication that can be, at\n"
                + self.columns[0].rates.described(),
                self.recommended(memory_bytes),
            ]
        )

    def _peaks(self) -> str:
        """A table of the strategies: the parts of their peaks, the bytes they send, their times."""
        columns = [["", *CATEGORIES, "peak", "sent per step", "host, s", "step, s"]]
        for each in self.columns:
            peak = each.cost.timeline.peak().values()
            sizes = map(mib, (*peak, each.cost.peak_bytes, each.cost.sent_bytes))
            columns.append([each.name, *sizes, f"{each.host_s:.3g}", f"{each.step_s:.3g}"])
        return table([*zip(*columns, strict=True)], num_texts=1)

    def _rings(self) -> list[str]:
        """A table of the sizes of rings, if there are several."""
        if len(self.rings) < 2:
            return []
        lines = [["rings", "peak", "sent", "averaged", "host, s", "thinnest", "step, s"]]
        for each in self.rings:
            rows = self._rows_of_slice(each)
            sizes = map(mib, (each.cost.peak_bytes, each.cost.sent_bytes, each.averaged_bytes))
            host, step = f"{each.host_s:.3g}", f"{each.step_s:.3g}"
            shown = f"{rows}{' !' if rows < _THIN_ROWS else ''}"
            lines.append([f"{each.replicas} x {each.size}", *sizes, host, shown, step])
        return [
            "Rings (replicas x ranks of a ring):\n"
            + table(lines, num_texts=1)
            + "\naveraged: sent between replicas\n"
            f"thinnest: rows or columns of a slice of {self.thinnest[1]}\n"
            f"! fewer than {_THIN_ROWS}, which leave a part of a GPU's matrix units idle"
        ]

    def _rows_of_slice(self, ring: Way) -> int:
        return -(-self.thinnest[0] // ring.size)

    def as_object(self, memory_bytes: float | None) -> dict[str, Any]:
        """The plan's figures, for JSON."""
        return {
            "ranks": self.num_ranks,
            "strategies": {each.name: each.as_object() for each in self.columns},
            "rings": [
                each.as_object() | {"thinnest": self._rows_of_slice(each)} for each in self.rings
            ],
            "layer_by_layer": [*lines_of(self.modules.layer_by_layer)],
            "peak_bytes_by_layer": self.by_layer,
            "recommendation": self.recommended(memory_bytes),
        }


def make_plan(config: TrainConfig, num_ranks: int, given: Rates) -> Plan:
    """Count the costs of a step of a job. Rates that are not ``given`` are measured.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``, or there is no such model.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    config.require_divisible(num_ranks)
    rates = given.completed(getattr(torch, config.precision.compute_dtype), num_ranks)
    configured = num_ranks // config.run.replicas
    modules, thinnest = modules_of(config, configured)

    def on_rings(settings: TrainConfig, size: int) -> Step:
        """The part of a step that one ring has: each rank has as many samples as before."""
        data = replace(config.data, batch_size=config.data.batch_size // num_ranks * size)
        run = replace(config.run, replicas=1)
        return replace(settings, run=run, data=data), Strategy.GYRE, size

    sizes = {size for size in range(2, num_ranks + 1) if num_ranks % size == 0}
    longest_first = sorted({*sizes, configured}, reverse=True)
    # DDP is first: it tells whether the model's own code fails
    others = [each for each in reversed(Strategy) if each != Strategy.GYRE]
    steps: list[Step] = [(config, each, num_ranks) for each in others]
    steps += [on_rings(config, size) for size in longest_first]
    adds_layers = bool(modules.layer_by_layer) and config.memory.recompute != "layer"
    if adds_layers:
        memory = replace(config.memory, recompute="layer")
        steps.append(on_rings(replace(config, memory=memory), configured))
    costs = iter(step_costs(steps))
    ways = [Way(str(each), next(costs), rates, num_ranks) for each in others]
    num_averaged = 0
    if not config.model.lora.rank:
        num_averaged = sum(entry.num_trainable for entry in modules.entries)
    gradient_bytes = num_averaged * getattr(torch, config.precision.grad_dtype).itemsize
    rings = {}
    for size in longest_first:
        name = str(Strategy.GYRE) if size == configured else f"{Strategy.GYRE}, rings of {size}"
        rings[size] = Way(name, next(costs), rates, size, num_ranks // size, gradient_bytes)
    return Plan(
        config,
        num_ranks,
        modules,
        thinnest,
        [rings[configured], *reversed(ways)],
        [each for n, each in sorted(rings.items()) if n > 1],
        next(costs).peak_bytes if adds_layers else None,
    )
