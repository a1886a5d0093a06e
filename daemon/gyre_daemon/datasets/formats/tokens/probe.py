"""Reads the first bytes of the shards of a `tokens` dataset in a few rounds of small reads.

Each shard is asked for its head once. If none has a header, the first one is asked for a Megatron
index next to it. Only if that exists are the other indexes read.
"""

from collections.abc import Generator, Sequence

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    ProbeRequest,
    ProbeResponse,
    ProbeSteps,
    array_of,
)
from gyre_daemon.datasets.formats.tokens.headers import (
    DTYPES,
    HEAD_BYTES,
    HEADER_BYTES_HINT,
    HEADER_KINDS,
    MAX_HINTS,
    TokenHeader,
    not_ids,
    read_head,
)
from gyre_daemon.datasets.formats.tokens.megatron import (
    IDX_HEAD_BYTES,
    IDX_MAGIC,
    INDEX_SUFFIX,
    OLD_IDX_MAGIC,
    MegatronIndex,
    megatron_header,
    read_megatron_head,
)
from gyre_daemon.storage.shard import Shard

PROBE_VERSION = "tokens-headers/1"
_SUFFIX = ".bin"
# Shards whose heads are requested together and held in memory: 4 MiB. More would gain nothing,
# since the storage has far fewer requests in flight.
_MAX_SHARDS_PER_REQUEST = 1024


def probe_headers(shards: Sequence[Shard]) -> ProbeSteps:
    """The headers of the shards, or of the Megatron indexes next to them.

    Raises:
        CorruptSample: a shard is no file of token ids, or contradicts its header.
    """
    headers: list[TokenHeader] = []
    for some in runs(shards):
        request = ProbeRequest(some, [0] * len(some), [HEAD_BYTES] * len(some))
        heads = required((yield request)).pieces
        headers += [read_head(shards[shard], head) for shard, head in zip(some, heads, strict=True)]
    if not any(header.kind for header in headers) and shards[0].name.endswith(_SUFFIX):
        first = yield ProbeRequest([0], [0], [IDX_HEAD_BYTES], INDEX_SUFFIX, is_optional=True)
        if first and first.pieces[0].startswith(OLD_IDX_MAGIC):
            raise not_ids(
                shards[0],
                f"the {INDEX_SUFFIX} file next to it is an old index of Megatron-LM or fairseq "
                "(TNTIDX), which is not read. Write the dataset again with Megatron-LM's "
                f"preprocess_data.py, or serve all ids back to back: {HEADER_BYTES_HINT}",
            )
        if first and first.pieces[0].startswith(IDX_MAGIC):
            headers = []
            for some in runs(shards):
                headers += yield from _probe_megatron(shards, some)
    return _to_arrays(headers)


def to_headers(arrays: Arrays) -> list[TokenHeader]:
    """The headers that `probe_headers` returned, one for each shard."""
    kinds, dtypes = arrays["kind"].tolist(), arrays["dtype"].tolist()
    return [
        TokenHeader(*each) for each in zip(kinds, dtypes, *arrays["numbers"].tolist(), strict=True)
    ]


def check_headers(arrays: Arrays, shards: Sequence[Shard]) -> None:
    """Refuse arrays that `probe_headers` cannot have returned for these shards.

    Raises:
        ValueError: they cannot be; says why.
    """
    names = [arrays.get(name) for name in ("kind", "dtype")]
    numbers = array_of(arrays, "numbers", np.int64, num_dims=2)
    if numbers.shape != (3, len(shards)):
        raise ValueError("its numbers are not those of the shards")
    for array, allowed in zip(names, (HEADER_KINDS, ("", *DTYPES)), strict=True):
        if array is None or array.dtype.kind != "U" or array.shape != (len(shards),):
            raise ValueError("its headers are not those of the shards")
        if not np.isin(array, allowed).all():
            raise ValueError("it has a header of an unknown kind")
    sizes = np.array([shard.size_bytes for shard in shards], np.int64)
    start, stop, hints = numbers
    if ((start < 0) | (start > stop) | (stop > sizes) | (hints < 0) | (hints > MAX_HINTS)).any():
        raise ValueError("its headers point outside the shards")


def _to_arrays(headers: Sequence[TokenHeader]) -> Arrays:
    kinds, dtypes, *numbers = zip(*headers, strict=True)
    return {
        "kind": np.array(kinds, np.str_),
        "dtype": np.array(dtypes, np.str_),
        "numbers": np.array(numbers, np.int64),
    }


def probe_megatron_heads(
    shards: Sequence[Shard], some: range
) -> Generator[ProbeRequest, ProbeResponse | None, list[MegatronIndex]]:
    """Read the heads of the indexes next to some shards.

    Raises:
        CorruptSample: see `read_megatron_head`.
    """
    request = ProbeRequest(some, [0] * len(some), [IDX_HEAD_BYTES] * len(some), INDEX_SUFFIX)
    heads = required((yield request))
    return [
        read_megatron_head(shards[shard], head, file_bytes)
        for shard, head, file_bytes in zip(some, heads.pieces, heads.file_bytes, strict=True)
    ]


def _probe_megatron(
    shards: Sequence[Shard], some: range
) -> Generator[ProbeRequest, ProbeResponse | None, list[TokenHeader]]:
    """Read the heads of the indexes first, then the entries of their last sequences."""
    indexes = yield from probe_megatron_heads(shards, some)
    twice = [shard for shard in some for _ in range(2)]
    ranges = [each for index in indexes for each in index.last_entries]
    entries = required(
        (
            yield ProbeRequest(
                twice,
                [each.start for each in ranges],
                [each.stop for each in ranges],
                INDEX_SUFFIX,
            )
        )
    ).pieces
    return [
        megatron_header(shards[shard], index, length, begin)
        for shard, index, length, begin in zip(
            some, indexes, entries[::2], entries[1::2], strict=True
        )
    ]


def runs(shards: Sequence[Shard]) -> list[range]:
    """Shards to ask for together."""
    step = _MAX_SHARDS_PER_REQUEST
    return [range(begin, min(begin + step, len(shards))) for begin in range(0, len(shards), step)]


def required(response: ProbeResponse | None) -> ProbeResponse:
    """A response to a required request."""
    assert response is not None
    return response
