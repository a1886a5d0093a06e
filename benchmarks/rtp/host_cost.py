"""The processor time of a step of tiny modules, as a multiple of the plain model's step.

    python -m benchmarks.rtp.host_cost [--ranks 1 2 4 8] [--rounds 20]

The model has eight modules with next to nothing to compute, so a step is Python, operators and
messages. All take turns in the same processes, round by round: the model by itself, FSDP2, Gyre
slice by slice, the same with its hops left out, and Gyre as it is, with small modules replicated.
Figures are the ranks' mean CPU time of the process, and of the thread that computes, beside the
plain model's in the same round.

A visit is one computation with one slice, in forward or backward. With heads that the ranks cannot
share (twelve heads on eight ranks), the four layers of an attention rotate one by one, and there
are more visits.
"""

import argparse
import os
import statistics

import torch
from gyre_trainer.rotation.rotated_module import RotatedModule
from torch import nn

from benchmarks.rtp.contenders import Contender, How, build
from benchmarks.rtp.ranks import run_on_ranks
from benchmarks.rtp.speed import Hops, Took, Turn, hopping, own_mesh, take_step
from benchmarks.rtp.workloads import NARROW, make_batch, make_optimizer

_NUM_WARM_UP_STEPS = 3
_TURNS = [
    Turn(Contender(How.ALONE)),
    Turn(Contender(How.FSDP2_SUB_BLOCK)),
    Turn(Contender(How.BY_SLICE)),
    Turn(Contender(How.BY_SLICE), Hops.LEFT_OUT),
    Turn(Contender(How.GYRE)),
]
Found = tuple[list[Took], int]  # this rank's rounds, and its visits in a step


def steps(num_rounds: int) -> list[Found]:
    """Each turn's rounds on this rank."""
    device = torch.device("cpu")
    models = [build(turn.contender, NARROW, own_mesh(), device, fake=False) for turn in _TURNS]
    optimizers = [make_optimizer(NARROW, model) for model in models]
    batch = make_batch(NARROW, 1, device)
    found: list[list[Took]] = [[] for _ in _TURNS]
    for _ in range(_NUM_WARM_UP_STEPS + num_rounds):
        for turn, model, optimizer, rounds in zip(_TURNS, models, optimizers, found, strict=True):
            with hopping(turn.hops):
                rounds.append(take_step(model, optimizer, batch))
    visits = map(_num_visits, models)
    return [(rounds[_NUM_WARM_UP_STEPS:], num) for rounds, num in zip(found, visits, strict=True)]


def _num_visits(model: nn.Module) -> int:
    rotated = [each for each in model.modules() if isinstance(each, RotatedModule)]
    return sum(2 * each.rotation.sharded.ring.size for each in rotated)


def rows(num_ranks: int, num_rounds: int) -> list[str]:
    """The rows of one number of ranks."""
    ranks = run_on_ranks(num_ranks, steps, num_rounds)
    plain, *others = (
        [_mean(each) for each in zip(*(rank[turn][0] for rank in ranks), strict=True)]
        for turn in range(len(_TURNS))
    )
    lines = []
    for turn, found in enumerate(others, 1):
        visits = ranks[0][turn][1]
        cpu, computing = (
            statistics.median(
                one[clock] / alone[clock] for one, alone in zip(found, plain, strict=True)
            )
            for clock in (0, 1)
        )
        per_visit = statistics.median(
            (one[1] - alone[1]) / max(visits, 1) for one, alone in zip(found, plain, strict=True)
        )
        cells = [
            str(num_ranks),
            _TURNS[turn].label,
            f"{cpu:.1f}",
            f"{computing:.1f}",
            str(visits or ""),
            f"{1e3 * per_visit:.2f}" if visits else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mean(ranks: tuple[Took, ...]) -> tuple[float, float]:
    return statistics.mean(took.cpu for took in ranks), statistics.mean(
        took.computing for took in ranks
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print("| ranks | | CPU to plain | computing thread to plain | visits | ms more a visit |")
    print("|---:|---|---:|---:|---:|---:|", flush=True)
    for num_ranks in options.ranks:
        print("\n".join(rows(num_ranks, options.rounds)), flush=True)
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
