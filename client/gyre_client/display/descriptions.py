"""Datasets, sessions and mounts in words: fields, histograms, rates, bottlenecks, progress."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import (
    BALANCED,
    IDLE,
    PROCESSOR_BOUND,
    STORAGE_BOUND,
    TRAINER_BOUND,
    cut,
    duration,
    size,
)


def facts_of(description: pb.DatasetDescription, *, is_path: bool) -> list[tuple[str, str]]:
    """Returns names and values of a dataset, for the head of a text or page."""
    least, greatest = description.least_shard_bytes, description.greatest_shard_bytes
    sizes = f": {size(least)} to {size(greatest)}" if description.num_shards > 1 else ""
    packing = description.packing
    packed = [("packed", _packed(packing))] if description.HasField("packing") else []
    return [
        ("name", "-" if is_path else description.name),
        ("format", description.format),
        ("uri", description.uri),
        ("samples", f"{description.num_samples:,}{_left_out(description)}"),
        ("shards", f"{description.num_shards:,}{sizes}"),
        ("size", size(description.num_bytes)),
        ("fingerprint", description.fingerprint),
        *([("grows", "by shards behind all others (append)")] if description.grows else []),
        *packed,
        *([("transforms", ", ".join(description.transforms))] if description.transforms else []),
    ]


def fields_of(fields: Iterable[pb.Field]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the heads and the rows of the table of fields."""
    heads, has_media = ("FIELD", "DTYPE", "SHAPE"), any(field.media_type for field in fields)
    rows = [(field.name, field.dtype, _shape(field)) for field in fields]
    if not has_media:
        return heads, list(rows)
    media = [field.media_type for field in fields]
    return (*heads, "MEDIA TYPE"), [(*row, each) for row, each in zip(rows, media, strict=True)]


def _packed(packing: pb.Packing) -> str:
    """Returns how well documents fill the sequences, and how many were cut or left out."""
    ends = {"drop": "left out", "truncate": "cut short", "split": "split"}
    filled = f"{packing.length:,}, of which {packing.efficiency:.2%} is filled"
    documents = counted(packing.num_documents, "document", ",")
    parts = [f"{documents} by {packing.field} into sequences of {filled}"]
    if packing.num_overlong:
        parts.append(f"{packing.num_overlong:,} longer ones {ends[packing.overlong]}")
    if packing.num_empty:
        parts.append(f"{packing.num_empty:,} empty ones left out")
    return "; ".join(parts)


def _left_out(description: pb.DatasetDescription) -> str:
    number = description.num_left_out
    return f"; the filter leaves {number:,} out" if number else ""


def _shape(field: pb.Field) -> str:
    sizes = (["*"] if field.ragged else []) + [str(length) for length in field.shape]
    return f"[{', '.join(sizes)}]"


_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"
_MAX_CELLS = 40


def title(histogram: pb.LengthHistogram) -> str:
    """Returns the title of a histogram."""
    return (
        f"lengths of {printable(histogram.field)}: {histogram.least:,} to {histogram.greatest:,}, "
        f"mean {histogram.mean:,.1f}, of {counted(histogram.num_samples, 'sample', ',')}"
    )


def as_text(histogram: pb.LengthHistogram, num_columns: int) -> str:
    """Returns a bar for each bin, no wider than a terminal."""
    labels = [_label(histogram, number) for number in range(len(histogram.counts))]
    width = max(map(len, labels))
    counts = [f"{count:,}" for count in histogram.counts]
    room = max(8, min(_MAX_CELLS, num_columns - width - max(map(len, counts)) - 4))
    most = max(*histogram.counts, 1)
    lines = [
        f"{label.rjust(width)}  {_bar(count / most * room).ljust(room)}  {shown}".rstrip()
        for label, count, shown in zip(labels, histogram.counts, counts, strict=True)
    ]
    return "\n".join(cut(line, num_columns) for line in [title(histogram), *lines])


def _label(histogram: pb.LengthHistogram, number: int) -> str:
    first, last = histogram.bounds[number], histogram.bounds[number + 1] - 1
    return f"{first:,}" if first >= last else f"{first:,} to {last:,}"


