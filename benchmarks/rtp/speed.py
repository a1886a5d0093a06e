"""The time of a step on gloo ranks, and the processor's share of it.

    python -m benchmarks.rtp.speed [--shape small|narrow] [--ranks 2] [--rounds 20] [--recompute]

Contenders take turns in the same processes, round by round. Gyre has one more turn, in which hops
are left out: the difference is their cost. The narrow shape has next to nothing to compute, so its
time is Python's.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import ROTATE_AXIS
from gyre_trainer.comm.ring import Direction, Hop, Ring, Stream
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.rtp.contenders import Contender, How, build
from benchmarks.rtp.ranks import run_on_ranks
from benchmarks.rtp.workloads import NARROW, SMALL, Workload, make_batch, make_optimizer

_HOWS = (How.DDP, How.FSDP2_LAYER, How.FSDP2_SUB_BLOCK, How.BY_SLICE)
_SHAPES = {"small": SMALL, "narrow": NARROW}
_NUM_WARM_UP_STEPS = 3


class Hops(StrEnum):
    """How buffers get to the next rank."""

    MADE = ""
    LEFT_OUT = ", its hops left out"


@dataclass(frozen=True)
class Turn:
    """One contender's turn. Without hops, Gyre computes as much on whatever its buffers contain."""

    contender: Contender
    hops: Hops = Hops.MADE

    @property
    def label(self) -> str:
        return f"{self.contender.label}{self.hops}"


class Took(NamedTuple):
    """Seconds of one step on one rank: elapsed, CPU time, and CPU time of the computing thread."""

    wall: float
    cpu: float
    computing: float


Round = tuple[Took, ...]  # by rank


def _turns(*, recompute: bool) -> list[Turn]:
    contenders = [Contender(how, recompute and how is not How.DDP) for how in _HOWS]
    return [
        *map(Turn, contenders),
        Turn(contenders[-1], Hops.LEFT_OUT),
    ]


def measure(
    workload: Workload, num_ranks: int, num_rounds: int, *, recompute: bool
) -> dict[str, list[Round]]:
    """The rounds of each turn."""
    taken = _turns(recompute=recompute)
    ranks = run_on_ranks(num_ranks, steps, workload, taken, num_rounds)
    return {
        turn.label: list(zip(*found, strict=True))
        for turn, *found in zip(taken, *ranks, strict=True)
    }


def steps(workload: Workload, taken: list[Turn], num_rounds: int) -> list[list[Took]]:
    """The time of each turn's step on this rank, round by round."""
    device = torch.device("cpu")
    models = [build(turn.contender, workload, own_mesh(), device, fake=False) for turn in taken]
    optimizers = [make_optimizer(workload, model) for model in models]
    batch = make_batch(workload, 1, device)
    found: list[list[Took]] = [[] for _ in taken]
    for _ in range(_NUM_WARM_UP_STEPS + num_rounds):
        for turn, model, optimizer, rounds in zip(taken, models, optimizers, found, strict=True):
            with hopping(turn.hops):
                rounds.append(take_step(model, optimizer, batch))
    return [rounds[_NUM_WARM_UP_STEPS:] for rounds in found]


def own_mesh() -> DeviceMesh:
    """A mesh of all ranks in a group of its own, because a group's transport is chosen once."""
    return DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(ROTATE_AXIS,))


def hopping(hops: Hops) -> AbstractContextManager[object]:
    def stay(
        ring: Ring,
        outgoing: Tensor,
        incoming: Tensor,
        direction: Direction,
        stream: Stream,
        identity: int = 0,
    ) -> Hop:
        return Hop((), ring)

    return patch.object(Ring, "shift", stay) if hops is Hops.LEFT_OUT else nullcontext()


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]
) -> Took:
    dist.barrier()
    before = _clocks()
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Took(*(after - then for after, then in zip(_clocks(), before, strict=True)))


def _clocks() -> Took:
    return Took(time.perf_counter(), time.process_time(), time.thread_time())


def table(found: dict[str, list[Round]]) -> str:
    """Medians of the slowest rank's time and the ranks' mean CPU time, also relative to DDP's."""
    wall = {
        label: [max(took.wall for took in ranks) for ranks in rounds]
        for label, rounds in found.items()
    }
    cpu = {label: _means(rounds, lambda took: took.cpu) for label, rounds in found.items()}
    ddp = next(label for label in found if label.startswith("DDP"))
    fsdp2 = min(
        (label for label in found if label.startswith("FSDP2")),
        key=lambda label: statistics.median(wall[label]),
    )
    elapsed = f"ms, median | quartiles | to DDP | to {fsdp2}"
    cpu_time = "CPU, ms | to DDP | computing thread, ms | waiting, ms"
    lines = [f"| | {elapsed} | {cpu_time} |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for label, rounds in found.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(wall[label], n=4))
        ratios = (
            _ratio(wall[label], wall[ddp]),
            _ratio(wall[label], wall[fsdp2]),
            _ratio(cpu[label], cpu[ddp]),
        )
        computing, waiting = (
            _means(rounds, lambda took: took.computing),
            _means(rounds, lambda took: took.wall - took.cpu),
        )
        cells = [
            label,
            f"{middle:.0f}",
            f"{low:.0f}-{high:.0f}",
            f"{ratios[0]:.2f}",
            f"{ratios[1]:.2f}",
            _ms(cpu[label]),
        ]
        lines.append(
            f"| {' | '.join([*cells, f'{ratios[2]:.2f}', _ms(computing), _ms(waiting)])} |"
        )
    return "\n".join(lines)


def _means(rounds: list[Round], seconds: Callable[[Took], float]) -> list[float]:
    return [statistics.mean(map(seconds, ranks)) for ranks in rounds]


def _ratio(found: list[float], beside: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(found, beside, strict=True))


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=_SHAPES, default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    print(f"{options.ranks} ranks, load average {os.getloadavg()[0]:.1f}\n")
    print(
        table(
            measure(
                _SHAPES[options.shape], options.ranks, options.rounds, recompute=options.recompute
            )
        )
    )


if __name__ == "__main__":
    main()
