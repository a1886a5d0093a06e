"""Live bytes at the peak of a step, beside one process at N times the batch, FSDP2 and DDP.

python -m benchmarks.rtp.memory [--shape llama-8b] [--ranks 2 4 8] [--json FILE] [--plot PNG]   fake tensors, any size
python -m benchmarks.rtp.memory --shape deep --ranks 2 4 --real                                 gloo ranks, with resident memory
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gyre_trainer.mesh import make_mesh

from benchmarks.rtp.bars import draw
from benchmarks.rtp.contenders import Contender, How
from benchmarks.rtp.live import peak_of_fake_step, peak_of_step, peaks_of_fake_steps
from benchmarks.rtp.ranks import run_on_ranks
from benchmarks.rtp.resident import resident_peak_of_step
from benchmarks.rtp.workloads import DEEP, LLAMA_8B, LLAMA_70B, SMALL, TOY, Workload

SHAPES = {"small": SMALL, "deep": DEEP, "llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "toy": TOY}
Row = dict[str, int | str]


def contenders(workload: Workload, *, recompute: bool) -> list[Contender]:
    found = [Contender(How.ALONE, recompute), Contender(How.GYRE, recompute), Contender(How.FSDP2_SUB_BLOCK, recompute)]
    return [*found, Contender(How.FSDP2_LAYER, recompute, eager_loss=workload.vocabulary), Contender(How.DDP, recompute)]


def fake_rows(workload: Workload, nums_ranks: Sequence[int], recomputes: Sequence[bool]) -> Iterator[Row]:
    """Each in a process of its own, as many at a time as there are cores."""
    cases = [
        (contender, workload, num_ranks)
        for num_ranks in nums_ranks
        for recompute in recomputes
        for contender in contenders(workload, recompute=recompute)
    ]
    for (contender, _, num_ranks), peak in zip(cases, peaks_of_fake_steps(cases), strict=True):
        yield {"ranks": num_ranks, "contender": contender.label, "peak": sum(peak.values()), **peak}


def real_rows(workload: Workload, nums_ranks: Sequence[int], recomputes: Sequence[bool]) -> Iterator[Row]:
    for num_ranks in nums_ranks:
        yield from _real_rows(workload, num_ranks, recomputes)


def _real_rows(workload: Workload, num_ranks: int, recomputes: Sequence[bool]) -> Iterator[Row]:
    """Live bytes of rank 0 and the largest resident memory of all ranks; one process is accounted for on fake tensors."""
    for recompute in recomputes:
        alone, *others = contenders(workload, recompute=recompute)
        peak = peak_of_fake_step(alone, workload, num_ranks)
        yield {"ranks": num_ranks, "contender": alone.label, "peak": sum(peak.values()), **peak}
        for contender in others:
            peak = run_on_ranks(num_ranks, _real_peak, contender, workload)[0]
            resident = max(run_on_ranks(num_ranks, resident_peak_of_step, contender, workload))
            yield {"ranks": num_ranks, "contender": contender.label, "peak": sum(peak.values()), **peak, "resident": resident}


def _real_peak(contender: Contender, workload: Workload) -> dict[str, int]:
    return peak_of_step(contender, workload, make_mesh("cpu"), 1, fake=False)


def table(rows: list[Row]) -> str:
    """MiB, and Gyre's peak as a multiple of each other's."""
    resident = any("resident" in row for row in rows)
    lines = ["| ranks | | live at the peak, MiB | Gyre's to it |" + " resident, MiB |" * resident]
    lines.append("|---:|---|---:|---:|" + "---:|" * resident)
    for row in rows:
        recompute = "recomputation" in str(row["contender"])
        gyre = next(
            other
            for other in rows
            if other["ranks"] == row["ranks"]
            and str(other["contender"]).startswith(How.GYRE)
            and ("recomputation" in str(other["contender"])) == recompute
        )
        ratio = int(gyre["peak"]) / int(row["peak"])
        end = f" {int(row['resident']) / 2**20:,.0f} |" if "resident" in row else " - |" * resident
        lines.append(f"| {row['ranks']} | {row['contender']} | {int(row['peak']) / 2**20:,.1f} | {ratio:.3f} |{end}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="other than the shape's")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", choices=["kept", "recomputed"], help="activations; else both")
    parser.add_argument("--real", action="store_true", help="gloo ranks on this machine")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--plot", type=Path, help="also draw them here")
    options = parser.parse_args()
    workload = SHAPES[options.shape]
    if options.layers:
        workload = workload.with_layers(options.layers)
    rows: list[Row] = []
    recomputes = [recompute for recompute, name in ((False, "kept"), (True, "recomputed")) if options.only in (None, name)]
    for row in (real_rows if options.real else fake_rows)(workload, options.ranks, recomputes):
        rows.append(row)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    if options.plot:
        draw(
            rows,
            f"{options.shape}, {workload.model.num_layers} layers: live bytes of a rank at the peak of a step",
            options.plot,
        )
    print(f"torch {torch.__version__}, {options.shape}, {workload.model.num_layers} layers\n\n{table(rows)}")


if __name__ == "__main__":
    main()
