"""A job's samples as the page shows them, where its next steps lie, and the cost of each order."""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import isfinite
from typing import Any

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display import (
    LOSS_MASK,
    Decode,
    MediaBudget,
    Sample,
    Value,
    contributions,
    media_type,
    plain,
    rows_of_step,
    size,
    text_of,
    token_ids,
    words_of,
)
from gyre_client.errors import InvalidRequest
from gyre_client.page.watch import OWN_JOBS
from gyre_client.transport.arguments import order
from gyre_client.transport.connection import Connection

MAX_ROWS = 16  # of one request; the page asks for more where someone wants them
_MAX_TEXT_CHARS = 20_000
_MAX_MEDIA_BYTES = 48 << 20  # of one answer
_MAX_PIXELS = 1 << 21  # of an image encoded here
_MAX_SOURCES, _MAX_PLACES = 24, 64


def step_samples(
    connection: Connection,
    request: pb.LocateStepRequest,
    first: int,
    num_rows: int,
    decode: Decode | None,
    *,
    is_as_served: bool,
) -> dict[str, Any]:
    """Returns some rows of a step, the step's sources, and where its samples are stored.

    Args:
        connection: To the daemon.
        request: The step, and its job.
        first: The first row.
        num_rows: How many, at most; fewer where they do not divide the global batch.
        decode: Turns token ids into text; None shows the ids.
        is_as_served: Whether fields are as the job gets them, and not as they are stored.

    Raises:
        GyreError: The daemon refuses it.
    """
    located = connection.locate_step(request)
    num = len(located.rows)
    answer: dict[str, Any] = {
        "step": located.step,
        "batch": located.batch,
        "epoch": located.epoch,
        "skipped": located.skipped,
        "num_rows": num,
        "sources": _sources(located),
        "places": [*_places(located)],
        "rows": [],
    }
    if located.skipped or not num:
        return answer
    count = next(
        each for each in range(min(max(num_rows, 1), MAX_ROWS, num), 0, -1) if not num % each
    )
    first = min(max(first, 0), num - 1) // count * count
    job = f"{OWN_JOBS}{first}"
    samples = rows_of_step(
        connection, located, request, first, count, job=job, is_as_served=is_as_served
    )
    media = MediaBudget(_MAX_MEDIA_BYTES)
    answer["first"], answer["count"] = first, count
    answer["rows"] = [
        {
            "row": row,
            "sample_id": sample.sample_id,
            "padding": located.rows[row].padding,
            "fields": [*_fields(sample, decode, media)],
        }
        for row, sample in enumerate(samples, first)
    ]
    return answer


def _sources(located: pb.LocateStepResponse) -> list[dict[str, Any]]:
    """Returns how many samples each source contributed, or each shard where there is one source."""
    counts = contributions(located).most_common()
    most = [{"name": printable(name), "count": num} for name, num in counts[:_MAX_SOURCES]]
    rest = sum(num for _, num in counts[_MAX_SOURCES:])
    return most + ([{"name": "others", "count": rest}] if rest else [])


def _places(located: pb.LocateStepResponse) -> Iterator[dict[str, Any]]:
    """Yields where the first samples of the step are stored."""
    for number, row in enumerate(located.rows[:_MAX_PLACES]):
        for sample in row.samples[:_MAX_PLACES]:
            source = located.sources[sample.source] if located.sources else ""
            yield {
                "row": number,
                "source": printable(source),
                "sample_id": sample.sample_id,
                "shard": printable(located.shards[sample.shard]),
                "shard_row": sample.row,
                "offset": sample.offset if sample.HasField("offset") else None,
                "size": size(sample.num_bytes),
                "tokens": [sample.first_token, sample.first_token + sample.num_tokens]
                if sample.num_tokens
                else None,
            }


def _fields(sample: Sample, decode: Decode | None, media: MediaBudget) -> Iterator[dict[str, Any]]:
    mask = sample.values.get(LOSS_MASK)
    is_marked = mask is not None and any(
        token_ids(name, value) and len(value.data) <= len(mask.data)
        for name, value in sample.values.items()
    )
    for name, value in sample.values.items():
        if name == LOSS_MASK and is_marked:
            continue  # the tokens are marked by it
        shape = ", ".join(map(str, value.shape))
        field = {"name": printable(name), "type": f"{value.dtype} [{shape}]"}
        yield field | _shown(name, value, mask, decode, media)


