"""Transforms of the recipes for classification and self-supervision, computed another way here."""

import io
from collections import Counter
from typing import Any

import cv2
import numpy as np
import pytest
from gyre_daemon.transforms import Field, Transform
from gyre_daemon.transforms.built_in import Copy
from gyre_daemon.transforms.worker import Chain
from gyre_media.colors import (
    OPERATIONS,
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomErasing,
    RandomGrayscale,
    RandomSolarize,
    TrivialAugment,
    gaussian,
)
from gyre_media.decode_image import DecodeImage
from gyre_media.geometry import (
    CenterCrop,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    VerticalFlip,
)
from PIL import Image, ImageFilter, ImageOps

from tests.unit.transforms.test_daemon_images import picture, png, tiff

Array = np.ndarray[Any, Any]


def applied(transform: Transform, image: Array, seed: int = 0) -> Array:
    sample = {"image": image}
    transform.apply(sample, np.random.default_rng(seed), {})
    return sample["image"]


def is_changed(transform: Transform, image: Array, num: int = 400) -> float:
    return float(np.mean([applied(transform, image, seed) is not image for seed in range(num)]))


def difference(found: Array, wanted: Array) -> int:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    return int(np.abs(found.astype(int) - wanted).max())


def blurred(image: Array, kernel_size: int, sigma: float) -> Array:
    """The formula of torchvision: a normalised Gaussian over a picture that is mirrored."""
    half = kernel_size // 2
    weights = np.exp(-((np.arange(-half, half + 1) / sigma) ** 2) / 2)
    kernel = np.outer(weights, weights) / weights.sum() ** 2
    padded = np.pad(image.astype(np.float64), [(half, half), (half, half), (0, 0)], "reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel_size, kernel_size), (0, 1))
    made: Array = np.rint((windows * kernel).sum((-1, -2))).clip(0, 255).astype(np.uint8)
    return made


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("kernel_size", "sigma"), [(23, 1.9), (9, 0.1), (5, 0.8)])
def test_blur_is_a_gaussian(channels: int, kernel_size: int, sigma: float) -> None:
    image = picture(40, 53)[:, :, :channels]
    found = applied(GaussianBlur(kernel_size, (sigma, sigma)), image)
    assert difference(found, blurred(image, kernel_size, sigma)) <= 1
    # Pillow, which SimCLR and DINO took, blurs by boxes: it differs by a few levels
    if channels == 3:
        by_boxes = Image.fromarray(image).filter(ImageFilter.GaussianBlur(sigma))
        assert difference(found, np.asarray(by_boxes)) <= 8


@pytest.mark.parametrize(("sigma", "num_weights"), [(0.1, 3), (2.0, 35), (30.0, 255)])
def test_a_wide_kernel_costs_what_its_gaussian_needs(sigma: float, num_weights: int) -> None:
    """And the pixels are, to the bit, those of all its weights."""
    image = picture(140, 153)
    assert len(gaussian(255, sigma)) == num_weights
    weights = np.exp(-0.5 * (np.arange(-127, 128) / sigma) ** 2)
    whole = (weights / weights.sum()).astype(np.float32)
    made = cv2.sepFilter2D(image, cv2.CV_32F, whole, whole, borderType=cv2.BORDER_REFLECT_101)
    wanted = np.rint(made).clip(0, 255).astype(np.uint8)
    assert difference(applied(GaussianBlur(255, (sigma, sigma)), image), wanted) == 0


def test_gray_and_inverted_levels_are_those_of_the_formulas_and_of_pillow() -> None:
    image = picture(31, 45)
    gray = applied(RandomGrayscale(p=1), image)
    wanted = np.floor(image @ np.array([0.2989, 0.587, 0.114])).astype(np.uint8)
    assert difference(gray, np.repeat(wanted[:, :, None], 3, 2)) == 0
    by_pillow = np.asarray(Image.fromarray(image).convert("L").convert("RGB"))
    assert difference(gray, by_pillow) <= 1
    inverted = applied(RandomSolarize(threshold=100, p=1), image)
    assert difference(inverted, np.asarray(ImageOps.solarize(Image.fromarray(image), 100))) == 0


