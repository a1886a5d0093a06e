"""Files of token ids as their tools write them, and the indexes of such files."""

import io
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import ProbeRequest
from gyre_daemon.storage.shard import Shard

from tests.contract.formats.format_contract import inspect
from tests.shard_formats import shard_format

IDS = np.arange(5000) % 4999


class Files:
    """Shards, and the files beside them, in memory; keeps the requests of probes."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self.contents = contents
        self.requests: list[ProbeRequest] = []

    def index(self, **options: Any) -> SampleIndex:
        """As a daemon would assemble it: windows of 8 ids, unless the options say otherwise."""
        options = options if "samples" in options else {"sequence_length": 8, **options}
        shards = [
            Shard(name, len(data), "")
            for name, data in self.contents.items()
            if not name.endswith(".idx")
        ]
        dataset_format = shard_format("tokens", **options)
        contents = [self.contents[shard.name] for shard in shards]
        found = inspect(dataset_format, contents, shards, self.contents, self.requests)
        return dataset_format.assemble(shards, found)


def ids_of(index: SampleIndex, contents: Mapping[str, bytes]) -> list[list[int]]:
    """Every sample, as the index says."""
    extents, shards = index.locate(np.arange(index.num_samples)), list(contents.values())
    rows = zip(
        extents.shard.tolist(),
        extents.start[:, 0].tolist(),
        extents.size[:, 0].tolist(),
        strict=True,
    )
    return [
        np.frombuffer(shards[shard][start : start + size], index.fields[0].dtype).tolist()
        for shard, start, size in rows
    ]


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), version=version)
    return stream.getvalue()


def llm_c(ids: Any, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """As `write_datafile` of llm.c and of modded-nanogpt writes it."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + np.asarray(ids).tobytes()


def megatron_idx(
    lengths: Sequence[int],
    itemsize: int,
    code: int,
    documents: Sequence[int] = (0, 1),
    version: int = 1,
) -> bytes:
    """As `_IndexWriter` of Megatron-LM writes it.

    Args:
        lengths: of the sequences, in ids.
        itemsize: bytes of an id.
        code: of their dtype.
        documents: the number of the sequence with which each begins, and that of all sequences.
        version: of the layout.
    """
    places = np.concatenate(([0], np.cumsum(lengths)[:-1])) * itemsize if lengths else np.empty(0)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    return (
        head
        + np.array(lengths, "<i4").tobytes()
        + places.astype("<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )
