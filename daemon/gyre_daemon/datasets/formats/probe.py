"""What the first bytes of a tokens dataset's shards tell, asked for in few small reads. Pure: it asks, and is answered.

Each shard is asked for its head, once. Where none has a header, the first is asked for an index of Megatron's beside it;
only if there is one, the others are.
"""

from collections.abc import Generator, Sequence

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, Found, Probe, Wanted
from gyre_daemon.datasets.formats.headers import (
    HEAD_BYTES,
    IDX_HEAD_BYTES,
    IDX_MAGIC,
    Header,
    MegatronIndex,
    megatron_header,
    read_head,
    read_megatron_head,
)
from gyre_daemon.storage.shard import Shard

_SUFFIX, _INDEX_SUFFIX = ".bin", ".idx"
_AT_ONCE = 1024  # shards whose heads are in memory, and requested, together: 4 MiB


def probe_headers(shards: Sequence[Shard]) -> Probe:
    """What the shards' heads tell, and Megatron's indexes where the first shard has one beside it.

    Raises:
        CorruptSample: a shard is no file of token ids, or contradicts its header.
    """
    headers: list[Header] = []
    for some in _pieces(shards):
        heads = _sure((yield Wanted(some, [0] * len(some), [HEAD_BYTES] * len(some)))).pieces
        headers += [read_head(shards[shard], head) for shard, head in zip(some, heads, strict=True)]
    if not any(header.kind for header in headers) and shards[0].name.endswith(_SUFFIX):
        first = yield Wanted([0], [0], [IDX_HEAD_BYTES], _INDEX_SUFFIX, is_optional=True)
        if first and first.pieces[0].startswith(IDX_MAGIC):
            headers = []
            for some in _pieces(shards):
                headers += yield from _probe_megatron(shards, some)
    return _to_arrays(headers)


def _pieces(shards: Sequence[Shard]) -> list[range]:
    return [range(begin, min(begin + _AT_ONCE, len(shards))) for begin in range(0, len(shards), _AT_ONCE)]


def _probe_megatron(shards: Sequence[Shard], some: range) -> Generator[Wanted, Found | None, list[Header]]:
    """Two rounds: the heads of the indexes, and what they say of their last sequences."""
    found = _sure((yield Wanted(some, [0] * len(some), [IDX_HEAD_BYTES] * len(some), _INDEX_SUFFIX)))
    its = [shards[shard] for shard in some]
    indexes = [read_megatron_head(*each) for each in zip(its, found.pieces, found.file_bytes, strict=True)]
    ranges = [_last_sequence(index) for index in indexes]
    starts, stops = ([place for pair in ranges for place in pair[side]] for side in range(2))
    twice = [shard for shard in some for _ in range(2)]
    ends = _sure((yield Wanted(twice, starts, stops, _INDEX_SUFFIX))).pieces
    return [megatron_header(*each) for each in zip(its, indexes, ends[::2], ends[1::2], strict=True)]


def _last_sequence(index: MegatronIndex) -> tuple[tuple[int, int], tuple[int, int]]:
    """First bytes and ends of its length and of its place in the index; empty ranges where there is no sequence."""
    if not index.num_sequences:
        return (0, 0), (0, 0)
    return (index.last_length, index.last_place), (index.last_length + 4, index.last_place + 8)


def _sure(found: Found | None) -> Found:
    """What is not optional was found."""
    assert found is not None
    return found


def _to_arrays(headers: Sequence[Header]) -> Arrays:
    kinds, dtypes, starts, stops, hints = zip(*headers, strict=True)
    numbers = np.array([starts, stops, hints], np.int64)
    return {"kind": np.array(kinds, np.str_), "dtype": np.array(dtypes, np.str_), "numbers": numbers}


def read_probe(arrays: Arrays) -> list[Header]:
    """What `probe_headers` returned, a header a shard."""
    columns = zip(arrays["kind"].tolist(), arrays["dtype"].tolist(), *arrays["numbers"].tolist(), strict=True)
    return [Header(*column) for column in columns]