def _shown(
    name: str, value: Value, mask: Value | None, decode: Decode | None, media: MediaBudget
) -> dict[str, Any]:
    if isinstance(value.data, bytes) and (kind := media_type(value.data)):
        source = media.source(kind, value.data)
        words = f"{kind}, {size(len(value.data))}"
        if source is None:
            return {"kind": "words", "text": f"{words}, too large for this page"}
        return {"kind": kind.partition("/")[0], "source": source, "text": words}
    if (text := text_of(value)) is not None and not (mask and name != LOSS_MASK and not decode):
        more = " ..." if len(text) > _MAX_TEXT_CHARS else ""
        return {"kind": "text", "text": printable(text[:_MAX_TEXT_CHARS], kept="\n\t") + more}
    if ids := token_ids(name, value):
        return _tokens(ids, mask, decode)
    if picture := _picture(value):
        source = media.source("image/png", picture)
        if source:
            return {"kind": "image", "source": source, "text": words_of(value)}
    return {"kind": "words", "text": words_of(value)}


def _tokens(ids: Sequence[int], mask: Value | None, decode: Decode | None) -> dict[str, Any]:
    """Returns runs of tokens that count for the loss, and of those that do not."""
    counts = list(mask.data[: len(ids)]) if mask and len(mask.data) >= len(ids) else None
    runs = groupby(range(len(ids)), key=lambda each: bool(counts[each]) if counts else None)
    spans = []
    for counted, places in runs:
        run = [ids[place] for place in places]
        text = decode(run) if decode else " ".join(map(str, run))
        spans.append({"text": printable(text, kept="\n\t"), "counted": counted})
    num = None if counts is None else sum(map(bool, counts))
    return {"kind": "tokens", "spans": spans, "num": len(ids), "num_counted": num}


def _picture(value: Value) -> bytes | None:
    """Returns a tensor that looks like an image as PNG: [H, W, C] or [C, H, W], C of 1 or 3.

    So is a spectrum over time, float [H, W]. Numbers other than bytes are stretched from their
    least to their greatest.
    """
    shape, data = list(value.shape), value.data
    if len(shape) == 2 and "float" in value.dtype:
        shape, data = [1, *shape], [data]
    if len(shape) != 3 or isinstance(data, bytes):
        return None
    is_last = shape[2] in (1, 3)
    if not is_last and shape[0] not in (1, 3):
        return None
    height, width, num = shape if is_last else (*shape[1:], shape[0])
    if min(height, width) < 8 or height * width > _MAX_PIXELS:
        return None
    if is_last:
        rows = [list(chain.from_iterable(row)) for row in data]
    else:
        rows = [
            list(chain.from_iterable(zip(*(plane[row] for plane in data), strict=True)))
            for row in range(height)
        ]
    if value.dtype != "uint8":
        known = [each for row in rows for each in row if isfinite(each)]
        least, greatest = min(known, default=0), max(known, default=0)
        scale = 255 / (greatest - least) if greatest > least else 0
        rows = [
            [round((each - least) * scale) if isfinite(each) else 0 for each in row] for row in rows
        ]
    return _png(width, height, num, [bytes(row) for row in rows])


def _png(width: int, height: int, num_channels: int, rows: Sequence[bytes]) -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    colours = 2 if num_channels == 3 else 0
    head = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 1)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


NUM_STEPS = 1000
# The map: steps are looked at, evenly spaced, so that few samples are located; each is some 10 µs
# of the daemon's and 20 µs of this process's time.
_MAX_COLUMNS, _MIN_COLUMNS, _MAX_LOCATED = 60, 6, 48_000
_NUM_BANDS = 40
_MODES = {
    pb.ORDER_MODE_FULL: "full",
    pb.ORDER_MODE_BLOCK: "block",
    pb.ORDER_MODE_SEQUENTIAL: "sequential",
}


