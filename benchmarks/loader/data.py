"""The data that loaders are compared on, made once per folder."""

import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Workload:
    """One comparison.

    Attributes:
        name: `T`, `S10k` or `S100k`.
        batch_size: samples per batch.
        num_samples: in the dataset.
        sample_bytes: about.
        config: the dataset's table for the daemon.
        about: for the report.
    """

    name: str
    batch_size: int
    num_samples: int
    sample_bytes: int
    config: dict[str, object]
    about: str


def tokens(folder: Path, num_samples: int) -> Workload:
    """T: one flat file of int32 tokens, 512 per sample."""
    path = folder / f"tokens-{num_samples}.bin"
    if not path.exists():
        np.arange(num_samples * 512, dtype=np.int32).tofile(path)
    config: dict[str, object] = {"uri": str(path), "format": "tokens", "dtype": "int32", "sequence_length": 512}
    return Workload("T", 64, num_samples, 2048, config, f"{num_samples} samples of 512 int32 tokens, one flat file")


def shards(folder: Path, name: str, num_samples: int, sample_bytes: int) -> Workload:
    """S: tar shards of raw samples of about one size (uniform within a fifth of it)."""
    directory = folder / f"{name}-{num_samples}"
    if not directory.exists():
        unfinished = folder / f"{name}.writing"
        unfinished.mkdir(exist_ok=True)
        generator = np.random.default_rng(0)
        for shard in range(16):
            with tarfile.open(unfinished / f"{shard:03}.tar", "w") as archive:
                for index in range(num_samples // 16):
                    size = int(generator.integers(sample_bytes * 4 // 5, sample_bytes * 6 // 5))
                    member = tarfile.TarInfo(f"{shard:03}{index:06}.bin")
                    member.size = size
                    archive.addfile(member, BytesIO(generator.bytes(size)))
        unfinished.rename(directory)
    config: dict[str, object] = {"uri": str(directory), "format": "webdataset"}
    return Workload(
        name, 256, num_samples // 16 * 16, sample_bytes, config, f"{num_samples} samples of {sample_bytes} B in 16 tar shards"
    )
