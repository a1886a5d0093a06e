"""The workloads as torch datasets, in three forms.

The forms are plain, as tutorials have them; tuned, as fast as we know; and RINAS, as its paper
fetches. All read by random access, so their order is a full shuffle, as Gyre's is.
"""

import mmap
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

Indices = npt.NDArray[np.int64]
RINAS_THREADS = 32


class TokenSamples(Dataset[torch.Tensor]):
    """Plain: the memory-mapped token file.

    A batch is a list of samples, for the default collation.
    """

    def __init__(self, path: str, sequence_length: int) -> None:
        self._tokens = np.asarray(np.memmap(path, np.int32, "r")).reshape(-1, sequence_length)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self._tokens[index]))

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class TokenBatches(TokenSamples):
    """Tuned: one vectorised gather per batch, nothing to collate."""

    def __getitems__(self, indices: Indices) -> torch.Tensor:  # type: ignore[override]
        batch = np.empty((len(indices), self._tokens.shape[1]), np.int32)
        np.take(self._tokens, indices, axis=0, out=batch, mode="clip")
        return torch.from_numpy(batch)


class TarSamples(Dataset[bytes]):
    """Plain: samples of tar shards, one `pread` each.

    Headers were read once, and the collation joins the samples.
    """

    def __init__(self, folder: str) -> None:
        self._paths = sorted(Path(folder).glob("*.tar"))
        self.places: list[tuple[int, int, int]] = []
        for shard, path in enumerate(self._paths):
            with tarfile.open(path) as archive:
                self.places += [(shard, member.offset_data, member.size) for member in archive]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> bytes:
        shard, offset, size = self.places[index]
        return os.pread(self.files[shard], size, offset)

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        return [self[index] for index in indices]

    @cached_property
    def files(self) -> list[int]:
        """The files, opened in the worker that reads them."""
        return [os.open(path, os.O_RDONLY) for path in self._paths]


class TarBatches(TarSamples):
    """Tuned: mapped shards, each sample copied once, to its place in the batch's one tensor."""

    @cached_property
    def mappings(self) -> list[memoryview]:
        """The mappings of the shards."""
        return [memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ)) for file in self.files]

    def __getitems__(self, indices: Indices) -> torch.Tensor:  # type: ignore[override]
        places = [self.places[index] for index in indices.tolist()]
        batch = torch.empty(sum(size for _, _, size in places), dtype=torch.uint8)
        memory, mappings, end = batch.numpy().data, self.mappings, 0
        for shard, offset, size in places:
            begin, end = end, end + size
            memory[begin:end] = mappings[shard][offset : offset + size]
        return batch


class Rinas:
    """As the paper fetches (arXiv 2312.02368).

    A thread per sample of a batch, samples in the order in which they arrive.
    """

    def __init__(self, samples: TokenSamples | TarSamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(RINAS_THREADS)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        fetches = [self._threads.submit(self._samples.__getitem__, index) for index in indices]
        return [fetch.result() for fetch in as_completed(fetches)]


def as_is(batch: torch.Tensor) -> torch.Tensor:
    """Collate a batch that is already a tensor."""
    return batch


def join(samples: list[bytes]) -> torch.Tensor:
    """Collate samples of different lengths: all bytes back to back."""
    return torch.frombuffer(bytearray(b"".join(samples)), dtype=torch.uint8)
