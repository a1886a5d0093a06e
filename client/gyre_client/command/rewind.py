"""`gyre rewind`: the samples behind steps of a run, and how to leave these steps out.

`gyre why` says how the time of a step's batches was spent.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import shtab
from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import (
    add_definition_arguments,
    add_transforms_argument,
    dataset_of,
    steps,
    transforms_of,
)
from gyre_client.command.describe import sample_text
from gyre_client.display.descriptions import mount_line
from gyre_client.display.formatting import (
    CommandOutput,
    duration,
    facts,
    page_width,
    plain,
    size,
    table,
)
from gyre_client.display.media import Picture
from gyre_client.display.run_files import RunFiles, read_run
from gyre_client.display.samples import Sample, Value, sample_of_step, words_of
from gyre_client.errors import CursorRejected, InvalidRequest, NotInstalled
from gyre_client.messages.arguments import MAX_UINT32, MAX_UINT64, whole
from gyre_client.messages.requests import skipped_steps
from gyre_client.transport.connection import Connection

_MAX_STEPS = 100  # in a range: each step is a call
_MAX_ROWS = 8  # of a step, in the text for people
_OF_PACKING = frozenset(("position", "cu_seqlens", "document_id"))  # whole numbers, no token ids


def add_rewind_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run, the steps, and options that its files lack."""
    about = "the folder of a run of gyre-train, a checkpoint, or a file with a state's cursor"
    run = parser.add_argument("run_path", metavar="RUN", type=Path, help=about)
    run.complete = shtab.FILE  # type: ignore[attr-defined]
    about = "steps of the run: one, or those from A to before B; of a cursor, steps of its order"
    parser.add_argument("--step", type=steps, required=True, metavar="S|A:B", help=about)
    parser.add_argument("--num", type=int, default=2, help="rows of each step to show (2)")
    about = "decode token ids with this file of the library tokenizers"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=about)
    about = "a name, a path or a URI; the run's own if absent"
    parser.add_argument("--dataset", metavar="DATASET", help=about)
    add_definition_arguments(parser)
    add_transforms_argument(parser)
    parser.set_defaults(prepare=_prepare)


def _prepare(args: argparse.Namespace) -> None:
    """Reads the run's files, which name its dataset, and the file of its transforms.

    Raises:
        InvalidRequest: They do not, or cannot be read.
    """
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
    if not 0 <= first < stop <= first + _MAX_STEPS:
        raise InvalidRequest(f"--step {first}:{stop} is no range of 1 to {_MAX_STEPS} steps")
    num = whole("num", args.num, 0, MAX_UINT32)
    decode = _decoder(args.tokenizer)
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
        samples = [sample_of_step(connection, located, request, row) for row in shown]
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
    return f"{head}\n{_sources(located)}{table(*_rows(located))}"


def _sources(located: pb.LocateStepResponse) -> str:
    """Returns how many samples each source, or each of some shards, contributed."""
    samples = [sample for row in located.rows for sample in row.samples]
    if located.sources:
        counts = Counter(located.sources[each.source] for each in samples)
    else:
        counts = Counter(located.shards[each.shard] for each in samples)
    parts = [f"{printable(name)} {count:,}" for name, count in counts.most_common(_MAX_ROWS)]
    rest = f", {len(counts) - _MAX_ROWS:,} more" if len(counts) > _MAX_ROWS else ""
    return f"{', '.join(parts)}{rest}\n"


def _rows(located: pb.LocateStepResponse) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Returns the heads and rows of the table of samples."""
    is_packed = any(each.num_tokens for row in located.rows for each in row.samples)
    heads = ["ROW", *(["SEQUENCE"] if is_packed else []), *(["SOURCE"] if located.sources else [])]
    heads += ["SAMPLE", "SHARD", "ITS ROW", "OFFSET", "SIZE", *(["TOKENS"] if is_packed else [])]
    rows: list[Sequence[object]] = []
    for number, row in enumerate(located.rows[:_MAX_ROWS]):
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
    if len(located.rows) > _MAX_ROWS:
        rows.append([f"... {len(located.rows) - _MAX_ROWS:,} more", *[""] * (len(heads) - 1)])
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


class _Decoder:
    """Turns token ids of samples into text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, name: str, value: Value) -> str | None:
        """Returns the text of a field of whole numbers in one dim; None for any other."""
        if (
            name in _OF_PACKING
            or "int" not in value.dtype
            or len(value.shape) != 1
            or isinstance(value.data, bytes)
        ):
            return None
        try:
            return str(self._tokenizer.decode(list(_known(value.data))))
        except (OverflowError, TypeError):
            return None


def _known(ids: Sequence[int]) -> Iterator[int]:
    return (each for each in ids if each >= 0)


def _decoder(path: Path | None) -> _Decoder | None:
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  # only where it is asked for
    except ImportError as error:
        raise NotInstalled(
            "--tokenizer needs the package tokenizers: install it, or leave --tokenizer out"
        ) from error
    try:
        return _Decoder(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequest(f"{path} is no file of a tokenizer: {error}") from error


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
    head = (
        f"{steps} of {_job(timing)}, rank {timing.rank} of {timing.world_size}, "
        f"{duration(timing.ago_s)} ago"
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


def _job(timing: pb.BatchTiming) -> str:
    """Returns the job; another user's has no name here."""
    return f"job {printable(timing.job)}" if timing.job else "a job of another user that shared it"


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
