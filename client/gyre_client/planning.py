"""What `gyre plan` answers before any run: the samples of steps, or what reading a dataset costs in each order."""

import argparse
import re
from fractions import Fraction
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.arguments import MAX_UINT64, order, whole
from gyre_client.connection import Connection
from gyre_client.errors import InvalidRequest
from gyre_client.report import size, table
from gyre_client.wire import ORDERS, TAILS, plain

MAX_STEPS = 1000  # of a range: each is a call

_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{0,3})", re.ASCII)
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}  # as in the daemon's configuration
_DECIMAL_UNITS = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_BYTES = {"": 1, "B": 1} | _BINARY_UNITS | _DECIMAL_UNITS


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """`parser` takes what the functions below read."""
    parser.add_argument("--batch-size", type=int, required=True, help="the global batch size, over all ranks")
    parser.add_argument("--tail", choices=tuple(TAILS), default="wrap")
    parser.add_argument("--order", choices=tuple(ORDERS), default="full")
    parser.add_argument("--io-block", type=_bytes, default=0, metavar="SIZE", help="about how long a block is, such as 1MiB")
    parser.add_argument("--window", type=int, default=0, metavar="BLOCKS", help="how many blocks are mixed with each other")
    steps = parser.add_argument_group("the samples of steps")
    steps.add_argument("--step", type=_steps, metavar="S|A:B", help="one step, or those from A to before B")
    steps.add_argument("--rank", type=int, default=0)
    steps.add_argument("--world-size", type=int, default=1)
    cost = parser.add_argument_group("what each order costs")
    cost.add_argument("--cost", action="store_true", help="estimate requests, bytes, memory, shuffle quality and money")
    cost.add_argument("--epochs", type=int, default=1)
    cost.add_argument("--cache", type=_bytes, default=0, metavar="SIZE", help="of the node; as large as the data if absent")
    cost.add_argument("--request-price", type=float, metavar="MONEY", help="of 1000 requests; no money is reckoned if absent")
    cost.add_argument("--egress-price", type=float, metavar="MONEY", help="of 10^9 bytes read")


def plan_of_steps(connection: Connection, dataset: pb.DatasetRef, args: argparse.Namespace) -> tuple[Any, str]:
    """Returns the samples of each step: one plan where one step was asked for, else a list."""
    first, stop = args.step
    whole("step", first, 0, MAX_UINT64)
    if stop is not None and not 0 < stop - first <= MAX_STEPS:
        raise InvalidRequest(f"--step {first}:{stop} is no range of 1 to {MAX_STEPS} steps")
    request = pb.PlanStepRequest(
        dataset=dataset,
        order=order(args.batch_size, args.world_size, args.seed, args.tail, args.order, *_blocks(args)),
        rank=whole("rank", args.rank, 0, args.world_size - 1),
        world_size=args.world_size,
    )
    values, texts = [], []
    for request.step in range(first, first + 1 if stop is None else stop):
        plan = connection.plan_step(request)
        head = f"step {request.step} begins at position {plan.first_position}, in epoch {plan.epoch}"
        texts.append(f"{head}; rank {args.rank} of {args.world_size} reads the samples\n{' '.join(_marked(plan))}")
        values.append(plain(plan) if stop is None else {"step": request.step, **plain(plan)})
    return values[0] if stop is None else values, "\n".join(texts)


def cost_of_orders(connection: Connection, dataset: pb.DatasetRef, args: argparse.Namespace) -> tuple[Any, str]:
    """Returns what each order costs, and which one to take."""
    answer = connection.plan_cost(
        pb.PlanCostRequest(
            dataset=dataset,
            order=order(args.batch_size, 1, args.seed, args.tail, "block", *_blocks(args)),
            num_epochs=whole("epochs", args.epochs, 1, MAX_UINT64),
            cache_bytes=whole("cache", args.cache, 0, MAX_UINT64),
            price_per_1000_requests=args.request_price,
            price_per_gb=args.egress_price,
        )
    )
    header = ("ORDER", "REQUESTS", "BYTES", "AMPLIFICATION", "MEMORY", "DISPLACEMENT", "SPREAD", "MIXING", "MONEY")
    rows = [
        (
            _name(each),
            f"{each.num_requests:,}",
            size(each.num_bytes),
            f"{each.amplification:.2f}",
            size(each.memory_bytes),
            f"{each.quality.displacement:.2f}",
            f"{each.quality.spread:.2f}",
            f"{each.quality.mixing:.2f}",
            f"{each.money:,.2f}" if each.HasField("money") else "-",
        )
        for each in answer.estimates
    ]
    epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs} epochs"
    head = f"{answer.num_samples:,} samples, {epochs}: {size(answer.num_bytes_served)} served (estimated)"
    return plain(answer), f"{head}\n\n{table(header, rows)}\n\n{answer.recommendation}"


def _name(estimate: pb.CostEstimate) -> str:
    if not estimate.window_blocks:
        return estimate.order
    return f"{estimate.order} ({size(estimate.io_block_bytes)}, {estimate.window_blocks})"


def _blocks(args: argparse.Namespace) -> tuple[int, int]:
    return args.io_block, args.window


def _marked(plan: pb.PlanStepResponse) -> list[str]:
    """The sample ids, padding in brackets."""
    counts = plan.mask or [True] * len(plan.sample_ids)
    return [str(sample) if counted else f"({sample})" for sample, counted in zip(plan.sample_ids, counts, strict=True)]


def _steps(text: str) -> tuple[int, int | None]:
    """One step, or the first of a range and the one behind it."""
    first, colon, stop = text.partition(":")
    try:
        return int(first), int(stop) if colon else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a range A:B") from None


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if not match or match[2] not in _UNIT_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 1048576, 1MiB (binary) or 1MB (decimal)")
    return int(Fraction(match[1]) * _UNIT_BYTES[match[2]])