@pytest.mark.parametrize(
    "sometimes",
    [
        RandomGrayscale(p=0.3),
        RandomSolarize(p=0.3),
        GaussianBlur(3, p=0.3),
        ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.3),
        VerticalFlip(p=0.3),
    ],
)
def test_so_many_images_are_changed(sometimes: Transform) -> None:
    assert is_changed(sometimes, picture(20, 24)) == pytest.approx(0.3, abs=0.08)


def test_flips_and_crops_with_borders() -> None:
    image = picture(32, 30)
    assert difference(applied(VerticalFlip(p=1), image), image[::-1]) == 0
    for mode in ("constant", "edge", "reflect", "symmetric"):
        fill = {"constant_values": 7} if mode == "constant" else {}
        crop = RandomCrop((32, 30), padding=4, fill=7, padding_mode=mode)
        padded = np.pad(image, [(4, 4), (4, 4), (0, 0)], mode, **fill)  # type: ignore[call-overload]
        places = {
            (top, left): padded[top : top + 32, left : left + 30].tobytes()
            for top in range(9)
            for left in range(9)
        }
        found = Counter(applied(crop, image, seed).tobytes() for seed in range(600))
        assert set(found) <= set(places.values())
        assert len(found) == 81  # each place, about seven times
        assert max(found.values()) < 25
    with pytest.raises(ValueError, match=r"smaller than the crop of 40 x 40\. Set pad_if_needed"):
        applied(RandomCrop(40), image)
    larger = applied(RandomCrop(40, pad_if_needed=True), image)
    assert larger.shape == (40, 40, 3)
    assert image[5, 5].tolist() in larger.reshape(-1, 3).tolist()


def test_trivial_augment_draws_each_operation_at_each_strength() -> None:
    drawn: dict[str, list[float]] = {}
    rng = np.random.default_rng(1)
    for _ in range(20_000):
        name, by = TrivialAugment().draw(0, 0, rng)
        drawn.setdefault(name, []).append(by)
    assert set(drawn) == set(OPERATIONS)
    assert all(abs(len(each) - 20_000 / 14) < 200 for each in drawn.values())
    space = {  # torchvision's, for 31 strengths
        "shear_x": np.linspace(0, 0.99, 31),
        "shear_y": np.linspace(0, 0.99, 31),
        "translate_x": np.linspace(0, 32, 31),
        "translate_y": np.linspace(0, 32, 31),
        "rotate": np.linspace(0, 135, 31),
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), np.linspace(0, 0.99, 31)),
    }
    for name, strengths in space.items():
        found = np.unique(np.round(drawn[name], 6))
        assert np.allclose(found, np.unique(np.concatenate((-strengths, strengths))), atol=1e-5)
    bits = 8 - np.round(np.unique(drawn["posterize"]))
    assert np.array_equal(np.unique(bits), np.unique(np.round(8 - np.arange(31) / 5)))
    assert np.allclose(np.unique(drawn["solarize"]), np.linspace(0, 255, 31))
    image = picture(50, 60)
    for seed in range(30):
        name, by = TrivialAugment().draw(0, 0, np.random.default_rng(seed))
        wanted = np.asarray(OPERATIONS[name].apply(Image.fromarray(image), by))
        assert difference(applied(TrivialAugment(), image, seed), wanted) == 0


def erased(made: Array) -> tuple[int, int, int, int]:
    """Top, left, height and width of what is 9 in [C, H, W]; it is a rectangle in all channels."""
    rows, columns = (np.flatnonzero((made[0] == 9).any(axis)) for axis in (1, 0))
    top, left, height, width = rows[0], columns[0], len(rows), len(columns)
    assert (made[:, top : top + height, left : left + width] == 9).all()
    assert (made == 9).sum() == 3 * height * width
    return top, left, height, width