def order_map(
    connection: Connection, ref: pb.DatasetRef, cursor: bytes, step: int
) -> dict[str, Any]:
    """Returns the places of the next thousand steps of a job in its dataset.

    Some of these steps are located. The dataset, shard after shard, is cut into bands; each column
    of `cells` counts the samples of one step in each band.

    Args:
        connection: To the daemon.
        ref: The dataset.
        cursor: Any one of the job.
        step: The first of the steps.

    Raises:
        GyreError: The daemon refuses it.
    """
    description = connection.describe(ref)
    request = pb.LocateStepRequest(dataset=ref, cursor=cursor, step=step)
    first = connection.locate_step(request)
    begin = request.batch = first.batch
    if first.skipped:
        first = connection.locate_step(request)
    num_rows = max(1, len(first.rows))
    num_columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, _MAX_LOCATED // num_rows))
    num_samples, num_bands = description.num_samples, min(_NUM_BANDS, description.num_samples)
    steps, cells, epochs = [], [], []
    shards: dict[int, list[str]] = {}
    seen: set[str] = set()
    for column in range(num_columns):
        request.batch = begin + column * NUM_STEPS // num_columns
        located = first if not column else connection.locate_step(request)
        counts = [0] * num_bands
        for row in located.rows:
            band = min(num_bands - 1, row.sample_id * num_bands // num_samples)
            counts[band] += 1
            for sample in row.samples[:1]:
                _note(shards.setdefault(band, []), located.shards[sample.shard])
        seen.update(located.shards)
        steps.append(located.step)
        epochs.append(located.epoch)
        cells.append(counts)
    return {
        "steps": steps,
        "epochs": epochs,
        "cells": cells,
        "bands": [[printable(name) for name in shards.get(band, [])] for band in range(num_bands)],
        "num_samples": num_samples,
        "num_shards": description.num_shards,
        "num_shards_seen": len(seen),
        "evenness": evenness(cells),
        "order": _order(first.order),
        "resume": _resume(first),
    }


def _note(names: list[str], name: str) -> None:
    """Keeps the least and the greatest name of a band's shards."""
    if name not in names:
        names.append(name)
        names.sort()
        del names[1:-1]


def evenness(cells: Sequence[Sequence[int]]) -> float | None:
    """Returns how evenly steps draw from all bands, in [0, 1]; None where one draw says nothing.

    It compares the variance of the counts with that of a uniform draw: 1 is as even as chance, or
    more so, and 0 is a step from one band alone.
    """
    num_drawn = sum(cells[0]) if cells else 0
    num_bands = len(cells[0]) if cells else 0
    if num_drawn < 2 or num_bands < 2:
        return None
    mean = num_drawn / num_bands
    squares = [sum((count - mean) ** 2 for count in column) / mean for column in cells]
    found = sum(squares) / len(squares)  # chi-squared: num_bands - 1 by chance
    by_chance, most = num_bands - 1, num_drawn * (num_bands - 1)
    return min(1.0, max(0.0, 1 - (found - by_chance) / (most - by_chance)))


def _order(spec: pb.OrderSpec) -> dict[str, Any]:
    return {
        "mode": _MODES.get(spec.mode, "full"),
        "seed": str(spec.seed),  # a number of JavaScript is not that large
        "batch_size": spec.global_batch_size,
        "io_block_bytes": spec.io_block_bytes,
        "window_blocks": spec.window_blocks,
    }


def _resume(located: pb.LocateStepResponse) -> dict[str, Any]:
    """Returns the step, and the places of its first samples."""
    places = [
        {
            "sample_id": row.sample_id,
            "shard": printable(located.shards[sample.shard]),
            "shard_row": sample.row,
        }
        for row in located.rows[:3]
        for sample in row.samples[:1]
    ]
    return {
        "step": located.step,
        "epoch": located.epoch,
        "num_samples_before": located.batch * located.order.global_batch_size,
        "places": places,
    }


_COST_BOUNDS = {
    "batch_size": (1, 1 << 20),
    "epochs": (1, 1000),
    "io_block": (0, 1 << 30),
    "window": (0, 1 << 16),
    "cache": (0, 1 << 50),
}


def cost_request(dataset: str, values: Mapping[str, str]) -> pb.PlanCostRequest:
    """Returns the request for the cost of each order, from the settings of the sliders.

    Raises:
        InvalidRequest: One is missing, no whole number, or out of its bounds.
    """
    numbers = {}
    for name, (least, most) in _COST_BOUNDS.items():
        text = values.get(name, "")
        if not text.isdecimal() or not least <= int(text[:20]) <= most:
            raise InvalidRequest(f"{name} is {text[:20]!r}; it must be {least} to {most}")
        numbers[name] = int(text)
    spec = order(
        numbers["batch_size"], 1, 0, "wrap", "block", numbers["io_block"], numbers["window"]
    )
    return pb.PlanCostRequest(
        dataset=pb.DatasetRef(name=dataset),
        order=spec,
        num_epochs=numbers["epochs"],
        cache_bytes=numbers["cache"],
    )


def costs(connection: Connection, request: pb.PlanCostRequest) -> dict[str, Any]:
    """Returns the cost of each order.

    Raises:
        GyreError: The daemon refuses it.
    """
    response = connection.plan_cost(request)
    answer = plain(response)
    answer["recommendation"] = printable(response.recommendation)
    return answer
