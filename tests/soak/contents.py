"""Datasets whose bytes follow from the sample's number, and what each batch of them must be."""

import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_daemon.order.mixture import planner_for
from gyre_daemon.order.permutation import (
    BlockTable,
    blocks_of_equal_samples,
    default_io_block_bytes,
    default_window_blocks,
)
from gyre_daemon.order.planner import BatchPlanner, Order, OrderMode, Tail

from tests.soak.plan import Job

TOKENS_PER_SAMPLE, SAMPLES_PER_SHARD, NUM_SHARDS = 256, 700, 3
NUM_TAR_SAMPLES, TAR_SHARDS = 600, 3
NUM_LABELS = 1000
BUCKET = "data"
_PLANNED_STEPS = 64  # with one call of the permutation

Int64Array = npt.NDArray[np.int64]


def write_tokens(folder: Path) -> None:
    """Writes shards of int32 in which sample i is [256 i, 256 (i + 1))."""
    folder.mkdir(parents=True)
    size = SAMPLES_PER_SHARD * TOKENS_PER_SAMPLE
    for shard in range(NUM_SHARDS):
        np.arange(shard * size, (shard + 1) * size, dtype=np.int32).tofile(folder / f"{shard}.bin")


def write_tars(folder: Path) -> None:
    """Writes tar shards of a ragged field `bin` and a label `cls`."""
    folder.mkdir(parents=True)
    each = NUM_TAR_SAMPLES // TAR_SHARDS
    for shard in range(TAR_SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for sample in range(shard * each, (shard + 1) * each):
                fields = {"bin": _image(sample).tobytes(), "cls": str(_label(sample)).encode()}
                for extension, data in fields.items():
                    member = tarfile.TarInfo(f"{sample:06}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def _image(sample: int) -> npt.NDArray[np.uint8]:
    size = 500 + sample * 37 % 4000
    return ((np.arange(size) + sample * 31) % 251).astype(np.uint8)


def _label(sample: int) -> int:
    return sample * 7 % NUM_LABELS


def digest(batch: Mapping[str, Any]) -> int:
    """Returns a checksum of a batch's numbers, names and bytes included.

    Args:
        batch: Arrays by field name, or anything with `__array__`.
    """
    checksum = 0
    for name in sorted(batch):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(batch[name]).tobytes(), checksum)
    return checksum


class Expected:
    """What a rank of a job must read, computed from the order and the datasets' formulas.

    Attributes:
        num_samples: N.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        is_tar = job.dataset == "tars"
        self.num_samples = NUM_TAR_SAMPLES if is_tar else NUM_SHARDS * SAMPLES_PER_SHARD
        self._planner = _planner(job, self.num_samples)
        self._first = self._stop = 0

    @property
    def epoch_length(self) -> int:
        """The number of positions of an epoch."""
        return self._planner.epoch_length

    def sample_ids(self, step: int) -> tuple[Int64Array, npt.NDArray[np.bool_] | None]:
        """Returns the samples of a step, and the mask where the tail is `pad`."""
        if not self._first <= step < self._stop:
            self._group = self._planner.batches(
                step, _PLANNED_STEPS, self._rank, self._job.world_size
            )
            self._first, self._stop = step, step + _PLANNED_STEPS
        plan = self._group[step - self._first]
        return plan.sample_ids, plan.mask

    def digest(self, step: int) -> int:
        """Returns the checksum of the batch of a step."""
        ids, mask = self.sample_ids(step)
        batch: dict[str, Any] = {"sample_id": ids}
        if mask is not None:
            batch["mask"] = mask
        if self._job.dataset == "tars":
            images = [_image(each) for each in ids.tolist()]
            batch["bin"] = np.concatenate(images)
            batch["bin.offsets"] = np.cumsum([0, *map(len, images)], dtype=np.int64)
            batch["cls"] = np.array([_label(each) for each in ids.tolist()], np.int64)
        else:
            first = ids[:, None] * TOKENS_PER_SAMPLE
            batch["tokens"] = (first + np.arange(TOKENS_PER_SAMPLE)).astype(np.int32)
        return digest(batch)


class _TokenBlocks:
    """The blocks of the token shards, for the order `block`."""

    num_samples = NUM_SHARDS * SAMPLES_PER_SHARD

    def blocks(self, io_block_bytes: int) -> BlockTable:
        counts = np.full(NUM_SHARDS, SAMPLES_PER_SHARD, np.int64)
        return blocks_of_equal_samples(counts, TOKENS_PER_SAMPLE * 4, io_block_bytes)


def _planner(job: Job, num_samples: int) -> BatchPlanner:
    mode: OrderMode = job.order  # type: ignore[assignment]
    tail: Tail = job.tail  # type: ignore[assignment]
    if job.order != "block":
        return BatchPlanner(Order(mode, tail, job.seed, job.batch_size), num_samples)
    window = default_window_blocks(job.batch_size)
    order = Order(mode, tail, job.seed, job.batch_size, default_io_block_bytes(window), window)
    return planner_for(order, _TokenBlocks())
