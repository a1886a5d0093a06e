"""Documents of Megatron's files: each is a sample, as long as it is."""

from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    ProbeRequest,
    ProbeResponse,
    ProbeSteps,
    array_of,
)
from gyre_daemon.datasets.formats.tokens.headers import DTYPES, TokenHeader
from gyre_daemon.datasets.formats.tokens.megatron import (
    IDX_HEAD_BYTES,
    IDX_MAGIC,
    INDEX_SUFFIX,
    read_documents,
)
from gyre_daemon.datasets.formats.tokens.probe import probe_megatron_heads, required, runs
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.shard import Shard

DOCUMENTS_VERSION = "tokens-documents/1"


def probe_documents(shards: Sequence[Shard]) -> ProbeSteps:
    """The places of the documents of all shards, by the Megatron indexes next to them.

    Raises:
        ConfigError: the first shard has no such index.
        CorruptSample: an index contradicts its shard.
    """
    first = yield ProbeRequest([0], [0], [IDX_HEAD_BYTES], INDEX_SUFFIX, is_optional=True)
    if not first or not first.pieces[0].startswith(IDX_MAGIC):
        raise ConfigError(
            f"`samples` is documents, and shard {shards[0].name} has no Megatron index (.idx) "
            "next to it; serve windows, with `sequence_length`"
        )
    dtypes: list[str] = []
    places: list[npt.NDArray[np.int64]] = []
    for some in runs(shards):
        indexes = yield from probe_megatron_heads(shards, some)
        for number, index in zip(some, indexes, strict=True):
            tables = yield from _tables(number, index.tables)
            dtypes.append(index.dtype)
            places.append(read_documents(shards[number], index, tables))
    return {
        "dtype": np.array(dtypes, np.str_),
        "num_documents": np.array([len(each) - 1 for each in places], np.int64),
        "start": np.concatenate([each[:-1] for each in places]),
        "size": np.concatenate([np.diff(each) for each in places]),
    }


def check_documents(arrays: Arrays, shards: Sequence[Shard]) -> None:
    """Refuse arrays that `probe_documents` cannot have returned for these shards.

    Raises:
        ValueError: they cannot be; says why.
    """
    dtypes, num_documents = arrays.get("dtype"), array_of(arrays, "num_documents", np.int64)
    start, size = array_of(arrays, "start", np.int64), array_of(arrays, "size", np.int64)
    if dtypes is None or dtypes.dtype.kind != "U" or dtypes.shape != (len(shards),):
        raise ValueError("its dtypes are not those of the shards")
    if not np.isin(dtypes, DTYPES).all():
        raise ValueError("it has an unknown dtype")
    counts_fit = num_documents.shape == (len(shards),) and (num_documents >= 0).all()
    if not counts_fit or not num_documents.sum() == len(start) == len(size):
        raise ValueError("its documents are not those of the shards")
    itemsizes = np.array([np.dtype(dtype).itemsize for dtype in dtypes.tolist()], np.int64)
    sizes = np.array([shard.size_bytes for shard in shards], np.int64)
    width, end = np.repeat(itemsizes, num_documents), np.repeat(sizes, num_documents)
    is_outside = (start < 0) | (size < 0) | (size > end) | (start > end - size)
    if (is_outside | (start % width != 0) | (size % width != 0)).any():
        raise ValueError("its documents point outside the shards")


def headers_of(arrays: Arrays, shards: Sequence[Shard]) -> list[TokenHeader]:
    """The headers of whole shards, from their indexes."""
    pairs = zip(shards, arrays["dtype"].tolist(), strict=True)
    return [TokenHeader("Megatron", dtype, 0, shard.size_bytes, 0) for shard, dtype in pairs]


def _tables(
    shard: int, tables: Sequence[range]
) -> Generator[ProbeRequest, ProbeResponse | None, Sequence[bytes]]:
    """Read the tables of an index."""
    starts, stops = [table.start for table in tables], [table.stop for table in tables]
    request = ProbeRequest([shard] * len(tables), starts, stops, INDEX_SUFFIX)
    return required((yield request)).pieces
