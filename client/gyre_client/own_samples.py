"""A dataset's own files as torch datasets, in the two forms that `gyre bench` compares with.

*Plain*, as tutorials have it: a sample at a time, joined by a collation. *Tuned*: a batch is read into its tensors at once.
Their batches have the same fields and the same bytes as Gyre's.
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

from gyre_client.own_files import TarPlaces, token_start

PREFETCHED_BATCHES = 4  # of each worker; the default of 2 is slower
Batch = dict[str, torch.Tensor]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a sample, as the daemon describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ragged: bool


class OwnTokens(Dataset[Batch]):
    """Windows of the tokens in files."""

    def __init__(self, files: Sequence[Path], field: Field, stride: int, header_bytes: int | None) -> None:
        length = field.shape[0]
        self._name = field.name
        self._shards = []
        for file in files:
            start, dtype = token_start(file, header_bytes), np.dtype(field.dtype).newbyteorder("<")
            tokens = np.memmap(file, dtype, "r", start) if file.stat().st_size > start else np.empty(0)
            if len(tokens) >= length:
                windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), length)[::stride]
                self._shards.append(windows)
        self._first = np.cumsum([0, *(len(shard) for shard in self._shards)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def sample(self, index: int) -> Batch:
        """One, copied."""
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        return {self._name: torch.from_numpy(np.array(self._shards[shard][index - int(self._first[shard])]))}

    def batch(self, indices: Indices) -> Batch:
        """Several at once."""
        if len(self._shards) == 1:
            return {self._name: torch.from_numpy(self._shards[0][indices])}
        first = self._shards[0]
        out = np.empty((len(indices), first.shape[1]), first.dtype)
        shard = np.searchsorted(self._first, indices, side="right") - 1
        for each in np.unique(shard).tolist():
            chosen = shard == each
            out[chosen] = self._shards[each][indices[chosen] - self._first[each]]
        return {self._name: torch.from_numpy(out)}

    def join(self, samples: Sequence[Batch]) -> Batch:
        """Collation of samples."""
        return {self._name: torch.stack([sample[self._name] for sample in samples])}


class OwnTars(Dataset[Batch]):
    """Samples of tar shards, by random access."""

    def __init__(self, files: Sequence[Path], fields: Sequence[Field], places: TarPlaces) -> None:
        self._files = files
        self._fields = fields
        self._places = places

    def __len__(self) -> int:
        return len(self._places.shard)

    @cached_property
    def _mappings(self) -> list[memoryview]:
        """Mapped where they are read: in the worker."""
        mappings = []
        for path in self._files:
            with path.open("rb") as file:
                mappings.append(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
        return mappings

    def sample(self, index: int) -> Batch:
        """One, its fields read and decoded."""
        mapping = self._mappings[int(self._places.shard[index])]
        places = zip(self._fields, self._places.start[index].tolist(), self._places.size[index].tolist(), strict=True)
        return {field.name: _decoded(field, bytes(mapping[start : start + size])) for field, start, size in places}

    def batch(self, indices: Indices) -> Batch:
        """Several at once; ragged fields are copied once, to their place."""
        batch: Batch = {}
        for column, field in enumerate(self._fields):
            if not field.ragged:
                batch[field.name] = torch.stack([self._one(index, column) for index in indices.tolist()])
                continue
            sizes = self._places.size[indices, column]
            ends = np.concatenate(([0], np.cumsum(sizes)))
            joined = torch.empty(int(ends[-1]), dtype=torch.uint8)
            memory, mappings = joined.numpy().data, self._mappings
            rows = zip(self._places.shard[indices].tolist(), self._places.start[indices, column].tolist(), strict=True)
            for (shard, start), begin, end in zip(rows, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                memory[begin:end] = mappings[shard][start : start + end - begin]
            batch |= {field.name: joined, f"{field.name}.offsets": torch.from_numpy(ends)}
        return batch

    def join(self, samples: Sequence[Batch]) -> Batch:
        """Collation of samples."""
        batch: Batch = {}
        for field in self._fields:
            values = [sample[field.name] for sample in samples]
            if field.ragged:
                ends = np.cumsum([0, *(len(value) for value in values)])
                batch |= {field.name: torch.cat(values), f"{field.name}.offsets": torch.from_numpy(ends)}
            else:
                batch[field.name] = torch.stack(values)
        return batch

    def _one(self, index: int, column: int) -> torch.Tensor:
        start, size = int(self._places.start[index, column]), int(self._places.size[index, column])
        return _decoded(self._fields[column], bytes(self._mappings[int(self._places.shard[index])][start : start + size]))


class Plain(Dataset[Batch]):
    """A list of samples per batch."""

    def __init__(self, samples: OwnTokens | OwnTars) -> None:
        self.samples = samples

    def __getitems__(self, indices: Indices) -> list[Batch]:
        return [self.samples.sample(index) for index in indices.tolist()]


class Tuned(Plain):
    """A whole batch at once."""

    def __getitems__(self, indices: Indices) -> Any:
        return self.samples.batch(indices)


class EndlessShuffle(Sampler[Indices]):
    """Batches of a full shuffle, anew for every epoch, without a pause between epochs."""

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._generator = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Indices]:
        while True:
            order = self._generator.permutation(self._num_samples)
            for end in range(self._batch_size, self._num_samples + 1, self._batch_size):
                yield order[end - self._batch_size : end]


def data_loader(samples: OwnTokens | OwnTars, form: str, batch_size: int, num_workers: int, seed: int) -> "DataLoader[Batch]":
    """Returns a DataLoader in a form, `plain` or `tuned`; it never ends."""
    of_workers: Mapping[str, Any] = {"prefetch_factor": PREFETCHED_BATCHES} if num_workers else {}
    sampler: Any = EndlessShuffle(len(samples), batch_size, seed)
    dataset, collate = (Plain(samples), samples.join) if form == "plain" else (Tuned(samples), _as_is)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers, **of_workers)


def _as_is(batch: Any) -> Any:
    return batch


def _decoded(field: Field, data: bytes) -> torch.Tensor:
    if field.ragged:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    if field.name.rpartition(".")[2] == "npy":
        return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
    return torch.tensor(int(data))
