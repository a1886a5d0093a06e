"""Run the stages of a webdataset pipeline on samples that Gyre reads, stop, and resume.

`wds.decode`, `wds.to_tuple` and a stage of one's own stay as they are; only the source is another.

    python examples/webdataset_pipeline.py
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from gyre_client import Loader
from gyre_client.integrations.webdataset import Samples

BATCH_SIZE, NUM_SAMPLES = 16, 100
NUM_EPOCHS, STOP_AT = 3, 8

Pair = tuple[np.ndarray, int]


def brighter(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """A stage as users write them."""
    for image, number in pairs:
        yield image + 1.0, number


def main() -> None:
    """Read until the stop, then from the state to the end."""
    parser = argparse.ArgumentParser(description="Run a webdataset pipeline on Gyre's samples.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo/webdataset"))
    workdir = parser.parse_args().workdir
    workdir.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 8, 8, 3), np.uint8)
    with wds.ShardWriter(str(workdir / "shard-%03d.tar"), maxcount=30, verbose=0) as writer:
        for number, image in enumerate(pixels):
            writer.write({"__key__": f"{number:04}", "png": image, "cls": number})
    before = read(workdir, STOP_AT)
    after = read(workdir, resumed=True)
    (workdir / "rank-0.json").write_text(json.dumps(before + after))
    print(f"stopped after {len(before)} steps, then took {len(after)} more")


def read(workdir: Path, stop_at: int = 0, *, resumed: bool = False) -> list[list[int]]:
    """Returns the sample ids of each step."""
    with Loader(
        str(workdir / "shard-*.tar"), batch_size=BATCH_SIZE, tail="drop", format="webdataset"
    ) as loader:
        batches = wds.DataPipeline(
            Samples(loader),
            wds.decode("rgb"),
            wds.to_tuple("png", "cls"),
            brighter,
            wds.batched(loader.local_batch_size),
        )
        if resumed:
            loader.load_state_dict(torch.load(workdir / "state.pt", weights_only=True))
        seen = []
        while loader.epoch < NUM_EPOCHS:
            for images, numbers in batches:
                assert images.shape == (BATCH_SIZE, 8, 8, 3)
                assert images.min() >= 1.0
                seen.append(numbers.tolist())
                if len(seen) == stop_at:
                    torch.save(loader.state_dict(), workdir / "state.pt")
                    return seen
        return seen


if __name__ == "__main__":
    main()