def test_rectangles_are_erased() -> None:
    image = np.zeros((3, 60, 80), np.float32)
    areas, ratios, num = [], [], 0
    for seed in range(600):
        made = applied(RandomErasing(p=0.5, value=9), image, seed)
        if made is image:
            continue
        num += 1
        _, _, height, width = erased(made)
        areas.append(height * width / 4800)
        ratios.append(height / width)
    assert num / 600 == pytest.approx(0.5, abs=0.06)
    assert 0.015 < min(areas) < 0.05
    assert 0.25 < max(areas) < 0.35
    assert 0.25 < min(ratios) < 0.5
    assert 2 < max(ratios) < 3.8
    assert not image.any()  # what it reads is not written to
    noise = applied(RandomErasing(p=1, value="random", scale=(0.3, 0.3)), image)
    assert noise.std() == pytest.approx(np.sqrt(0.3), rel=0.1)
    levels = applied(RandomErasing(p=1, value=9, layout="hwc"), np.zeros((60, 80, 3), np.uint8))
    erased(levels.transpose(2, 0, 1))
    with pytest.raises(ValueError, match="put it behind normalize"):
        RandomErasing(value="random").outputs({"image": Field(np.dtype(np.uint8), (3, 4, 4))})


def test_views_of_one_image_are_made_from_copies() -> None:
    def view(name: str, size: int) -> list[Transform]:
        return [
            Copy("image", name),
            RandomResizedCrop(size, field=name),
            HorizontalFlip(field=name),
            ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8, field=name),
            RandomGrayscale(p=0.2, field=name),
            GaussianBlur(9, p=0.5, field=name),
            Normalize(field=name),
        ]

    steps = [*view("one", 24), *view("other", 24), *view("local", 12)]
    steps += [RandomCrop(8), Normalize()]
    names = [(type(each).__name__, each) for each in steps]
    chain = Chain(names, {"image": Field(np.dtype(np.uint8), (None, None, 3))})
    assert {name: field.shape for name, field in chain.made.items()} == {
        "one": (3, 24, 24),
        "other": (3, 24, 24),
        "local": (3, 12, 12),
        "image": (3, 8, 8),
    }
    image = picture(60, 70)
    before, out = image.copy(), chain.scratch()
    chain.apply({"image": image}, np.random.default_rng(0), out)
    assert np.array_equal(image, before)
    assert not np.array_equal(out["one"], out["other"])
    assert all(np.isfinite(each).all() for each in out.values())


MASKED: list[Transform] = [
    RandomResizedCrop(24, masks=("mask",)),
    RandomResizedCrop(24, interpolation="nearest", antialias=False, masks=("mask",)),
    Resize((30, 20), masks=("mask",)),
    Resize(30, interpolation="nearest", antialias=False, masks=("mask",)),
    CenterCrop(52, masks=("mask",)),
    RandomCrop((70, 60), padding=3, pad_if_needed=True, masks=("mask",), mask_fill=9),
    HorizontalFlip(masks=("mask",)),
    VerticalFlip(masks=("mask",)),
]


