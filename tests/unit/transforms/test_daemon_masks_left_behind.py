"""Chains that move an image at random and forget its mask are refused."""

import numpy as np
import pytest
from gyre_daemon.transforms import Field, Transform
from gyre_daemon.transforms.built_in import Copy, Drop
from gyre_daemon.transforms.worker import Chain
from gyre_media.colors import RandAugment, TrivialAugment
from gyre_media.decode_image import DecodeImage, DecodeRandomResizedCrop
from gyre_media.geometry import (
    CenterCrop,
    HorizontalFlip,
    RandomAffine,
    RandomResizedCrop,
    Resize,
)

BYTES = Field(np.dtype(np.uint8), (None,))
SOURCE = {"jpg": BYTES, "png": BYTES, "second": BYTES}
IMAGE = DecodeImage("jpg")
MASK = DecodeImage("png", "mask", colors="index")
SMALL = Resize((8, 8), field="mask", interpolation="nearest", antialias=False)
CROP = RandomResizedCrop(8, masks=("mask",))


def made(*transforms: Transform) -> Chain:
    return Chain([(type(each).__name__, each) for each in transforms], SOURCE)


@pytest.mark.parametrize(
    "steps",
    [
        [IMAGE, MASK, RandomResizedCrop(8)],
        [IMAGE, MASK, HorizontalFlip(), SMALL],
        [MASK, IMAGE, RandomAffine(9)],
        [IMAGE, MASK, RandAugment()],
        [IMAGE, MASK, TrivialAugment()],
        [MASK, DecodeRandomResizedCrop("jpg", size=8), SMALL],
        [IMAGE, MASK, CROP, HorizontalFlip()],
        [IMAGE, MASK, CROP, SMALL, HorizontalFlip()],
        [IMAGE, DecodeImage("png", "mask", colors="gray"), CROP, HorizontalFlip()],
    ],
)
def test_a_mask_that_would_stay_behind_is_refused(steps: list[Transform]) -> None:
    reason = "the mask 'mask' lies in 'image' and would stay where it is while its pixels move"
    with pytest.raises(ValueError, match=reason):
        made(*steps)


@pytest.mark.parametrize(
    "steps",
    [
        [IMAGE, MASK, CROP, HorizontalFlip(masks=("mask",))],
        [IMAGE, RandomResizedCrop(8), MASK, SMALL],  # decoded behind it: no mask of it
        [IMAGE, MASK, Resize((16, 16)), SMALL],  # both move by themselves, and not by chance
        [IMAGE, MASK, CenterCrop(8), CenterCrop(8, field="mask")],
        [IMAGE, MASK, Drop("mask"), HorizontalFlip(), Resize((8, 8))],
        [MASK, HorizontalFlip(field="mask"), SMALL],  # the numbers are the image
        # a mask of which of them? Nothing is sure
        [IMAGE, DecodeImage("second", "other"), MASK, RandomResizedCrop(8), Drop("other"), SMALL],
        [
            IMAGE,
            MASK,
            Copy("image", "view"),
            RandomResizedCrop(8, field="view"),
            CROP,
            HorizontalFlip(field="view"),
        ],
    ],
)
def test_what_may_be_right_is_made(steps: list[Transform]) -> None:
    assert made(*steps).made
