"""Time of a step on gloo: contenders take turns in the same processes, rounds interleaved, ratios of medians.

python -m benchmarks.rtp.speed [--ranks 2] [--rounds 20] [--recompute]
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from gyre_trainer.mesh import make_mesh
from torch import Tensor, nn

from benchmarks.rtp.contenders import Contender, How, build
from benchmarks.rtp.ranks import run_on_ranks
from benchmarks.rtp.workloads import SMALL, Workload, make_batch, make_optimizer

_HOWS = (How.DDP, How.FSDP2_LAYER, How.FSDP2_SUB_BLOCK, How.GYRE)
_NUM_WARM_UP_STEPS = 3


def step_seconds(workload: Workload, contenders: list[Contender], num_rounds: int) -> list[list[float]]:
    """Of each contender, the seconds of its step in each round, the slowest rank's."""
    mesh, device = make_mesh("cpu"), torch.device("cpu")
    models = [build(contender, workload, mesh, device, fake=False) for contender in contenders]
    optimizers = [make_optimizer(workload, model) for model in models]
    batch = make_batch(workload, 1, device)
    seconds: list[list[float]] = [[] for _ in contenders]
    for round_ in range(_NUM_WARM_UP_STEPS + num_rounds):
        for model, optimizer, found in zip(models, optimizers, seconds, strict=True):
            took = _step(model, optimizer, batch)
            if round_ >= _NUM_WARM_UP_STEPS:
                found.append(took)
    return seconds


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> float:
    dist.barrier()
    before = time.perf_counter()
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    took = torch.tensor(time.perf_counter() - before)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def table(seconds: dict[str, list[float]]) -> str:
    """Medians beside DDP's and the better FSDP2's, round by round."""
    fsdp2 = min((label for label in seconds if label.startswith("FSDP2")), key=lambda label: statistics.median(seconds[label]))
    ddp = next(label for label in seconds if label.startswith("DDP"))
    lines = [f"| | ms, median | quartiles | to DDP | to {fsdp2} |", "|---|---:|---:|---:|---:|"]
    for label, found in seconds.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(found, n=4))
        ratios = [statistics.median(a / b for a, b in zip(found, seconds[other], strict=True)) for other in (ddp, fsdp2)]
        lines.append(f"| {label} | {middle:.0f} | {low:.0f}-{high:.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join(lines)


def measure(workload: Workload, num_ranks: int, num_rounds: int, *, recompute: bool) -> dict[str, list[float]]:
    contenders = [Contender(how, recompute and how is not How.DDP) for how in _HOWS]
    seconds = run_on_ranks(num_ranks, step_seconds, workload, contenders, num_rounds)[0]
    return {contender.label: found for contender, found in zip(contenders, seconds, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    print(f"{options.ranks} ranks, load average {os.getloadavg()[0]:.1f}\n")
    print(table(measure(SMALL, options.ranks, options.rounds, recompute=options.recompute)))


if __name__ == "__main__":
    main()
