"""The new lines of docs/migrate.md, on data that the old library's own writer wrote."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.loader.mosaic import streaming
from tests.fenced import ROOT, blocks
from tests.frameworks import framework

pytestmark = [
    pytest.mark.usefixtures("private_daemon"),
    pytest.mark.filterwarnings("ignore"),  # of the old libraries
]

PAGE = "docs/migrate.md"
NUM_SAMPLES = 70  # two batches and a rest


def section(title: str) -> str:
    return (ROOT / PAGE).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def run(title: str, folder: Path) -> dict[str, Any]:
    """The names that the Python blocks of a section leave behind; its paths are below a folder."""
    names: dict[str, Any] = {}
    text = section(title)
    for block in blocks(PAGE, "python"):
        if block in text:
            exec(compile(block.replace("/data/", f"{folder}/"), title, "exec"), names)
    names["loader"].close()
    return names


def photos(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(NUM_SAMPLES):
        place = folder / "photos" / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (24 + number % 5, 32, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg")


def tars(folder: Path) -> None:
    import webdataset as wds

    with wds.ShardWriter(f"{folder}/shards-%03d.tar", maxcount=30, verbose=0) as writer:
        for number in range(NUM_SAMPLES):
            pixels = np.full((24, 32, 3), number, np.uint8)
            writer.write({"__key__": f"{number:04}", "jpg": pixels, "cls": number % 3})


def mds(folder: Path) -> None:
    columns = {"text": "str", "number": "int"}
    with streaming.MDSWriter(out=f"{folder}/mds", columns=columns, compression="zstd") as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"text": f"text {number}", "number": number})


def litdata_sample(number: int) -> dict[str, Any]:
    return {"text": f"text {number}", "class": number % 3}


def chunks(folder: Path) -> None:
    (folder / "tars").mkdir()
    with warnings.catch_warnings(action="ignore"):
        litdata = framework("litdata")
        litdata.optimize(
            litdata_sample,
            inputs=list(range(NUM_SAMPLES)),
            output_dir=f"{folder}/chunks",
            chunk_size=30,
            num_workers=1,
        )


def saved(folder: Path) -> None:
    import datasets

    rows = {"text": [f"text {n}" for n in range(NUM_SAMPLES)], "stars": [*range(NUM_SAMPLES)]}
    datasets.Dataset.from_dict(rows).save_to_disk(f"{folder}/reviews")


@pytest.mark.parametrize(
    ("title", "write", "shapes"),
    [
        ("torch DataLoader", photos, {"images": [32, 3, 224, 224], "classes": [32]}),
        ("webdataset", tars, {"images": [32, 224, 224, 3], "classes": [32]}),
        ("MosaicML Streaming", mds, {"captions": 32, "numbers": [32]}),
        ("LitData", chunks, {"captions": 32, "classes": [32]}),
        ("FFCV", photos, {"images": [32, 3, 224, 224], "labels": [32]}),
        ("Hugging Face datasets", saved, {"reviews": 32, "stars": [32]}),
    ],
)
def test_the_new_lines_read_what_the_old_library_wrote(
    title: str, write: Callable[[Path], None], shapes: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path)
    names = run(title, tmp_path)
    found = {
        name: len(names[name]) if isinstance(names[name], list) else [*names[name].shape]
        for name in shapes
    }
    assert found == shapes
    assert names["loader"].num_samples == NUM_SAMPLES
    for texts, numbers in (("captions", "numbers"), ("reviews", "stars")):
        if texts in names and numbers in names:
            assert names[texts] == [f"text {number}" for number in names[numbers].tolist()]
