"""A dataset's description as names and values, tables of fields, histograms, and a hung mount."""

from collections.abc import Iterable

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import cut, duration, size


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
