"""What jobs receive is, bit for bit, what a plain reader makes of the same files.

One thread, one sample after another.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_daemon.order.planner import BatchPlanner, Order
from webdataset import TarWriter

SEED, BATCH_SIZE, NUM_STEPS = 7, 16, 40


def token_samples(folder: Path) -> list[bytes]:
    """Windows of 8 tokens; none spans two files."""
    samples = []
    for path in sorted(folder.glob("*.bin")):
        with path.open("rb") as file:
            while len(window := file.read(16)) == 16:
                samples.append(window)
    return samples


def tar_samples(folder: Path) -> list[bytes]:
    samples = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content
                samples.append(content.read())
    return samples


def plain_batches(samples: list[bytes]) -> Iterator[tuple[list[int], list[bytes]]]:
    """Sample ids and samples of each step, through several epochs."""
    plan = BatchPlanner(Order("full", "wrap", SEED, BATCH_SIZE), len(samples))
    for step in range(NUM_STEPS):
        ids = plan.batches(step, 1, 0, 1)[0].sample_ids.tolist()
        yield ids, [samples[sample_id] for sample_id in ids]


@pytest.mark.parametrize("prefetch_batches", [0, 1, 32])
def test_batches_are_those_of_a_plain_reader(
    gyred: Any, token_files: Path, tmp_path: Path, prefetch_batches: int
) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    generator = np.random.default_rng(0)
    for shard in range(3):
        with TarWriter(str(shards / f"{shard}.tar")) as writer:
            for n in range(50):
                writer.write(
                    {
                        "__key__": f"{shard}{n:03}",
                        "bin": generator.bytes(int(generator.integers(0, 5000))),
                    }
                )
    daemon = gyred(
        {
            "datasets": {
                "tokens": {
                    "uri": str(token_files),
                    "format": "tokens",
                    "dtype": "uint16",
                    "sequence_length": 8,
                },
                "ragged": {"uri": str(shards), "format": "webdataset"},
            }
        }
    )
    for name, field, samples in (
        ("tokens", "tokens", token_samples(token_files)),
        ("ragged", "bin", tar_samples(shards)),
    ):
        arguments = {
            "batch_size": BATCH_SIZE,
            "seed": SEED,
            "address": daemon.address,
            "prefetch_batches": prefetch_batches,
        }
        with Loader(name, **arguments, token_dtype="stored") as loader:
            assert loader.num_samples == len(samples)
            for (ids, expected), batch in zip(
                plain_batches(samples), loader.stream(), strict=False
            ):
                assert batch["sample_id"].tolist() == ids
                assert batch[field].numpy().tobytes() == b"".join(expected)
                if name == "ragged":
                    assert (
                        batch["bin.offsets"].tolist()
                        == np.cumsum([0, *map(len, expected)]).tolist()
                    )