def _bar(cells: float) -> str:
    whole, part = divmod(round(cells * 8), 8)
    return _FULL * whole + (_EIGHTHS[part] if part else "")


def mount_line(mount: pb.Mount) -> str:
    """Returns which mount hangs and since when, in one line."""
    name = f"{printable(mount.path)} ({printable(mount.file_system)})"
    return f"{name} has not answered for {duration(mount.hangs_since_s)}"


# Window occupancies that count as empty and as full. Credits and reads come in quarters of a
# window, so a window is hardly ever quite empty or quite full.
_EMPTY, _NEARLY_FULL = (0.25, 0.75)
# A trainer that lacks a batch for less of its time than this loses nothing worth a search.
STARVED = 0.05
_MIN_ELAPSED_S = 0.1  # a shorter time says nothing about a rate


@dataclass(frozen=True, slots=True)
class SessionRates:
    """One session over its last ten seconds, or since it began.

    Attributes:
        batches_per_s: Batches that the trainer took.
        bytes_per_s: Payload of those batches.
        occupancy: The mean share of the prefetch window that was ready, in [0, 1]; None if there
            was no window.
        starved: The share of the time that the trainer had no batch to go on with, in [0, 1], as
            its client reports.
        wait_storage: The share of the time that the client had credit and no batch was ready
            because storage had not answered.
        wait_processor: The same, because no processor was free to copy or decode the batch.
        wait_trainer: The share of the time that a batch was ready and the client had no credit.
    """

    batches_per_s: float
    bytes_per_s: float
    occupancy: float | None
    starved: float
    wait_storage: float
    wait_processor: float
    wait_trainer: float

    @property
    def meaning(self) -> str:
        """The bottleneck of the session.

        An empty window waits for storage or for a processor, a full one for its trainer. So does an
        empty one whose trainer never waits: it has its batches already, or asks for no more yet.
        """
        if self.occupancy is None:
            return IDLE
        if self.occupancy <= _EMPTY and self.starved >= STARVED:
            return PROCESSOR_BOUND if self.wait_processor > self.wait_storage else STORAGE_BOUND
        return BALANCED if _EMPTY < self.occupancy < _NEARLY_FULL else TRAINER_BOUND

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {**asdict(self), "meaning": self.meaning}


def session_rates(session: pb.SessionState) -> SessionRates | None:
    """Returns the rates of a session; None if it has just begun."""
    lately = session.lately
    elapsed_s = lately.elapsed_s
    if elapsed_s < _MIN_ELAPSED_S:
        return None
    size_s = lately.window_size_batch_s
    return SessionRates(
        batches_per_s=lately.batches_per_s,
        bytes_per_s=lately.bytes_per_s,
        occupancy=_share(lately.window_ready_batch_s, size_s) if size_s > 0 else None,
        starved=_share(lately.trainer_waited_s, elapsed_s),
        wait_storage=_share(lately.wait_storage_s, elapsed_s),
        wait_processor=_share(lately.wait_processor_s, elapsed_s),
        wait_trainer=_share(lately.wait_trainer_s, elapsed_s),
    )


def _share(part: float, whole: float) -> float:
    """Returns a share in [0, 1]: a wait is reported when it ends, so it may exceed the interval."""
    return min(max(part / whole, 0.0), 1.0)


def measuring_line(state: pb.MeasuringState) -> str:
    """Returns a line such as `wiki: 1,200 of 40,000 samples (3.0%), 85/s, 456 s left`."""
    done, whole = state.num_done, max(state.num_samples, 1)
    line = (
        f"{printable(state.dataset)}: {done:,} of {counted(state.num_samples, 'sample', ',')} "
        f"({done / whole:.1%})"
    )
    num_new = done - state.num_reused
    if num_new <= 0 or state.elapsed_s <= 0:
        return line
    rate = num_new / state.elapsed_s
    left_s = max(state.num_samples - done, 0) / rate
    return f"{line}, {rate:,.0f}/s, {left_s:,.0f} s left"
