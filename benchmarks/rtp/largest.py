"""The deepest model of Llama-3-8B's width that trains on 8 ranks of 80 GB under DDP, FSDP2 and Gyre.

python -m benchmarks.rtp.largest [--ranks 8] [--budget 80e9] [--depths 2 4 8]

A peak is counted at three depths, on fake tensors. Where it grows by as many bytes per block from the first to the second
as from the second to the third, which is checked, the depth that fits is found by bisection on that line.
"""

import argparse
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.rtp.contenders import Contender, How
from benchmarks.rtp.live import peaks_of_fake_steps
from benchmarks.rtp.workloads import LLAMA_8B, Workload

_HOWS = (How.DDP, How.FSDP2_LAYER, How.FSDP2_SUB_BLOCK, How.GYRE)
_DEEPEST = 100_000


@dataclass(frozen=True)
class Line:
    """Bytes at the peak, for every depth: ``at_zero`` + ``per_layer`` * depth."""

    at_zero: int
    per_layer: int

    def peak(self, num_layers: int) -> int:
        return self.at_zero + self.per_layer * num_layers

    def deepest(self, budget: float) -> int:
        """Layers whose peak is within the budget; 0 where not even one is."""
        return bisect_right(range(1, _DEEPEST), budget, key=self.peak)


def line_through(depths: Sequence[int], peaks: Sequence[int]) -> Line:
    """Raises ValueError where the points are not on one line."""
    (one, *_, other), (low, *_, high) = depths, peaks
    line = Line(0, (high - low) // (other - one))
    line = Line(low - line.peak(one), line.per_layer)
    if any(line.peak(depth) != peak for depth, peak in zip(depths, peaks, strict=True)):
        raise ValueError(f"peaks {list(peaks)} at depths {list(depths)} are not on one line")
    return line


def num_parameters(workload: Workload, num_layers: int) -> int:
    model = workload.model
    attention = 2 * model.dim * model.dim * (1 + model.num_kv_heads / model.num_heads)
    mlp = (3 if model.gated_mlp else 2) * model.dim * model.hidden_dim
    return int(num_layers * (attention + mlp) + 2 * model.vocab_size * model.dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--budget", type=float, default=80e9, help="bytes of a rank")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    contenders = [Contender(how, recompute) for recompute in (False, True) for how in _HOWS]
    cases = [(each, LLAMA_8B.with_layers(depth), options.ranks) for each in contenders for depth in options.depths]
    peaks = iter([sum(peak.values()) for peak in peaks_of_fake_steps(cases)])
    print(f"torch {torch.__version__}, {options.ranks} ranks of {options.budget / 1e9:g} GB, depths {options.depths}\n")
    print("| | blocks | parameters, 10^9 | its peak, GB | MiB per block | MiB beside blocks |\n|---|---:|---:|---:|---:|---:|")
    for contender in contenders:
        line = line_through(options.depths, [next(peaks) for _ in options.depths])
        deepest = line.deepest(options.budget)
        size, peak = num_parameters(LLAMA_8B, deepest) / 1e9, line.peak(deepest) / 1e9
        beside = f"{line.per_layer / 2**20:,.1f} | {line.at_zero / 2**20:,.1f}"
        print(f"| {contender.label} | {deepest} | {size:.1f} | {peak:.2f} | {beside} |")


if __name__ == "__main__":
    main()
