"""`gyre plan`, `rewind` and `why`: which samples steps have, and how their time was spent.

`plan` says it before any run, also the cost of each order, and a mixture's samples from each
source. `rewind` finds the samples behind steps of a run, and says how to leave these steps out.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import shtab
from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.datasets import sample_text
from gyre_client.command.options import (
    add_definition_arguments,
    add_transforms_argument,
    dataset_of,
    option,
    size_bytes,
    stages,
    steps,
    transforms_of,
)
from gyre_client.command.output import (
    CommandOutput,
    Picture,
    duration,
    facts,
    mount_line,
    page_width,
    table,
)
from gyre_client.display import Sample, contributions, decoder, plain, rows_of_step, size, words_of
from gyre_client.errors import CursorRejected, InvalidRequest
from gyre_client.page.training_run import RunFiles, read_run
from gyre_client.transport.arguments import (
    MAX_UINT32,
    MAX_UINT64,
    ORDERS,
    TAILS,
    order,
    skipped_steps,
    whole,
)
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
    about = "estimate requests, bytes, memory and shuffle quality"
    add("--cost", action="store_true", help=about)
    add("--epochs", type=int, default=1, help="how many epochs are read (1)")
    about = "of the node; as large as the data if absent"
    add("--cache", type=size_bytes, default=0, metavar="SIZE", help=about)


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
        order=_order(
            args,
            args.world_size,
            args.order,
            balance=dict(args.balance) or None,
            bucket=dict(args.bucket) or None,
        ),
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
        )
    )
    decodes = any(each.num_chunks_decoded for each in response.estimates)
    opens = any(each.num_opens for each in response.estimates)
    columns: list[tuple[str, bool, Callable[[pb.CostEstimate], str]]] = [
        ("ORDER", True, _name),
        ("REQUESTS", True, lambda each: f"{each.num_requests:,}"),
        ("FILES OPENED", opens, lambda each: f"{each.num_opens:,}"),
        ("BYTES", True, lambda each: size(each.num_bytes)),
        ("CHUNKS DECODED", decodes, lambda each: f"{each.num_chunks_decoded:,}"),
        ("BYTES DECODED", decodes, lambda each: size(each.num_bytes_decoded)),
        ("AMPLIFICATION", True, lambda each: f"{each.amplification:.2f}"),
        ("MEMORY", True, lambda each: size(each.memory_bytes)),
        ("DISPLACEMENT", True, lambda each: f"{each.quality.displacement:.2f}"),
        ("SPREAD", True, lambda each: f"{each.quality.spread:.2f}"),
        ("MIXING", True, lambda each: f"{each.quality.mixing:.2f}"),
    ]
    header = [name for name, is_shown, _ in columns if is_shown]
    rows = [
        [read(each) for _, is_shown, read in columns if is_shown] for each in response.estimates
    ]
    epochs = counted(args.epochs, "epoch")
    head = (
        f"{counted(response.num_samples, 'sample', ',')}, {epochs}: "
        f"{size(response.num_bytes_served)} served (estimated)"
    )
    text = f"{head}\n\n{table(header, rows)}\n\n{printable(response.recommendation)}"
    return CommandOutput(plain(response), text)


def _order(args: argparse.Namespace, world_size: int, mode: str, **more: Any) -> pb.OrderSpec:
    sizes = (args.io_block, args.window)
    return order(args.batch_size, world_size, args.seed, args.tail, mode, *sizes, **more)


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


_MAX_LOCATED_STEPS = 100  # in a range: each step is a call
_SHOWN_ROWS = 8  # of a step, in the text for people


def add_rewind_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run, the steps, and options that its files lack."""
    about = "the folder of a run of gyre-train, a checkpoint, or a file with a state's cursor"
    run = parser.add_argument("run_path", metavar="RUN", type=Path, help=about)
    run.complete = shtab.FILE  # type: ignore[attr-defined]
    about = "steps of the run: one, or those from A to before B; of a cursor, steps of its order"
    parser.add_argument("--step", type=steps, required=True, metavar="S|A:B", help=about)
    parser.add_argument("--num", type=int, default=2, help="rows of each step to show (2)")
    about = "show token ids as text: a file of the library tokenizers, or bytes"
    parser.add_argument("--tokenizer", metavar="FILE", help=about)
    about = "a name, a path or a URI; the run's own if absent"
    parser.add_argument("--dataset", metavar="DATASET", help=about)
    add_definition_arguments(parser)
    add_transforms_argument(parser)
    parser.set_defaults(prepare=_prepare)


def _prepare(args: argparse.Namespace) -> None:
    """Reads the run's files, which name its dataset, and the file of its transforms."""
    args.files, args.chain = read_run(args.run_path), transforms_of(args)
    if args.dataset is None:
        if not args.files.dataset:
            raise InvalidRequest(f"{args.run_path} does not name its dataset: give --dataset")
        args.dataset, args.format = args.files.dataset, args.format or args.files.format or None
        given = dict(args.option)
        if args.chain is not None:
            given["transforms"] = args.chain
        options = args.files.options_to_take(args.run_path, given)
        args.option = [*options.items(), *args.option]


