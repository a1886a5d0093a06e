"""Adapters that rotate beside adapters that every rank has whole, on gloo ranks.

    python -m benchmarks.rtp.adapters [--ranks 2 4] [--rounds 10]

A Llama of four layers, 256 wide, with LoRA of rank 16 on all linear layers, 512 tokens on each
rank. All take turns in the same processes, round by round: the ranks' mean CPU time of a step, and
the live bytes and the sent bytes of rank 0 in another step. Adapters are whole by default; rotated
they have a `LinearRule`. Rows are beside the first of the same number of ranks.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.rotate import rotate_all
from gyre_trainer.rotation.rule import Rule
from torch import nn

from benchmarks.rtp import models
from benchmarks.rtp.ranks import run_on_ranks
from tests.distributed.models.families import made

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
}
_ROWS, _TOKENS, _RANK = 4, 128, 16
_NUM_WARM_UP_STEPS = 2
_RULES: dict[type[nn.Module] | str, Rule | None] = {"*.lora_?.default": LinearRule()}
# label, whether adapters rotate
_CONTENDERS = {"adapters replicated": False, "adapters rotated": True}
Figures = tuple[list[float], int, int]  # CPU seconds of each round, peak bytes, bytes sent


def _built(*, rotated: bool) -> Any:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    settings: Any = LoraConfig(r=_RANK, target_modules="all-linear")
    model = get_peft_model(made("Llama", **_SIZES).float(), settings)
    rules = _RULES if rotated else None
    rotate_all(model, mesh=make_mesh("cpu"), rules=rules, find_blocks=False, min_numel=0)
    return model


def measured(num_rounds: int) -> dict[str, Figures]:
    """The figures of each contender on this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randint(1, _SIZES["vocab_size"], (_ROWS, _TOKENS), generator=generator)
    builds: dict[str, Callable[[], Any]] = {
        label: partial(_built, rotated=rotated) for label, rotated in _CONTENDERS.items()
    }
    trainings = {label: models._Training(build(), rows) for label, build in builds.items()}
    seconds: dict[str, list[float]] = {label: [] for label in builds}
    for _ in range(_NUM_WARM_UP_STEPS + num_rounds):
        for label, training in trainings.items():
            seconds[label].append(training.step()[0])
    del trainings
    costs = {label: models._counted(build, rows) for label, build in builds.items()}
    return {label: (seconds[label][_NUM_WARM_UP_STEPS:], *costs[label]) for label in builds}


def rows_of(num_ranks: int, num_rounds: int) -> list[str]:
    """The table's rows for one number of ranks."""
    ranks = run_on_ranks(num_ranks, measured, num_rounds)
    cpu = {
        label: [statistics.mean(each) for each in zip(*(r[label][0] for r in ranks), strict=True)]
        for label in _CONTENDERS
    }
    first, *_ = _CONTENDERS
    _, base_peak, base_sent = ranks[0][first]
    lines = []
    for label in _CONTENDERS:
        _, peak, sent = ranks[0][label]
        to_first = statistics.median(a / b for a, b in zip(cpu[label], cpu[first], strict=True))
        cells = [
            str(num_ranks),
            label,
            f"{1e3 * statistics.median(cpu[label]):.0f}",
            f"{to_first:.2f}",
            f"{peak / 2**20:.1f}",
            f"{peak / base_peak:.2f}",
            f"{sent / 2**20:.1f}",
            f"{sent / base_sent:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    costs = "CPU, ms | to the first | peak, MiB | to the first | sent, MiB | to the first"
    print(f"| ranks | | {costs} |\n|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for num_ranks in options.ranks:
        print("\n".join(rows_of(num_ranks, options.rounds)), flush=True)
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