@pytest.mark.parametrize("transform", MASKED, ids=lambda each: type(each).__name__)
def test_masks_are_cut_as_their_image(transform: Transform) -> None:
    """The image is its own mask, so where nothing is interpolated both must be the same."""
    rng = np.random.default_rng(4)
    levels = np.array([0, 80, 255], np.uint8)[rng.integers(0, 3, (10, 9, 1))]
    mask = levels.repeat(6, 0).repeat(6, 1)
    image = mask.repeat(3, 2)
    fields = {
        name: Field(np.dtype(np.uint8), (None, None, n)) for name, n in (("image", 3), ("mask", 1))
    }
    made = transform.outputs(fields)
    assert {name: each.shape[2] for name, each in made.items()} == {"image": 3, "mask": 1}
    for seed in range(20):
        sample = {"image": image, "mask": mask}
        transform.apply(sample, np.random.default_rng(seed), {})
        found, its = sample["image"], sample["mask"]
        assert found.shape[:2] == its.shape[:2]
        assert set(np.unique(its).tolist()) <= {0, 9, 80, 255}
        if getattr(transform, "interpolation", "nearest") == "nearest":
            assert np.array_equal(found[:, :, :1], np.where(its == 9, 0, its))
    with pytest.raises(
        ValueError, match="the mask 'mask' has 9 x 10 pixels, and the image 54 x 60"
    ):
        transform.apply({"image": image, "mask": levels}, np.random.default_rng(0), {})


def test_masks_are_decoded_as_they_are_stored() -> None:
    classes = np.random.default_rng(0).integers(0, 21, (12, 14), np.uint8)
    stored = Image.fromarray(classes, "P")
    stored.putpalette(np.random.default_rng(1).integers(0, 256, 768, np.uint8).tobytes())
    for image in (stored, Image.fromarray(classes)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        sample = {"png": np.frombuffer(buffer.getvalue(), np.uint8)}
        DecodeImage("png", "mask", colors="index").apply(sample, np.random.default_rng(0), {})
        assert np.array_equal(sample["mask"][:, :, 0], classes)
    bits = classes > 9
    for kind in ("PNG", "BMP", "TIFF"):
        buffer = io.BytesIO()
        Image.fromarray(bits).save(buffer, kind)
        sample = {"png": np.frombuffer(buffer.getvalue(), np.uint8)}
        DecodeImage("png", "mask", colors="index").apply(sample, np.random.default_rng(0), {})
        assert sample["mask"].dtype == np.uint8
        assert np.array_equal(sample["mask"][:, :, 0], bits)
    for kind in ("PNG", "JPEG"):
        buffer = io.BytesIO()
        Image.fromarray(picture(9, 9)).save(buffer, kind)
        with pytest.raises(ValueError, match="its pixels are RGB, no numbers"):
            DecodeImage("png", colors="index").apply(
                {"png": np.frombuffer(buffer.getvalue(), np.uint8)}, np.random.default_rng(0), {}
            )
    with pytest.raises(ValueError, match="min_size would mix the numbers"):
        DecodeImage("png", colors="index", min_size=8)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_numbers_of_few_bits_are_not_stretched(bits: int) -> None:
    """Pillow makes 85 of a 1 of two bits, as gray levels need it."""
    numbers = (np.arange(8) % 2**bits).astype(np.uint8)
    stored = np.packbits(np.unpackbits(numbers[:, None], axis=1)[:, -bits:]).tobytes()
    decode = DecodeImage("png", "mask", colors="index")
    for file in (png([stored], 8, bits), tiff(stored, 8, bits)):
        sample = {"png": np.frombuffer(file, np.uint8)}
        decode.apply(sample, np.random.default_rng(0), {})
        assert sample["mask"].tolist() == [[[each] for each in numbers.tolist()]]
    pgm = b"P5 2 1 15\n\1\2"
    for file in (tiff(stored, 8, bits, photometric=0), pgm):
        with pytest.raises(ValueError, match="its gray levels are stretched or inverted"):
            decode.apply({"png": np.frombuffer(file, np.uint8)}, np.random.default_rng(0), {})


@pytest.mark.parametrize("masks", [("image",), ("mask", "mask")])
def test_each_mask_is_a_field_of_its_own(masks: tuple[str, ...]) -> None:
    fields = {name: Field(np.dtype(np.uint8), (None, None, 1)) for name in ("image", "mask")}
    with pytest.raises(ValueError, match="name each of them once, and none of them 'image'"):
        HorizontalFlip(masks=masks).outputs(fields)
