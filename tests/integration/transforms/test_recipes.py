"""The recipes of the page on transforms, as they are, by a private daemon."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from PIL import Image

from tests.batches import same, take
from tests.fenced import blocks

SHAPES = {
    "imagenet": {"image": (3, 176, 176)},
    "dino": {f"global_{n}": (3, 224, 224) for n in (1, 2)}
    | {f"local_{n}": (3, 96, 96) for n in range(6)},
}


@pytest.fixture
def recipes() -> dict[str, Any]:
    """What the block of the page defines."""
    names: dict[str, Any] = {}
    for block in blocks("docs/transforms.md", "python"):
        if "def view" in block or block.startswith("segmentation"):
            exec(block, names)
    return names


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_recipes_make_what_the_page_says(
    name: str, recipes: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "images/some"
    folder.mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (130, 150, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")

    def batches() -> list[Any]:
        with Loader(
            folder.parent, format="files", batch_size=2, seed=1, transform=recipes[name]
        ) as loader:
            return [{key: each.clone() for key, each in its.items()} for its in take(loader, 4)]

    first = batches()
    made = {key: tuple(each.shape[1:]) for key, each in first[0].items() if each.ndim == 4}
    assert made == SHAPES[name]
    assert "file" not in first[0]
    assert same(first, batches())
    # another epoch has other views
    by_id: dict[int, list[Any]] = {}
    for batch in first:
        for row, sample in enumerate(batch["sample_id"].tolist()):
            by_id.setdefault(sample, []).append(batch[next(iter(made))][row])
    assert all(not one.equal(other) for one, other in by_id.values())


def test_masks_arrive_with_their_images(recipes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data/a.tar", "w") as tar:
        for number in range(4):
            classes = np.random.default_rng(number).integers(0, 3, (13, 15), np.uint8) * 7
            classes = classes.repeat(10, 0).repeat(10, 1)
            mask = Image.fromarray(classes, "P")
            mask.putpalette([255 - each % 256 for each in range(768)])
            pictures = {"jpg": Image.fromarray(classes[:, :, None].repeat(3, 2)), "png": mask}
            for kind, picture in pictures.items():
                buffer = io.BytesIO()
                picture.save(buffer, {"jpg": "JPEG", "png": "PNG"}[kind])
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(buffer.getvalue())
                tar.addfile(member, io.BytesIO(buffer.getvalue()))
    chain = recipes["segmentation"]
    options: dict[str, Any] = {"format": "webdataset", "batch_size": 2, "seed": 1}
    with Loader(tmp_path / "data", transform=chain, **options) as loader:
        batch = next(loader)
        images, masks = batch["image"].numpy(), batch["classes"].numpy()
    assert images.shape[1:] == (3, 480, 480)
    assert masks.shape[1:] == (480, 480, 1)
    assert set(np.unique(masks).tolist()) == {0, 7, 14}
    # the pictures are their masks: red, as it is normalised, tells the class
    levels = (images[:, 0] * 0.229 + 0.485) * 255
    assert (np.abs(levels - masks[:, :, :, 0]) < 3.5).mean() > 0.9