def rewind(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the rows of each step with their places, some of them shown, and advice."""
    first, stop = args.step
    stop = first + 1 if stop is None else stop
    if not 0 <= first < stop <= first + _MAX_LOCATED_STEPS:
        raise InvalidRequest(
            f"--step {first}:{stop} is no range of 1 to {_MAX_LOCATED_STEPS} steps"
        )
    num = whole("num", args.num, 0, MAX_UINT32)
    decode = decoder(args.tokenizer)
    files: RunFiles = args.files
    request = pb.LocateStepRequest(
        dataset=dataset_of(args), cursor=files.cursor, transforms=args.chain
    )
    values: list[dict[str, Any]] = []
    more: list[str | Picture] = []
    found = []
    for step in range(first, stop):
        setattr(request, "batch" if files.counts_batches else "step", step)
        located = _located(connection, request)
        found.append(located)
        shown = range(min(num, len(located.rows)))
        samples = [rows_of_step(connection, located, request, row, 1)[0] for row in shown]
        more.append(f"{'' if step == first else chr(10)}{_step_text(files, step, located)}")
        for row, sample in enumerate(samples):
            more += sample_text(sample, f"row {row}, sample {sample.sample_id}", decode)
        values.append(_value(files, step, located, samples))
    advice = _advice(files, first, found)
    skip = [list(each) for each in _ranges(found)]
    return CommandOutput({"steps": values, "skip_steps": skip}, "", more=[*more, f"\n{advice}"])


def _located(connection: Connection, request: pb.LocateStepRequest) -> pb.LocateStepResponse:
    try:
        return connection.locate_step(request)
    except CursorRejected as error:
        if error.facts.get("differs") != "fingerprint":
            raise
        more = "if the run's data had further options, give them: --option, --pack, --transforms"
        raise error.told(f"{error}; {more}") from error


def _step_text(files: RunFiles, step: int, located: pb.LocateStepResponse) -> str:
    """Returns the head of a step, and the table of its rows."""
    if located.skipped:
        return f"step {step} is left out by the job"
    head = f"step {step}"
    if located.step != step:
        head += f" of the run, step {located.step} of the data's order"
    elif files.counts_batches and not located.skip_steps.ranges:
        head += " of the run and of the data's order"
    head += f", epoch {located.epoch}"
    if (loss := files.loss(step)) is not None:
        head += f", loss {loss:.4f}"
    recorded = files.is_recorded(step, [row.sample_id for row in located.rows])
    if recorded is not None:
        head += (
            "; the history has the same samples"
            if recorded
            else "; THE HISTORY HAS OTHER SAMPLES: the run had another dataset, order or cursor"
        )
    return f"{head}\n{_contributions(located)}{table(*_rows(located))}"


def _contributions(located: pb.LocateStepResponse) -> str:
    """Returns how many samples each source, or each of some shards, contributed."""
    counts = contributions(located)
    parts = [f"{printable(name)} {count:,}" for name, count in counts.most_common(_SHOWN_ROWS)]
    rest = f", {len(counts) - _SHOWN_ROWS:,} more" if len(counts) > _SHOWN_ROWS else ""
    return f"{', '.join(parts)}{rest}\n"


def _rows(located: pb.LocateStepResponse) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Returns the heads and rows of the table of samples."""
    is_packed = any(each.num_tokens for row in located.rows for each in row.samples)
    heads = ["ROW", *(["SEQUENCE"] if is_packed else []), *(["SOURCE"] if located.sources else [])]
    heads += ["SAMPLE", "SHARD", "ITS ROW", "OFFSET", "SIZE", *(["TOKENS"] if is_packed else [])]
    rows: list[Sequence[object]] = []
    for number, row in enumerate(located.rows[:_SHOWN_ROWS]):
        for sample in row.samples:
            end = sample.first_token + sample.num_tokens
            rows.append(
                [
                    f"{number}{' (padding)' if row.padding else ''}",
                    *([row.sample_id] if is_packed else []),
                    *([printable(located.sources[sample.source])] if located.sources else []),
                    sample.sample_id,
                    printable(located.shards[sample.shard]),
                    f"{sample.row:,}",
                    f"{sample.offset:,}" if sample.HasField("offset") else "-",
                    size(sample.num_bytes),
                    *([f"{sample.first_token}:{end}"] if is_packed else []),
                ]
            )
    if len(located.rows) > _SHOWN_ROWS:
        rows.append([f"... {len(located.rows) - _SHOWN_ROWS:,} more", *[""] * (len(heads) - 1)])
    return heads, rows


def _ranges(found: Sequence[pb.LocateStepResponse]) -> list[tuple[int, int]]:
    """Returns all steps to leave out: those that were found, and those that the job leaves out."""
    asked = [(each.step, each.step + 1) for each in found]
    asked += [(each.first, each.stop) for each in found[0].skip_steps.ranges]
    return [(each.first, each.stop) for each in skipped_steps(asked).ranges]


def _advice(files: RunFiles, first: int, found: Sequence[pb.LocateStepResponse]) -> str:
    ranges = _ranges(found)
    pairs = ", ".join(f"({begin}, {end})" for begin, end in ranges)
    lists = ", ".join(f"[{begin}, {end}]" for begin, end in ranges)
    earlier = [step for step in files.checkpoints if step <= first]
    if earlier:
        where = f"resume from the checkpoint step-{earlier[-1]:08} or an earlier one"
    elif files.checkpoints:
        where = "no checkpoint from before them is left, so begin again"
    else:
        where = "resume from a state from before them"
    return (
        f"To leave these steps out, {where}, with Loader(..., skip_steps=[{pairs}]), or in the "
        f"configuration of gyre-train: data.skip_steps = [{lists}]"
    )


def _value(
    files: RunFiles, step: int, located: pb.LocateStepResponse, samples: Sequence[Sample]
) -> dict[str, Any]:
    recorded = files.is_recorded(step, [row.sample_id for row in located.rows])
    return {
        "run_step": step,
        "is_in_history": recorded,
        **plain(located),
        "shown": [
            {name: words_of(value) for name, value in each.values.items()} for each in samples
        ],
    }


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select batches."""
    parser.add_argument("--step", type=int, required=True, help="a global step: `loader.last_step`")
    parser.add_argument("--job", default="", help="of this job only")


def why(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the timings of a step's batches, the newest first."""
    step = whole("step", args.step, 0, MAX_UINT64)
    response = connection.explain(
        pb.ExplainStepRequest(dataset=dataset_of(args), step=step, job=args.job)
    )
    values = [plain(timing) for timing in response.timings]
    values += [plain(mount) for mount in response.mounts]
    return CommandOutput(values, why_text(response, page_width()))


def why_text(response: pb.ExplainStepResponse, num_columns: int | None = None) -> str:
    """Returns the text for people, in lines no longer than `num_columns`."""
    parts = [_timing(timing, num_columns) for timing in response.timings]
    if response.mounts:
        parts.append(facts([("hangs", mount_line(each)) for each in response.mounts], num_columns))
    return "\n\n".join(parts)


def _timing(timing: pb.BatchTiming, num_columns: int | None) -> str:
    steps = f"step {timing.first_step}"
    if timing.stop_step - timing.first_step > 1:
        steps = f"steps {timing.first_step} to {timing.stop_step - 1}, which were read together,"
    awaited = "; the trainer waited for it" if timing.awaited else "; no trainer waited for it"
    # another user's has no name here
    job = f"job {printable(timing.job)}" if timing.job else "a job of another user that shared it"
    head = (
        f"{steps} of {job}, rank {timing.rank} of {timing.world_size}, {duration(timing.ago_s)} ago"
    )
    pairs: list[tuple[str, object]] = [
        ("took", f"{_ms(timing.total_s)}{awaited}"),
        ("bound by", "storage" if timing.storage_s > timing.total_s / 2 else "processor"),
        ("reading", f"{_ms(timing.read_s)}, {_ms(timing.storage_s)} of it waiting for storage"),
        ("decoding", _ms(timing.finish_s)),
    ]
    if timing.num_requests:
        pairs.append(("requests", _requests(timing)))
    if timing.HasField("slowest"):
        pairs += _slowest(timing.slowest)
    if timing.error:
        pairs.append(("failed", timing.error))
    return f"{head}\n{facts(pairs, num_columns)}"


def _requests(timing: pb.BatchTiming) -> str:
    counts = [
        (timing.num_joined, "asked for already"),
        (timing.num_refused, "times refused"),
        (timing.num_retries, "sent again"),
        (timing.num_hedges, "sent twice for being late"),
    ]
    parts = [f"{timing.num_requests:,} of {size(timing.num_bytes)} in all"]
    return ", ".join(parts + [f"{count:,} {what}" for count, what in counts if count])


def _slowest(request: pb.RequestTiming) -> list[tuple[str, object]]:
    total_s = request.queue_s + request.tried_s + request.first_byte_s + request.body_s
    parts = [
        f"{_ms(request.queue_s)} in the queue",
        f"{_ms(request.tried_s)} in failed tries and pauses",
        f"{_ms(request.first_byte_s)} until the first byte",
        f"{_ms(request.body_s)} for the body",
    ]
    where = (
        f"{request.shard}, bytes {request.start:,} to {request.stop:,}; "
        f"requests sent: {request.num_tries}"
    )
    return [("slowest", f"{_ms(total_s)}: {', '.join(parts)}"), ("", where)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
