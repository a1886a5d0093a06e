"""`gyre plan`: the samples of steps, or the cost of each order, before any run.

Of a mixture also the samples from each source.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import (
    add_transforms_argument,
    dataset_of,
    option,
    size_bytes,
    stages,
    steps,
    transforms_of,
)
from gyre_client.display.formatting import CommandOutput, plain, size, table
from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import MAX_UINT64, whole
from gyre_client.messages.requests import ORDERS, TAILS, order
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


MAX_STEPS = 1000  # in a range: each step is a call
_QUALITY = ("DISPLACEMENT", "SPREAD", "MIXING")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    add = parser.add_argument
    add("--batch-size", type=int, required=True, help="the global batch size, over all ranks")
    about = "the treatment of samples that do not fill the last batch of an epoch (wrap)"
    add("--tail", choices=tuple(TAILS), default="wrap", help=about)
    about = "how the samples are gone through (full)"
    add("--order", choices=tuple(ORDERS), default="full", help=about)
    about = "about how long a block of the order `block` is, such as 1MiB; chosen if absent"
    add("--io-block", type=size_bytes, default=0, metavar="SIZE", help=about)
    about = "how many blocks are mixed with each other; chosen if absent"
    add("--window", type=int, default=0, metavar="BLOCKS", help=about)

    about = "one step, or those from A to before B"
    add("--step", type=steps, metavar="S|A:B", help=about)

    group = parser.add_argument_group("the samples of steps (--step)")
    add = group.add_argument
    about = "share out each step by linear=A and quadratic=B times lengths; repeatable"
    add("--balance", action="append", default=[], type=option, metavar="KEY=VALUE", help=about)
    about = "make batches of similar lengths by field=NAME and window_batches=W; repeatable"
    add("--bucket", action="append", default=[], type=option, metavar="KEY=VALUE", help=about)
    about = "how the job's dataset has grown, as `gyre status` shows it, such as 0:50000,3:80000"
    add("--stages", type=stages, metavar="EPOCH:SAMPLES,...", help=about)
    add_transforms_argument(group)
    add("--rank", type=int, default=0, help="whose samples, counted from 0 (0)")
    add("--world-size", type=int, default=1, help="the number of ranks (1)")

    add = parser.add_argument_group("the sources of a mixture (--sources --step A:B)").add_argument
    add("--sources", action="store_true", help="draw each source's contribution to the steps")
    add("--job", default="", help="a running job, with the weights that it was given")

    add = parser.add_argument_group("the cost of each order (--cost)").add_argument
    about = "estimate requests, bytes, memory, shuffle quality and money"
    add("--cost", action="store_true", help=about)
    add("--epochs", type=int, default=1, help="how many epochs are read (1)")
    about = "of the node; as large as the data if absent"
    add("--cache", type=size_bytes, default=0, metavar="SIZE", help=about)
    about = "of 1000 requests; no money is reckoned if absent"
    add("--request-price", type=float, metavar="MONEY", help=about)
    add("--egress-price", type=float, metavar="MONEY", help="of 10^9 bytes read")


def plan(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns samples of steps, contributions of sources to them, or costs of orders."""
    if args.cost == (args.step is not None) or (args.cost and args.sources):
        raise InvalidRequest(
            "there is nothing to plan. Give --step S or --step A:B for samples, --sources with "
            "--step A:B for the samples of each source of a mixture, or --cost"
        )
    if args.job and not args.sources:
        raise InvalidRequest("--job says whose weights count, and belongs to --sources")
    if args.transforms is not None and (args.sources or args.cost):
        raise InvalidRequest(
            "--transforms belongs to --step without --sources: neither costs nor sources "
            "are planned with the transforms of a script. Leave it out."
        )
    if args.sources:
        return plan_mixture(connection, args, _order(args, args.world_size, args.order))
    return _costs(connection, args) if args.cost else _steps(connection, args)


