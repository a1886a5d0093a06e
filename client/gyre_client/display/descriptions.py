"""A dataset's description as names and values, and as a table of fields."""

from collections.abc import Iterable

from gyre_protos.text import counted
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import size


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
