"""Stages of webdataset on samples that Gyre reads, compared with webdataset's own reading."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_client.integrations.webdataset import Samples

pytestmark = [
    pytest.mark.usefixtures("private_daemon"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # webdataset 1.0.2 itself
]

NUM_SAMPLES = 11


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Of all kinds of members, written by webdataset; each fourth sample has no text."""
    rng = np.random.default_rng(0)
    with wds.ShardWriter(str(tmp_path / "%02d.tar"), maxcount=4, verbose=0) as writer:
        for number in range(NUM_SAMPLES):
            sample = {
                "__key__": f"photos/{number:03}",
                "png": rng.integers(0, 256, (5, 7, 3), np.uint8),
                "cls": number % 3,
                "json": {"number": number, "names": ["a"] * number},
                "left.npy": rng.random((2, 3), np.float32),
                "right.npy": rng.integers(0, 9, (number, 2 + number % 2)),
                "pyd": {"raw": number},
            }
            writer.write(sample if number % 4 else {**sample, "txt": f"sample {number}"})
    return str(tmp_path / "*.tar")


def opened(shards: str, **arguments: Any) -> Loader:
    arguments = {"batch_size": 4, "order": "sequential", "tail": "pad", **arguments}
    arguments = {"options": {"optional": ["txt"]}, **arguments}
    return Loader(shards, format="webdataset", **arguments)


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample without its key and the place that it was read from, as lists."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in sample.items()
        if not name.startswith("__")
    }


def test_stages_see_the_samples_that_webdataset_reads(shards: str) -> None:
    paths = sorted(map(str, Path(shards).parent.glob("*.tar")))
    theirs = list(wds.WebDataset(paths, shardshuffle=False).decode("rgb"))
    with opened(shards) as loader:
        ours = list(wds.DataPipeline(Samples(loader), wds.decode("rgb")))
    assert len(theirs) == NUM_SAMPLES
    assert list(map(plain, ours)) == list(map(plain, theirs))
    assert [int(sample["__key__"]) for sample in ours] == list(range(NUM_SAMPLES))


def test_a_pipeline_has_all_ranks_samples_in_the_order_of_each_epoch(shards: str) -> None:
    def read(rank: int, world_size: int) -> list[int]:
        with opened(shards, order="full", rank=rank, world_size=world_size) as loader:
            pipeline = wds.DataPipeline(
                Samples(loader), wds.decode("rgb"), wds.to_tuple("json", "cls")
            )
            return [about["number"] for _ in range(2) for about, _ in pipeline]

    alone = read(0, 1)
    assert sorted(alone[:NUM_SAMPLES]) == sorted(alone[NUM_SAMPLES:]) == list(range(NUM_SAMPLES))
    assert alone[:NUM_SAMPLES] != alone[NUM_SAMPLES:]
    assert sorted(read(0, 2) + read(1, 2)) == sorted(alone)


def test_a_state_inside_a_batch_repeats_it_and_loses_nothing(shards: str) -> None:
    def keys(samples: Any) -> list[str]:
        return [sample["__key__"] for sample in samples]

    with opened(shards) as loader:
        whole = keys(Samples(loader))
    for taken, begins in ((3, 0), (4, 4), (5, 4), (8, 8), (11, 0)):
        with opened(shards) as loader, opened(shards) as resumed:
            assert len(keys(islice(Samples(loader), taken))) == taken
            resumed.load_state_dict(loader.state_dict())
            assert keys(Samples(resumed)) == whole[begins:], taken


def test_arrays_of_transforms_are_arrays(shards: str) -> None:
    decode = [{"name": "decode_image", "field": "png"}, {"name": "resize", "size": [4, 4]}]
    with opened(shards, transform=decode, options={"fields": ["png", "cls"]}) as loader:
        pipeline = wds.DataPipeline(Samples(loader), wds.decode(partial=True))
        images = [each for sample in pipeline for each in sample.values() if np.ndim(each) == 3]
        assert {(each.dtype.name, each.shape) for each in images} == {("uint8", (4, 4, 3))}


def test_workers_are_refused(shards: str) -> None:
    with opened(shards) as loader:
        pipeline = wds.DataPipeline(Samples(loader), wds.decode("rgb"))
        batches = torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=1)
        with pytest.raises(Exception, match="num_workers=0"):
            next(iter(batches))


def test_a_batch_that_comes_again_is_as_it_was_stored(shards: str) -> None:
    """A stage wrote to its arrays, and the iteration ended inside the batch."""
    decode = [{"name": "decode_image", "field": "png"}, {"name": "resize", "size": [4, 4]}]
    with opened(shards, transform=decode, options={"fields": ["png", "cls"]}) as loader:
        for turn in range(2):
            sample = next(iter(Samples(loader)))
            image = next(each for each in sample.values() if np.ndim(each) == 3)
            if turn:
                assert image.any()
            image[:] = 0


def test_an_older_iteration_does_not_move_the_loader_back(shards: str) -> None:
    with opened(shards) as loader:
        older, younger = iter(Samples(loader)), iter(Samples(loader))
        next(older)
        assert [int(next(younger)["__key__"]) for _ in range(8)] == [*range(8)]
        with pytest.raises(InvalidRequest, match="another iteration of this Loader has begun"):
            list(older)
        assert loader.step == 2
        assert [int(sample["__key__"]) for sample in younger] == [8, 9, 10]
