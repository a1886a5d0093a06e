"""Samples as the page shows them: text, tokens with the mask of their loss, images and sounds."""

import base64
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from math import isfinite
from pathlib import Path
from typing import Any

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import size
from gyre_client.display.media import media_type
from gyre_client.display.samples import Sample, Value, rows_of_step, text_of, words_of
from gyre_client.errors import InvalidRequest, NotInstalled
from gyre_client.page.verdicts import OWN_JOBS
from gyre_client.transport.connection import Connection

MAX_ROWS = 16  # of one request; the page asks for more where someone wants them
_MAX_TEXT_CHARS, _MAX_TOKENS = 20_000, 8192
# Larger images and sounds are named, so that one step does not fill the browser.
_MAX_MEDIUM_BYTES, _MAX_MEDIA_BYTES = 8 << 20, 48 << 20
_MAX_PIXELS = 1 << 21  # of an image encoded here
_MAX_SOURCES, _MAX_PLACES = 24, 64
_MASK = "loss_mask"
_OF_PACKING = frozenset(("position", "cu_seqlens", "document_id"))  # whole numbers, no token ids
_BYTES = "bytes"  # the tokenizer whose tokens are the bytes of the text

Decode = Callable[[Sequence[int]], str]


def decoder(name: str | None) -> Decode | None:
    """Returns what turns token ids into text: `bytes`, or that of a file of tokenizers.

    Raises:
        InvalidRequest: It is no such file.
        NotInstalled: tokenizers is missing.
    """
    if name is None:
        return None
    if name == _BYTES:
        return lambda ids: bytes(each for each in ids if each < 256).decode(errors="replace")
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  # only where it is asked for
    except ImportError as error:
        raise NotInstalled.needs("--tokenizer", "tokenizers", "text") from error
    try:
        tokenizer = Tokenizer.from_file(str(Path(name)))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequest(f"{name} is no file of a tokenizer: {error}") from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


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
        request: Which step of which job.
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
    media = _Media()
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
    samples = [sample for row in located.rows for sample in row.samples]
    if located.sources:
        counts = Counter(located.sources[each.source] for each in samples)
    else:
        counts = Counter(located.shards[each.shard] for each in samples)
    most = [{"name": printable(name), "count": num} for name, num in counts.most_common()]
    rest = sum(int(str(each["count"])) for each in most[_MAX_SOURCES:])
    return most[:_MAX_SOURCES] + ([{"name": "others", "count": rest}] if rest else [])


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


class _Media:
    """How many bytes of images and sounds an answer may still have."""

    def __init__(self) -> None:
        self._left = _MAX_MEDIA_BYTES

    def source(self, kind: str, data: bytes) -> str | None:
        """Returns the bytes as the source of an element; None if there are too many."""
        if len(data) > min(_MAX_MEDIUM_BYTES, self._left):
            return None
        self._left -= len(data)
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _fields(sample: Sample, decode: Decode | None, media: _Media) -> Iterator[dict[str, Any]]:
    mask = sample.values.get(_MASK)
    is_marked = mask is not None and any(
        _token_ids(name, value) and len(value.data) <= len(mask.data)
        for name, value in sample.values.items()
    )
    for name, value in sample.values.items():
        if name == _MASK and is_marked:
            continue  # the tokens are marked by it
        shape = ", ".join(map(str, value.shape))
        field = {"name": printable(name), "type": f"{value.dtype} [{shape}]"}
        yield field | _shown(name, value, mask, decode, media)


def _shown(
    name: str, value: Value, mask: Value | None, decode: Decode | None, media: _Media
) -> dict[str, Any]:
    if isinstance(value.data, bytes) and (kind := media_type(value.data)):
        source = media.source(kind, value.data)
        words = f"{kind}, {size(len(value.data))}"
        if source is None:
            return {"kind": "words", "text": f"{words}, too large for this page"}
        return {"kind": kind.partition("/")[0], "source": source, "text": words}
    if (text := text_of(value)) is not None and not (mask and name != _MASK and not decode):
        more = " ..." if len(text) > _MAX_TEXT_CHARS else ""
        return {"kind": "text", "text": printable(text[:_MAX_TEXT_CHARS], kept="\n\t") + more}
    if ids := _token_ids(name, value):
        return _tokens(ids, mask, decode)
    if picture := _picture(value):
        source = media.source("image/png", picture)
        if source:
            return {"kind": "image", "source": source, "text": words_of(value)}
    return {"kind": "words", "text": words_of(value)}


def _token_ids(name: str, value: Value) -> list[int] | None:
    """Returns the numbers of a field that may be token ids: whole ones in one dim."""
    if name == _MASK or name in _OF_PACKING or "int" not in value.dtype or len(value.shape) != 1:
        return None
    return list(value.data[:_MAX_TOKENS]) if len(value.data) > 1 else None


def _tokens(ids: Sequence[int], mask: Value | None, decode: Decode | None) -> dict[str, Any]:
    """Returns runs of tokens that count for the loss, and of those that do not."""
    counts = list(mask.data[: len(ids)]) if mask and len(mask.data) >= len(ids) else None
    runs = groupby(range(len(ids)), key=lambda each: bool(counts[each]) if counts else None)
    spans = []
    for counted, places in runs:
        run = [ids[place] for place in places]
        text = decode([each for each in run if each >= 0]) if decode else " ".join(map(str, run))
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
