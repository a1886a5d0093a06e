"""Live bytes at the peak of a step, beside one process at N times the batch, FSDP2 and DDP.

    python -m benchmarks.rtp.memory [--shape llama-8b] [--ranks 2 4 8] [--json FILE] [--plot PNG]
    python -m benchmarks.rtp.memory --shape deep --ranks 2 4 --real

The first form counts fake tensors, of any size. The second runs gloo ranks and measures their
resident memory too. A call that was cut short continues with the same --json FILE.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gyre_trainer.comm.mesh import make_mesh

from benchmarks.rtp.bars import draw
from benchmarks.rtp.contenders import Contender, How
from benchmarks.rtp.floor import floor_bytes
from benchmarks.rtp.live import Step, fake_step, fake_steps, measured_step
from benchmarks.rtp.ranks import run_on_ranks
from benchmarks.rtp.resident import resident_peak_of_step
from benchmarks.rtp.workloads import DEEP, LLAMA_8B, LLAMA_70B, SMALL, TOY, Workload

SHAPES = {"small": SMALL, "deep": DEEP, "llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "toy": TOY}
KEEPS = ("all", "sub-blocks", "blocks")
RECOMPUTATIONS = (", recomputation per block", ", recomputation")
Row = dict[str, int | str]
Case = tuple[Contender, Workload, int]


def contenders(workload: Workload, keeps: str) -> list[Contender]:
    """All contenders that keep as much: all activations, or those of sub-blocks or of blocks."""
    recompute, per_block = keeps != "all", keeps == "blocks"
    hows = (How.ALONE, How.GYRE, How.FSDP2_SUB_BLOCK, How.FSDP2_LAYER, How.DDP)
    found = [Contender(how, recompute, per_block=per_block) for how in hows]
    eager = Contender(How.FSDP2_LAYER, recompute, eager_loss=True, per_block=per_block)
    return [*found, eager] if workload.vocabulary else found


def fake_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield a row for each case, each counted in a process of its own."""
    for case, step in zip(cases, fake_steps(cases), strict=True):
        yield row_of(case, step)


def real_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield live bytes of rank 0, and the resident memory of the rank that has the most.

    One process takes the batch of all ranks, and its bytes are divided by their number.
    """
    for case in cases:
        contender, workload, num_ranks = case
        alone = contender.how is How.ALONE
        step = (
            fake_step(*case)
            if alone
            else run_on_ranks(num_ranks, _real_step, contender, workload)[0]
        )
        shares = num_ranks if alone else 1
        resident = max(
            run_on_ranks(num_ranks // shares, resident_peak_of_step, contender, workload, shares)
        )
        yield {
            **row_of(case, step),
            "resident": resident.proportional // shares,
            "all pages": resident.all_pages // shares,
        }


def row_of(case: Case, step: Step) -> Row:
    contender, workload, num_ranks = case
    model = workload.model
    key: Row = {
        "layers": model.num_layers,
        "tokens": workload.tokens_per_rank,
        "ranks": num_ranks,
        "contender": contender.label,
    }
    return {**key, "peak": step.peak_bytes, "sent": step.sent, **step.peak}


def is_of(row: Row, case: Case) -> bool:
    contender, workload, num_ranks = case
    found = row["layers"], row["tokens"], row["ranks"], row["contender"]
    return found == (
        workload.model.num_layers,
        workload.tokens_per_rank,
        num_ranks,
        contender.label,
    )


def _real_step(contender: Contender, workload: Workload) -> Step:
    return measured_step(contender, workload, make_mesh("cpu"), 1, fake=False)


def table(rows: list[Row]) -> str:
    """A table in MiB, with Gyre's peak relative to that of each contender that recomputes as much.

    The floor is `floor_bytes`.
    """
    resident = any("resident" in row for row in rows)
    heading = "| tokens | ranks | | live at the peak, MiB | Gyre's to it | floor, MiB | sent, MiB |"
    lines = [heading + " resident, MiB | Gyre's to it | with all shared pages, MiB |" * resident]
    lines.append("|---:|---:|---|---:|---:|---:|---:|" + "---:|---:|---:|" * resident)
    for row in rows:
        gyre = next((other for other in rows if _is_gyres_beside(other, row)), None)
        cells = [
            row["tokens"],
            row["ranks"],
            row["contender"],
            f"{_mib(row, 'peak'):,.1f}",
            _ratio(gyre, row, "peak"),
        ]
        cells += [f"{_mib(row, field):,.0f}" for field in ("floor", "sent")]
        if resident:
            cells += [
                f"{_mib(row, 'resident'):,.0f}",
                _ratio(gyre, row, "resident"),
                f"{_mib(row, 'all pages'):,.0f}",
            ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _mib(row: Row, field: str) -> float:
    return int(row[field]) / 2**20


def _ratio(gyre: Row | None, row: Row, field: str) -> str:
    return f"{int(gyre[field]) / int(row[field]):.3f}" if gyre else "-"


def _is_gyres_beside(other: Row, row: Row) -> bool:
    alike = all(other[key] == row[key] for key in ("layers", "tokens", "ranks"))
    return alike and other["contender"] == str(How.GYRE) + _recomputation(row)


def _recomputation(row: Row) -> str:
    return next((words for words in RECOMPUTATIONS if words in str(row["contender"])), "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="other than the shape's")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="of a rank's one sequence, other than the shape's"
    )
    parser.add_argument(
        "--keep",
        choices=KEEPS,
        nargs="+",
        default=KEEPS,
        help="which activations are kept; the others are recomputed",
    )
    parser.add_argument("--only", type=How, nargs="+", default=list(How), help="these contenders")
    parser.add_argument("--real", action="store_true", help="gloo ranks on this machine")
    parser.add_argument(
        "--json",
        type=Path,
        help="a file of rows: its rows are not counted again, and new ones are added",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        help="also draw the rows with recomputation and the last number of tokens",
    )
    options = parser.parse_args()
    shape = SHAPES[options.shape].with_layers(
        options.layers or SHAPES[options.shape].model.num_layers
    )
    cases = [
        (contender, workload, num_ranks)
        for workload in map(shape.with_tokens, options.tokens or [shape.model.max_seq_len])
        for num_ranks in options.ranks
        for keeps in options.keep
        for contender in contenders(workload, keeps)
        if contender.how in options.only
    ]
    rows: list[Row] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    )
    missing = [case for case in cases if not any(is_of(row, case) for row in rows)]
    for row in (real_rows if options.real else fake_rows)(missing):
        rows.append(row)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    rows = [
        {**row, "floor": floor_bytes(*case)} for case in cases for row in rows if is_of(row, case)
    ]
    if options.plot:
        shown = [row for row in rows if row["tokens"] == rows[-1]["tokens"] and _recomputation(row)]
        size = f"{shape.model.num_layers} layers, {rows[-1]['tokens']} tokens per rank"
        draw(shown, f"{options.shape}, {size}: peak of a step", options.plot)
    print(
        f"torch {torch.__version__}, {options.shape}, {shape.model.num_layers} layers\n\n"
        f"{table(rows)}"
    )


if __name__ == "__main__":
    main()
