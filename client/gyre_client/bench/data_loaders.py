"""The opponents of `gyre bench`: torch's DataLoader over a dataset's own files, in two forms.

*Plain*, as tutorials show it: one sample at a time, joined by a collation. *Tuned*: a whole batch
is read straight into its tensors. Their batches have the same fields and the same bytes as Gyre's.
"""

import io
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from gyre_client.bench.dataset_files import TarPlaces, token_start

PREFETCHED_BATCHES = 4  # per worker; torch's default of 2 is slower
Batch = dict[str, torch.Tensor]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a sample, as the daemon describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ragged: bool


class TokenWindows:
    """Windows of the tokens in files."""

    def __init__(
        self, files: Sequence[Path], field: Field, stride: int, header_bytes: int | None
    ) -> None:
        length, dtype = field.shape[0], np.dtype(field.dtype).newbyteorder("<")
        self._name = field.name
        self._shards = []
        for file in files:
            start = token_start(file, header_bytes)
            if file.stat().st_size - start >= length * dtype.itemsize:
                tokens = np.asarray(np.memmap(file, dtype, "r", start))
                windows = np.lib.stride_tricks.sliding_window_view(tokens, length)[::stride]
                self._shards.append(windows)
        self._first = np.cumsum([0, *(len(shard) for shard in self._shards)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def sample(self, index: int) -> Batch:
        """Returns a copy of one sample."""
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        window = self._shards[shard][index - int(self._first[shard])]
        return {self._name: torch.from_numpy(np.array(window))}

    def batch(self, indices: Indices) -> Batch:
        """Returns a whole batch, read shard by shard."""
        if len(self._shards) == 1:
            return {self._name: torch.from_numpy(self._shards[0][indices])}
        first = self._shards[0]
        out = np.empty((len(indices), first.shape[1]), first.dtype)
        shard = np.searchsorted(self._first, indices, side="right") - 1
        for each in np.unique(shard).tolist():
            chosen = shard == each
            out[chosen] = self._shards[each][indices[chosen] - self._first[each]]
        return {self._name: torch.from_numpy(out)}

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Joins samples to a batch."""
        return {self._name: torch.stack([sample[self._name] for sample in samples])}


class TarSamples:
    """Samples of tar shards, by random access."""

    def __init__(self, files: Sequence[Path], fields: Sequence[Field], places: TarPlaces) -> None:
        self._files = files
        self._fields = fields
        self._places = places

    def __len__(self) -> int:
        return len(self._places.shard)

    @cached_property
    def _mappings(self) -> list[memoryview]:
        """The shards, mapped in the process that reads them: the worker."""
        mappings = []
        for path in self._files:
            with path.open("rb") as file:
                mappings.append(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
        return mappings

    def sample(self, index: int) -> Batch:
        """Returns one sample, its fields read and decoded."""
        return {
            field.name: self._decoded(index, column) for column, field in enumerate(self._fields)
        }

    def batch(self, indices: Indices) -> Batch:
        """Returns a whole batch; ragged fields are copied once, to their place in it."""
        batch: Batch = {}
        for column, field in enumerate(self._fields):
            if not field.ragged:
                values = [self._decoded(index, column) for index in indices.tolist()]
                batch[field.name] = torch.stack(values)
                continue
            ends = np.concatenate(([0], np.cumsum(self._places.size[indices, column])))
            joined = torch.empty(int(ends[-1]), dtype=torch.uint8)
            memory, mappings = joined.numpy().data, self._mappings
            rows = zip(
                self._places.shard[indices].tolist(),
                self._places.start[indices, column].tolist(),
                ends[:-1].tolist(),
                ends[1:].tolist(),
                strict=True,
            )
            for shard, start, begin, end in rows:
                memory[begin:end] = mappings[shard][start : start + end - begin]
            batch |= {field.name: joined, f"{field.name}.offsets": torch.from_numpy(ends)}
        return batch

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Joins samples to a batch."""
        batch: Batch = {}
        for field in self._fields:
            values = [sample[field.name] for sample in samples]
            if field.ragged:
                ends = torch.from_numpy(np.cumsum([0, *(len(value) for value in values)]))
                batch |= {field.name: torch.cat(values), f"{field.name}.offsets": ends}
            else:
                batch[field.name] = torch.stack(values)
        return batch

    def _decoded(self, index: int, column: int) -> torch.Tensor:
        places, field = self._places, self._fields[column]
        start, size = int(places.start[index, column]), int(places.size[index, column])
        data = self._mappings[int(places.shard[index])][start : start + size]
        if field.ragged:
            return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        if field.name.rpartition(".")[2] == "npy":
            return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
        return torch.tensor(int(bytes(data)))


Samples = TokenWindows | TarSamples


class PlainDataset(Dataset[Batch]):
    """Returns a list of samples per batch."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitems__(self, indices: Indices) -> list[Batch]:
        return [self.samples.sample(index) for index in indices.tolist()]


class TunedDataset(PlainDataset):
    """Reads a whole batch at once."""

    def __getitems__(self, indices: Indices) -> Any:
        return self.samples.batch(indices)


class EndlessShuffle(Sampler[Indices]):
    """Batches of a new full shuffle for every epoch, without a pause between epochs."""

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._generator = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Indices]:
        while True:
            order = self._generator.permutation(self._num_samples)
            for end in range(self._batch_size, self._num_samples + 1, self._batch_size):
                yield order[end - self._batch_size : end]


def data_loader(
    samples: Samples, form: str, batch_size: int, num_workers: int, seed: int
) -> "DataLoader[Batch]":
    """Returns a DataLoader in a form, `plain` or `tuned`; it never ends."""
    of_workers: Mapping[str, Any] = {"prefetch_factor": PREFETCHED_BATCHES} if num_workers else {}
    sampler: Any = EndlessShuffle(len(samples), batch_size, seed)
    is_plain = form == "plain"
    return DataLoader(
        PlainDataset(samples) if is_plain else TunedDataset(samples),
        batch_sampler=sampler,
        collate_fn=samples.collate if is_plain else _as_is,
        num_workers=num_workers,
        **of_workers,
    )


def _as_is(batch: Any) -> Any:
    return batch
