"""The compared loaders.

All bring the same samples in the same batches, those of Gyre's full shuffle with that seed. Only
`block` has other batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gyre_client import Loader
from gyre_daemon.order.planner import BatchPlanner, Order
from torch.utils.data import DataLoader, Sampler

from benchmarks.loader.datasets import Rinas
from benchmarks.training.samples import Files, Samples, Stored, Web
from benchmarks.training.trainer import Batches

BATCH_SIZE = 64
NUM_WORKERS = 8
BATCHES_AHEAD = 4  # of each worker
_STEPS_AT_ONCE = 64

Kind = Literal["memory", "ordered", "rinas", "full", "block"]


@dataclass(frozen=True)
class Window:
    """How much is mixed: as many samples in the order `block` as in a buffer.

    Attributes:
        num_blocks: of the order `block`.
        block_samples: of each.
        sample_bytes: as it lies in its object.
    """

    num_blocks: int
    block_samples: int
    sample_bytes: int

    @property
    def num_samples(self) -> int:
        """The number of samples in the window, and in the buffer."""
        return self.num_blocks * self.block_samples

    @property
    def block_bytes(self) -> int:
        """The bytes of each block."""
        return self.block_samples * self.sample_bytes


@dataclass(frozen=True)
class Source:
    """Where a loader finds the data.

    Attributes:
        stored: the dataset; the names of its objects and the places of its samples are known to all
            loaders beforehand.
        url: the URL of its objects.
        address: the address of a daemon that serves it as `data`; empty for loaders without Gyre.
        seed: the seed of the order.
        window: the window of the order `block`.
    """

    stored: Stored
    url: str
    address: str
    seed: int
    window: Window


class FullShuffle(Sampler[list[int]]):
    """The sample ids of Gyre's batches, step by step."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._plan = BatchPlanner(Order("full", "drop", seed, BATCH_SIZE), num_samples)

    def __iter__(self) -> Iterator[list[int]]:
        step = 0
        while True:
            for batch in self._plan.batches(step, _STEPS_AT_ONCE, 0, 1):
                yield batch.sample_ids.tolist()
            step += _STEPS_AT_ONCE


def opener(kind: Kind, source: Source) -> Callable[[], Batches]:
    """A function that starts to read when it is called."""
    if kind == "memory":
        return lambda: data_loader(
            Samples(source.stored, Files(source.stored.folder)), source.seed, num_workers=0
        )
    if kind in ("full", "block"):
        # the daemon has read the index then
        loader = gyre(kind, source.address, source.seed, source.window)
        return loader.stream
    samples: Any = Samples(source.stored, Web(source.url))
    return lambda: data_loader(
        Rinas(samples) if kind == "rinas" else samples, source.seed, NUM_WORKERS
    )


def gyre(order: Literal["full", "block"], address: str, seed: int, window: Window) -> Loader:
    """Batches through the daemon at this address, from its dataset `data`."""
    block_bytes, num_blocks = (
        (window.block_bytes, window.num_blocks) if order == "block" else (0, 0)
    )
    return Loader(
        "data",
        batch_size=BATCH_SIZE,
        seed=seed,
        address=address,
        token_dtype="stored",  # as the others give them
        tail="drop",
        order=order,
        io_block_bytes=block_bytes,
        window_blocks=num_blocks,
    )


def data_loader(samples: Any, seed: int, num_workers: int) -> Batches:
    """Torch's DataLoader, whose workers keep some batches ahead and return them in order.

    An ordered loader's worker reads its samples one by one.
    """
    ahead: dict[str, Any] = {}
    if num_workers:
        ahead = {
            "prefetch_factor": BATCHES_AHEAD,
            "persistent_workers": True,
            "multiprocessing_context": "fork",
        }
    loader: DataLoader[Any] = DataLoader(
        samples, batch_sampler=FullShuffle(len(samples), seed), num_workers=num_workers, **ahead
    )
    return iter(loader)
