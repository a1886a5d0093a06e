"""Readers of whole shards from object storage, beside Gyre's order `block`.

The results are samples/s, and how well batches are mixed. The first token of a sample is its id.
webdataset reads tar shards over HTTP and shuffles with a buffer. mosaicml-streaming copies its own
shards from S3 to a folder and shuffles as it does by default. Each has the number of workers that
it recommends. `python -m benchmarks.loader.storage.objects --only shards` runs this.
"""

import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gyre_daemon.order.planner import batch_quality

from benchmarks.loader.data import SEQUENCE_LENGTH
from benchmarks.loader.libraries import PREFETCHED_BATCHES, WDS_BUFFER
from benchmarks.loader.mosaic import is_installed, streaming

NUM_WORKERS = 2
MDS_SHARD_BYTES = 8 << 20

Batches = Iterator[torch.Tensor]
Ids = npt.NDArray[np.int64]


def write_shards(root: Path) -> None:
    """Write ids into the objects of `root/data`; copy them as tar shards, and as MDS if present."""
    (root / "tar").mkdir()
    first = 0
    for number, path in enumerate(sorted((root / "data").iterdir())):
        samples = np.fromfile(path, np.int32).reshape(-1, SEQUENCE_LENGTH)
        samples[:, 0] = np.arange(first, first + len(samples))
        first += len(samples)
        samples.tofile(path)
        _write_tar(root / "tar" / f"{number:04}.tar", samples)
    if is_installed():
        columns = {"sample": f"ndarray:int32:{SEQUENCE_LENGTH}"}
        with streaming.MDSWriter(
            out=str(root / "mds"), columns=columns, size_limit=MDS_SHARD_BYTES
        ) as writer:
            for path in sorted((root / "data").iterdir()):
                for sample in np.fromfile(path, np.int32).reshape(-1, SEQUENCE_LENGTH):
                    writer.write({"sample": sample})


def _write_tar(path: Path, samples: npt.NDArray[np.int32]) -> None:
    with tarfile.open(path, "w") as archive:
        for sample in samples:
            member = tarfile.TarInfo(f"{sample[0]:09}.bin")
            member.size = sample.nbytes
            archive.addfile(member, BytesIO(sample.tobytes()))


def prepare(task: dict[str, Any]) -> Callable[[], Batches]:
    """Import all, and return a function that begins to read."""
    torch.set_num_threads(1)
    return {"webdataset": _webdataset, "mosaic": _mosaic, "block": _block}[task["kind"]](task)


def _webdataset(task: dict[str, Any]) -> Callable[[], Batches]:
    # Only where it is measured.
    import webdataset as wds  # noqa: PLC0415

    num_tokens = task["sample_bytes"] // 4

    def collate(samples: list[tuple[bytes]]) -> torch.Tensor:
        joined = torch.frombuffer(
            bytearray().join(sample for (sample,) in samples), dtype=torch.int32
        )
        return joined.reshape(-1, num_tokens)

    num_objects = -(-task["num_samples"] // task["object_samples"])
    urls = [f"{task['url']}/tar/{number:04}.tar" for number in range(num_objects)]
    pipeline = (
        wds.WebDataset(urls, shardshuffle=len(urls), seed=task["seed"], empty_check=False)
        .repeat()
        .shuffle(WDS_BUFFER)
    )
    pipeline = pipeline.to_tuple("bin").batched(
        task["batch_size"], collation_fn=collate, partial=False
    )
    return lambda: iter(
        wds.WebLoader(
            pipeline, batch_size=None, num_workers=NUM_WORKERS, prefetch_factor=PREFETCHED_BATCHES
        )
    )


def _mosaic(task: dict[str, Any]) -> Callable[[], Batches]:
    os.environ |= {
        "S3_ENDPOINT_URL": task["url"],
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    streaming.base.util.clean_stale_shared_memory()
    # its workers may write still
    copied = tempfile.TemporaryDirectory(prefix="gyre-mds-", ignore_cleanup_errors=True)

    def begin() -> Batches:
        dataset = streaming.StreamingDataset(
            remote="s3://mds",
            local=copied.name,
            shuffle=True,
            shuffle_seed=task["seed"],
            batch_size=task["batch_size"],
            num_canonical_nodes=1,
        )
        loader = streaming.StreamingDataLoader(
            dataset,
            batch_size=task["batch_size"],
            num_workers=NUM_WORKERS,
            prefetch_factor=PREFETCHED_BATCHES,
        )
        with copied:
            for batch in loader:
                yield batch["sample"]

    return begin


def _block(task: dict[str, Any]) -> Callable[[], Batches]:
    # The DataLoader's workers are forked: no thread of gRPC may be there.
    from gyre_client import Loader  # noqa: PLC0415

    loader = Loader(
        "set",
        batch_size=task["batch_size"],
        seed=task["seed"],
        address=task["address"],
        order="block",
    )
    return lambda: (batch["tokens"] for batch in loader.stream())


def mixing(batches: list[Ids], num_samples: int) -> float:
    """How far apart in the dataset two samples of a batch lie, on average.

    1 for a uniform shuffle.
    """
    return float(np.mean([batch_quality(ids, ids, num_samples).mixing for ids in batches]))


if __name__ == "__main__":
    write_shards(Path(sys.argv[1]))