def _steps(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns one plan for one step, or a list of plans for a range."""
    first, stop = args.step
    whole("step", first, 0, MAX_UINT64)
    if stop is not None and not 0 < stop - first <= MAX_STEPS:
        raise InvalidRequest(f"--step {first}:{stop} is no range of 1 to {MAX_STEPS} steps")
    request = pb.PlanStepRequest(
        dataset=dataset_of(args),
        order=_order(args, args.world_size, args.order, dict(args.balance), dict(args.bucket)),
        rank=whole("rank", args.rank, 0, args.world_size - 1),
        world_size=args.world_size,
        stages=args.stages,
        transforms=transforms_of(args),
    )
    values: list[dict[str, Any]] = []
    texts, padding = [], []
    for request.step in range(first, first + 1 if stop is None else stop):
        step = connection.plan_step(request)
        balanced = ""
        if step.HasField("spread"):
            balanced = f"; the most expensive rank exceeds the mean by {step.spread:.2%}"
        if step.HasField("padding"):
            padding.append((step.padding, step.padding_without))
            balanced += (
                f"; padded to the longest, {step.padding:.1%} of the global batch is padding, and "
                f"{step.padding_without:.1%} without buckets"
            )
        texts.append(
            f"step {request.step} begins at position {step.first_position}, in epoch "
            f"{step.epoch}; rank {args.rank} of {args.world_size} reads the samples{balanced}\n"
            f"{' '.join(_marked(step))}"
        )
        values.append(plain(step) if stop is None else {"step": request.step, **plain(step)})
    if stop is not None and padding:
        now, before = (fmean(shares) for shares in zip(*padding, strict=True))
        texts.append(
            f"in the mean {now:.1%} of a step is padding, and {before:.1%} without buckets"
        )
    return CommandOutput(values[0] if stop is None else values, "\n".join(texts))


def _costs(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the cost of each order, and which one to take."""
    response = connection.plan_cost(
        pb.PlanCostRequest(
            dataset=dataset_of(args),
            order=_order(args, 1, "block"),
            num_epochs=whole("epochs", args.epochs, 1, MAX_UINT64),
            cache_bytes=whole("cache", args.cache, 0, MAX_UINT64),
            price_per_1000_requests=args.request_price,
            price_per_gb=args.egress_price,
        )
    )
    decodes = any(each.num_chunks_decoded for each in response.estimates)
    decoded = ("CHUNKS DECODED", "BYTES DECODED") if decodes else ()
    opens = any(each.num_opens for each in response.estimates)
    opened = ("FILES OPENED",) if opens else ()
    header = (
        "ORDER",
        "REQUESTS",
        *opened,
        "BYTES",
        *decoded,
        "AMPLIFICATION",
        "MEMORY",
        *_QUALITY,
        "MONEY",
    )
    rows = [
        (
            _name(each),
            f"{each.num_requests:,}",
            *((f"{each.num_opens:,}",) if opens else ()),
            size(each.num_bytes),
            *((f"{each.num_chunks_decoded:,}", size(each.num_bytes_decoded)) if decodes else ()),
            f"{each.amplification:.2f}",
            size(each.memory_bytes),
            f"{each.quality.displacement:.2f}",
            f"{each.quality.spread:.2f}",
            f"{each.quality.mixing:.2f}",
            f"{each.money:,.2f}" if each.HasField("money") else "-",
        )
        for each in response.estimates
    ]
    epochs = counted(args.epochs, "epoch")
    head = (
        f"{counted(response.num_samples, 'sample', ',')}, {epochs}: "
        f"{size(response.num_bytes_served)} served (estimated)"
    )
    text = f"{head}\n\n{table(header, rows)}\n\n{printable(response.recommendation)}"
    return CommandOutput(plain(response), text)


def _order(
    args: argparse.Namespace,
    world_size: int,
    mode: str,
    balance: Mapping[str, object] | None = None,
    bucket: Mapping[str, object] | None = None,
) -> pb.OrderSpec:
    blocks = (args.io_block, args.window)
    return order(
        args.batch_size,
        world_size,
        args.seed,
        args.tail,
        mode,
        *blocks,
        balance=balance or None,
        bucket=bucket or None,
    )


def _name(estimate: pb.CostEstimate) -> str:
    if not estimate.window_blocks:
        return estimate.order
    return f"{estimate.order} ({size(estimate.io_block_bytes)}, {estimate.window_blocks})"


def _marked(step: pb.PlanStepResponse) -> list[str]:
    """Returns the sample ids; those that only fill the batch up are in brackets."""
    is_counted = step.mask or [True] * len(step.sample_ids)
    return [
        str(sample) if counted else f"({sample})"
        for sample, counted in zip(step.sample_ids, is_counted, strict=True)
    ]
