"""The compared orders, as endless batches.

Two are Gyre's, through the daemon; the others are plain shuffle buffers. A buffer is webdataset's
own code: it reads the shards one after the other, keeps `buffer_samples`, and returns a random one
of them for each that comes in. The comparison favours it: the buffer is full before it returns the
first sample.
"""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import ShuffleQuality, average, batch_quality
from torch.utils.data import default_collate
from webdataset.filters import _shuffle as buffered

from benchmarks.loader.processes import daemon
from benchmarks.training.loaders import BATCH_SIZE, Window, gyre
from benchmarks.training.samples import Files, Samples, Stored
from benchmarks.training.trainer import Batches

OrderName = Literal["full", "block", "shuffled shards and a buffer", "a buffer"]
ORDERS: tuple[OrderName, ...] = ("full", "block", "shuffled shards and a buffer", "a buffer")
Quality = dict[str, float]
_NUM_METERED = 64  # batches, the last ones


class Gyre:
    """Batches through the daemon."""

    def __init__(
        self, order: Literal["full", "block"], address: str, window: Window, seed: int
    ) -> None:
        self._address = address
        self._loader = gyre(order, address, seed, window)
        self.batches: Batches = self._loader.stream()

    def quality(self) -> Quality:
        """The shuffle quality of the last batches, as the daemon reports it."""
        with Connection(parse_address(self._address)) as connection:
            (session,) = connection.status().sessions
        return {
            name: getattr(session.quality, name) for name in ("displacement", "spread", "mixing")
        }

    def close(self) -> None:
        """End the session."""
        self._loader.close()


class Buffer:
    """Batches of a plain shuffle buffer, from the files."""

    def __init__(
        self, stored: Stored, buffer_samples: int, seed: int, *, shuffle_shards: bool
    ) -> None:
        self._files = Files(stored.folder)
        self._samples = Samples(stored, self._files)
        self._shards = stored.places[:, 0]
        self._num_samples = len(stored.places)
        self._random = random.Random(seed)
        self._buffer_samples, self._shuffle_shards = buffer_samples, shuffle_shards
        self._last: deque[ShuffleQuality] = deque(maxlen=_NUM_METERED)
        self.batches: Batches = self._batches()

    def quality(self) -> Quality:
        """The shuffle quality of the last batches, as the daemon computes it."""
        return asdict(average(self._last))

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _batches(self) -> Batches:
        for place, ids in self._ids():
            places = place + np.arange(len(ids))
            self._last.append(batch_quality(ids, places, self._num_samples))
            batch: dict[str, torch.Tensor] = default_collate(
                [self._samples[index] for index in ids]
            )
            yield batch

    def _ids(self) -> Iterator[tuple[int, Int64Array]]:
        """Yield the place of each batch in its epoch, and its samples.

        Samples that do not fill a batch are left out, as with `drop`.
        """
        while True:
            ids = np.fromiter(
                buffered(self._stream(), self._buffer_samples, self._buffer_samples, self._random),
                np.int64,
            )
            for begin in range(0, len(ids) - BATCH_SIZE + 1, BATCH_SIZE):
                yield begin, ids[begin : begin + BATCH_SIZE]

    def _stream(self) -> Iterator[int]:
        """Yield all samples of an epoch, shard by shard."""
        shards = list(range(int(self._shards[-1]) + 1))
        if self._shuffle_shards:
            self._random.shuffle(shards)
        for shard in shards:
            begin, end = np.searchsorted(self._shards, (shard, shard + 1)).tolist()
            yield from range(begin, end)


@contextmanager
def open_order(
    name: OrderName, stored: Stored, work: Path, window: Window, seed: int
) -> Iterator[Gyre | Buffer]:
    """A context with an order, and with the daemon that it needs."""
    if name not in ("full", "block"):
        buffer = Buffer(
            stored, window.num_samples, seed, shuffle_shards=name == "shuffled shards and a buffer"
        )
        yield buffer
        buffer.close()
        return
    with daemon(work, {"data": stored.config(str(stored.folder))}) as serving:
        order = Gyre(name, serving.address, window, seed)
        yield order
        order.close()
