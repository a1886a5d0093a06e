"""The deepest model of a width that trains on 8 ranks of 80 GB under DDP, FSDP2 and Gyre.

    python -m benchmarks.rtp.largest [--shape llama-70b] [--ranks 8] [--budget 80e9] [--json FILE]

Peaks are counted on fake tensors. All layers are equal, so a peak is the largest of several values
that grow linearly with the depth, which makes it a convex function of the depth. So the line
through two depths is a lower bound for deeper models, and bounds the depth that fits. The printed
depth was counted itself. A call that was cut short continues with the same --json FILE.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.rtp.contenders import Contender, How
from benchmarks.rtp.live import fake_step
from benchmarks.rtp.workloads import LLAMA_8B, LLAMA_70B, TOY, Workload

SHAPES = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "toy": TOY}
_HOWS = (How.DDP, How.FSDP2_LAYER, How.FSDP2_SUB_BLOCK, How.GYRE)
_FIRST = (1, 2)
_DEEPEST = 100_000

Row = dict[str, int | str]


def deepest(peak_of: Callable[[int], int], budget: int) -> tuple[int, int]:
    """The most layers whose peak is within the budget, and that peak; (0, 0) if two do not fit.

    Args:
        peak_of: the peak in bytes for a number of layers; convex.
        budget: bytes.
    """
    found = {depth: peak_of(depth) for depth in _FIRST}
    if max(found.values()) > budget:
        return 0, 0
    while True:
        *_, low, high = sorted(depth for depth, peak in found.items() if peak <= budget)
        too_deep = min((depth for depth, peak in found.items() if peak > budget), default=_DEEPEST)
        bound = high + (budget - found[high]) * (high - low) // (found[high] - found[low])
        if bound >= too_deep:
            bound = (high + too_deep) // 2
        if bound <= high:
            return high, found[high]
        found[bound] = peak_of(bound)


def row_of(contender: Contender, workload: Workload, num_ranks: int, budget: int) -> Row:
    depth, peak = deepest(
        lambda depth: fake_step(contender, workload.with_layers(depth), num_ranks).peak_bytes,
        budget,
    )
    return {
        "contender": contender.label,
        "ranks": num_ranks,
        "budget": budget,
        "layers": depth,
        "peak": peak,
    }


def contenders() -> Iterator[Contender]:
    for recompute, per_block in ((False, False), (True, False), (True, True)):
        yield from (Contender(how, recompute, per_block=per_block) for how in _HOWS)


def rows(
    workload: Workload,
    num_ranks: int,
    budget: int,
    known: Sequence[Row],
    wanted: Sequence[Contender],
) -> Iterator[list[Row]]:
    """Yield all rows found so far whenever there is one more; each core works on one row."""
    there = {
        row["contender"] for row in known if (row["ranks"], row["budget"]) == (num_ranks, budget)
    }
    found = list(known)
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    ) as pool:
        missing = [contender for contender in wanted if contender.label not in there]
        for row in pool.map(
            row_of, missing, *zip(*[(workload, num_ranks, budget)] * len(missing), strict=True)
        ):
            found.append(row)
            yield found
    yield found


def table(workload: Workload, found: Sequence[Row]) -> str:
    lines = ["| | blocks | parameters, 10^9 | its peak, GB |", "|---|---:|---:|---:|"]
    for row in found:
        depth = int(row["layers"])
        size = f"{workload.with_layers(depth).num_parameters / 1e9:.1f}" if depth else "-"
        lines.append(f"| {row['contender']} | {depth} | {size} | {int(row['peak']) / 1e9:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="llama-70b", help="the shape that gives the width"
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--budget", type=float, default=80e9, help="bytes that a rank has")
    parser.add_argument("--only", type=How, nargs="+", default=list(_HOWS), help="these contenders")
    parser.add_argument(
        "--json",
        type=Path,
        help="a file of rows: its rows are not counted again, and new ones are added",
    )
    options = parser.parse_args()
    workload = SHAPES[options.shape]
    known: list[Row] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    )
    wanted = [each for each in contenders() if each.how in options.only]
    for found in rows(workload, options.ranks, int(options.budget), known, wanted):
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    print(
        f"torch {torch.__version__}, {options.shape}'s width, {options.ranks} ranks of "
        f"{options.budget / 1e9:g} GB\n"
    )
    print(table(workload, found))


if __name__ == "__main__":
    main()
