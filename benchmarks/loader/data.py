"""The data on which loaders are compared.

It is deterministic, made once per folder, and converted for loaders that have their own format.
"""

import math
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

NUM_SHARDS = 16
SEQUENCE_LENGTH = 512
VOCABULARY = 50_000
_TOKENS_AT_ONCE = 1 << 22
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Workload:
    """One comparison.

    Attributes:
        name: `T`, `S10k` or `S100k`; `T16`, of uint16 ids, for Gyre alone.
        batch_size: samples per batch.
        num_samples: in the dataset.
        config: the dataset's table for the daemon.
        tars: a folder of tar shards with the same samples.
        mds: a folder with the same samples in the streaming library's own format; empty if they
            were not converted.
        about: a description for the report.
    """

    name: str
    batch_size: int
    num_samples: int
    config: dict[str, object]
    tars: str
    mds: str
    about: str

    @property
    def is_tokens(self) -> bool:
        """Whether samples are tokens of one size; otherwise they are bytes of different lengths."""
        return self.name.startswith("T")

    def read_files(self) -> None:
        """Read all files into the page cache.

        Some systems drop files without a read for a minute.
        """
        for root in {str(self.config["uri"]), self.tars, self.mds} - {""}:
            path = Path(root)
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                if file.is_file():
                    with file.open("rb", buffering=0) as opened:
                        while opened.read(_READ_BYTES):
                            pass


@dataclass(frozen=True)
class Scale:
    """How many samples each workload has."""

    tokens: int = 200_000
    small: int = 32_000
    large: int = 4_800


FULL = Scale()
SHORT = Scale(48_000, 6_400, 1_600)


def workloads(folder: Path, scale: Scale) -> list[Workload]:
    """The three workloads, in every form that a loader needs."""
    return [
        tokens(folder, scale.tokens),
        shards(folder, "S10k", scale),
        shards(folder, "S100k", scale),
    ]


def tokens(folder: Path, num_samples: int) -> Workload:
    """T: one flat file of int32 tokens, 512 per sample."""
    path = folder / f"tokens-{num_samples}.bin"
    if not path.exists():
        write_tokens(path, num_samples * SEQUENCE_LENGTH)
    samples = np.memmap(path, np.int32, "r").reshape(-1, SEQUENCE_LENGTH)
    tars = write_tars(folder / "T-tar", (row.tobytes() for row in samples), num_samples)
    mds = _write_mds(folder / "T-mds", f"ndarray:int32:{SEQUENCE_LENGTH}", iter(samples))
    config: dict[str, object] = {
        "uri": str(path),
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": SEQUENCE_LENGTH,
    }
    about = f"{num_samples:,} samples of {SEQUENCE_LENGTH} int32 tokens, one flat file"
    return Workload("T", 64, num_samples, config, tars, mds, about)


def write_tokens(path: Path, num_tokens: int) -> None:
    """Write int32 tokens whose frequencies fall as those of a language.

    The frequency of the r-th token is about proportional to 1/r.
    """
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        for begin in range(0, num_tokens, _TOKENS_AT_ONCE):
            ranks = np.exp(
                generator.random(min(_TOKENS_AT_ONCE, num_tokens - begin), np.float32)
                * math.log(VOCABULARY)
            )
            file.write(ranks.astype(np.int32).tobytes())


def shards(folder: Path, name: str, scale: Scale) -> Workload:
    """S10k or S100k.

    Tar shards of incompressible samples, as images are, uniform within a fifth of their mean size.
    """
    sizes = {"S10k": (scale.small, 10 << 10), "S100k": (scale.large, 100 << 10)}
    num_samples, sample_bytes = sizes[name]

    def samples() -> Iterator[bytes]:
        generator = np.random.default_rng(0)
        for _ in range(num_samples):
            yield generator.bytes(
                int(generator.integers(sample_bytes * 4 // 5, sample_bytes * 6 // 5))
            )

    tars = write_tars(folder / name, samples(), num_samples)
    mds = _write_mds(folder / f"{name}-mds", "bytes", samples())
    config: dict[str, object] = {"uri": tars, "format": "webdataset"}
    about = f"{num_samples:,} samples of about {sample_bytes >> 10} KiB in {NUM_SHARDS} tar shards"
    return Workload(name, 256, num_samples, config, tars, mds, about)


def write_tars(folder: Path, samples: Iterator[bytes], num_samples: int) -> str:
    """Write the samples into tar shards of equal numbers of samples, each a member `.bin`."""
    assert num_samples % NUM_SHARDS == 0
    if not folder.exists():
        unfinished = folder.with_suffix(".writing")
        unfinished.mkdir()
        for shard in range(NUM_SHARDS):
            with tarfile.open(unfinished / f"{shard:03}.tar", "w") as archive:
                for index in range(num_samples // NUM_SHARDS):
                    content = next(samples)
                    member = tarfile.TarInfo(f"{shard:03}{index:06}.bin")
                    member.size = len(content)
                    archive.addfile(member, BytesIO(content))
        unfinished.rename(folder)
    return str(folder)


def _write_mds(
    folder: Path, encoding: str, samples: Iterable[bytes | npt.NDArray[np.int32]]
) -> str:
    """Write the samples in the streaming library's format, uncompressed.

    Return an empty path if the library is not installed.
    """
    # Imports torch and much else, in one process only.
    from benchmarks.loader.mosaic import streaming  # noqa: PLC0415

    if streaming is None:
        return ""
    if not folder.exists():
        with streaming.MDSWriter(
            out=str(folder), columns={"sample": encoding}, size_limit=1 << 26
        ) as writer:
            for sample in samples:
                writer.write({"sample": sample})
    return str(folder)
