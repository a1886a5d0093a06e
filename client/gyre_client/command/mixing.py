"""`gyre plan MIXTURE --sources --step A:B`: the samples from each source of a mixture."""

import argparse
from collections.abc import Sequence
from itertools import pairwise

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.display.formatting import CommandOutput, plain, table
from gyre_client.errors import InvalidRequest
from gyre_client.transport.connection import Connection

_MAX_ROWS = 20  # of a plan, each some steps
_BAR = 40  # characters
_MARKS = "█▓▒░#=+*o.:-"


def plan_mixture(
    connection: Connection, args: argparse.Namespace, order: pb.OrderSpec
) -> CommandOutput:
    """Draws the contributions of a mixture's sources to a range of steps."""
    first, stop = args.step
    if stop is None or not 0 <= first < stop:
        raise InvalidRequest("--sources takes a range of steps, such as --step 0:1000")
    num_rows = min(_MAX_ROWS, stop - first)
    bounds = [first + (stop - first) * row // num_rows for row in range(num_rows + 1)]
    answer = connection.plan_mixture(
        pb.PlanMixtureRequest(dataset=dataset_of(args), order=order, steps=bounds, job=args.job)
    )
    if len(answer.counts) != len(bounds) or any(
        len(each.num_samples) != len(answer.sources) for each in answer.counts
    ):
        raise InvalidRequest("the daemon's plan does not fit the question; upgrade the client")
    counts = [list(each.num_samples) for each in answer.counts]
    return CommandOutput(plain(answer), f"{_sources(answer, counts)}\n\n{_bars(bounds, counts)}")


def _sources(answer: pb.PlanMixtureResponse, counts: Sequence[Sequence[int]]) -> str:
    read = [after - before for before, after in zip(counts[0], counts[-1], strict=True)]
    total = max(sum(read), 1)
    rows = [
        (
            _MARKS[number % len(_MARKS)],
            printable(source.name),
            f"{read[number]:,}",
            f"{read[number] / total:.2%}",
            f"{counts[0][number] / max(source.num_samples, 1):.2f}",
            f"{counts[-1][number] / max(source.num_samples, 1):.2f}",
        )
        for number, source in enumerate(answer.sources)
    ]
    header = ("", "SOURCE", "SAMPLES", "SHARE", "EPOCHS BEFORE", "EPOCHS AFTER")
    phases = [
        f"from step {phase.first_step:,}{' (given to the job)' if phase.given else ''}: "
        + ", ".join(
            f"{printable(source.name)} {share:.2%}"
            for source, share in zip(answer.sources, phase.shares, strict=True)
        )
        for phase in answer.phases
    ]
    return "\n".join([table(header, rows), "", *phases])


def _bars(bounds: Sequence[int], counts: Sequence[Sequence[int]]) -> str:
    lines = []
    width = len(f"{bounds[-1]:,}")
    for (begin, end), (before, after) in zip(pairwise(bounds), pairwise(counts), strict=True):
        read = [two - one for one, two in zip(before, after, strict=True)]
        ends = [round(_BAR * sum(read[: number + 1]) / sum(read)) for number in range(len(read))]
        bar = "".join(
            _MARKS[number % len(_MARKS)] * (stop - start)
            for number, (start, stop) in enumerate(pairwise([0, *ends]))
        )
        lines.append(f"steps {begin:>{width},} to {end:>{width},}  {bar}")
    return "\n".join(lines)
