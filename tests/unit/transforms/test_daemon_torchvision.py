"""Transforms of images, compared with what torchvision made and drew.

`reference/torchvision.npz` holds that; `reference/make_reference.py` writes it.
"""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
from gyre_daemon.transforms import Transform
from gyre_media.colors import (
    OPERATIONS,
    ColorJitter,
    Normalize,
    RandAugment,
    brightened,
    contrasted,
    saturated,
    turned,
)
from gyre_media.geometry import CenterCrop, HorizontalFlip, RandomResizedCrop, Resize
from PIL import Image

Array = np.ndarray[Any, Any]
STORED: dict[str, Array] = dict(np.load(Path(__file__).parent / "reference/torchvision.npz"))
CHANGES = {
    "brightness": brightened,
    "contrast": contrasted,
    "saturation": saturated,
    "hue": turned,
}
LEAST_P = 0.001


def stored(prefix: str) -> Iterator[tuple[list[str], Array]]:
    """What is stored below a path: the rest of each path, and the array."""
    names = [name for name in STORED if name.startswith(f"{prefix}/")]
    assert names
    for name in names:
        yield name[len(prefix) + 1 :].split("/"), STORED[name]


def applied(transform: Transform, image: Array, seed: int = 0) -> Array:
    sample = {"image": image}
    transform.apply(sample, np.random.default_rng(seed), {})
    return sample["image"]


def difference(found: Array, wanted: Array) -> int:
    assert found.shape == wanted.shape
    return int(np.abs(found.astype(int) - wanted).max())


# The bounds of docs/transforms.md.
@pytest.mark.parametrize(
    ("interpolation", "kind", "most"),
    [
        ("bilinear", "tensor/antialias", 1),
        ("bilinear", "pillow/antialias", 2),
        ("bilinear", "tensor/plain", 1),
        ("bicubic", "tensor/antialias", 2),
        (
            "bicubic",
            "floats/antialias",
            18,
        ),  # they are not cut to 0 to 255 between rows and columns
        ("bicubic", "pillow/antialias", 0),
        ("bicubic", "floats/plain", 1),
        ("bicubic", "tensor/plain", 32),  # computed with other coefficients than those of floats
        ("nearest", "pillow/plain", 0),
    ],
)
def test_resized_pixels_are_those_of_torchvision(interpolation: Any, kind: str, most: int) -> None:
    for (size,), wanted in stored(f"resize/{kind}/{interpolation}"):
        height, width = map(int, size.split("x"))
        resize = Resize(
            (height, width), interpolation=interpolation, antialias=kind.endswith("antialias")
        )
        assert difference(applied(resize, STORED["picture"]), wanted) <= most


def test_nearest_pixels_are_those_that_torchvision_calls_nearest_exact() -> None:
    """But where two pixels are equally near, and its floats decide."""
    image = STORED["picture"]
    for _, wanted in stored("resize/tensor/plain/nearest-exact"):
        found = applied(Resize(wanted.shape[:2], interpolation="nearest"), image)
        rows, columns = (
            [place for place in range(after) if (2 * place + 1) * before % (2 * after)]
            for before, after in zip(image.shape[:2], wanted.shape[:2], strict=True)
        )
        assert 2 * len(rows) > len(found)
        assert np.array_equal(found[rows][:, columns], wanted[rows][:, columns])


def test_sizes_are_those_of_torchvision() -> None:
    for height, width, shorter, *wanted in STORED["shapes"].tolist():
        image = np.zeros((height, width, 1), np.uint8)
        assert list(applied(Resize(shorter), image).shape[:2]) == wanted


def test_middles_are_those_of_torchvision() -> None:
    image = np.arange(1, 20 * 11 + 1).astype(np.uint8).reshape(20, 11, 1)
    for (size,), wanted in stored("center_crop"):
        height, width = map(int, size.split("x"))
        assert np.array_equal(applied(CenterCrop((height, width)), image), wanted)


def test_flipped_and_normalized_pixels_are_those_of_torchvision() -> None:
    """It multiplies by 1 / 255 where we divide, so the last bit of a float may differ."""
    image = STORED["picture"][:9, 20:31]
    assert np.array_equal(applied(HorizontalFlip(1.0), image), STORED["flip"])
    np.testing.assert_allclose(applied(Normalize(), image), STORED["normalize"], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind", "most"),
    [
        ("brightness", "tensor", 0),
        ("brightness", "pillow", 0),
        ("contrast", "tensor", 1),
        ("contrast", "pillow", 1),
        ("saturation", "tensor", 1),
        ("saturation", "pillow", 2),
        ("hue", "tensor", 1),
        ("hue", "pillow", 16),  # computed from hue, saturation and value in whole numbers
    ],
)
def test_colors_are_those_of_torchvision(name: str, kind: str, most: int) -> None:
    for (factor,), wanted in stored(f"{name}/{kind}"):
        found = CHANGES[name](STORED["small"], float(factor))
        assert difference(found, wanted) <= most


def test_operations_of_rand_augment_are_those_of_torchvision() -> None:
    images = {"rgb": Image.fromarray(STORED["small"])}
    images["gray"] = images["rgb"].convert("L")
    done = set()
    for (name, kind, magnitude, sign), wanted in stored("augment"):
        key = ours(name)
        operation = OPERATIONS[key]
        size = {"translate_x": wanted.shape[1], "translate_y": wanted.shape[0]}.get(key, 1)
        by = int(sign) * int(magnitude) / 30 * (operation.strongest * size)
        found = np.asarray(operation.apply(images[kind], by)).reshape(wanted.shape)
        assert difference(found, wanted) == 0, (name, kind, magnitude, sign)
        done.add((key, int(sign)))
    assert done == {(key, 1) for key in OPERATIONS} | {
        (key, -1) for key, operation in OPERATIONS.items() if operation.is_signed
    }


def ours(name: str) -> str:
    """Our name of an operation of torchvision: `shear_x` of `ShearX`."""
    key = name.removesuffix("X").removesuffix("Y").lower()
    return f"{key}_{name[-1].lower()}" if name[-1] in "XY" else key


def test_boxes_have_the_distribution_of_torchvision() -> None:
    ranges = ((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.6), (0.5, 3.0))
    rng = np.random.default_rng(1)
    for (size, number), wanted in stored("boxes"):
        height, width = map(int, size.split("x"))
        scale, ratio = ranges[int(number)]
        crop = RandomResizedCrop(8, scale=scale, ratio=ratio)
        found = np.array([crop.box(height, width, rng) for _ in wanted])
        assert (found[:, :2] >= 0).all()
        assert (found[:, 0] + found[:, 2] <= height).all()
        assert (found[:, 1] + found[:, 3] <= width).all()
        samples = described(found, height, width), described(wanted, height, width)
        for left, right in zip(*samples, strict=True):
            assert bool(len(left)) == bool(len(right))
            assert not len(left) or scipy.stats.ks_2samp(left, right).pvalue > LEAST_P


def described(boxes: Array, height: int, width: int) -> list[Array]:
    """Of boxes: their part of the area, the logarithms of their ratios, and where they lie."""
    top, left, tall, wide = boxes.astype(float).T
    is_free, is_free_across = tall < height, wide < width
    return [
        tall * wide / (height * width),
        np.log(wide / tall),
        (top / np.maximum(height - tall, 1))[is_free],
        (left / np.maximum(width - wide, 1))[is_free_across],
    ]


def test_jitter_has_the_distribution_of_torchvision() -> None:
    jitter, rng = ColorJitter(0.4, 1.5, 0.2, 0.1), np.random.default_rng(2)
    drawn = [jitter.draw(rng) for _ in STORED["jitter/orders"]]
    names = list(CHANGES)
    for place, name in enumerate(names):
        found = [factors[name] for _, factors in drawn]
        assert scipy.stats.ks_2samp(found, STORED["jitter/factors"][:, place]).pvalue > LEAST_P
    orders = Counter(tuple(map(names.index, order)) for order, _ in drawn)
    wanted = Counter(map(tuple, STORED["jitter/orders"].tolist()))
    assert len(orders) == len(wanted) == math.factorial(4)
    table = [[counts[order] for order in wanted] for counts in (orders, wanted)]
    assert scipy.stats.chi2_contingency(table).pvalue > LEAST_P


def test_flips_have_the_rate_of_torchvision() -> None:
    rng, image = np.random.default_rng(3), np.array([[[0], [1]]], np.uint8)
    for (p,), wanted in stored("flips"):
        found = 0
        for _ in wanted:
            sample = {"image": image}
            HorizontalFlip(float(p)).apply(sample, rng, {})
            found += int(sample["image"][0, 0, 0])
        table = [[count, len(wanted) - count] for count in (found, int(wanted.sum()))]
        assert scipy.stats.chi2_contingency(table).pvalue > LEAST_P


def test_operations_have_the_distribution_of_torchvision() -> None:
    wanted, rng = STORED["augments/counts"], np.random.default_rng(4)
    names = list(map(ours, STORED["augments/names"].tolist()))
    assert names == list(OPERATIONS)
    found = np.zeros_like(wanted)
    for _ in range(wanted.sum()):
        name, by = RandAugment().draw(40, 60, rng)
        found[names.index(name), int(by < 0)] += 1
    assert np.array_equal(found > 0, wanted > 0)
    table = [counts[wanted > 0] for counts in (found, wanted)]
    assert scipy.stats.chi2_contingency(table).pvalue > LEAST_P


def test_an_image_gets_what_is_drawn_for_it() -> None:
    image = STORED["picture"]
    lengths = image.shape[0], image.shape[1]
    for seed in range(6):
        crop = RandomResizedCrop(20, interpolation="bicubic")
        top, left, height, width = crop.box(*lengths, np.random.default_rng(seed))
        part = Image.fromarray(image[top : top + height, left : left + width])
        wanted = np.asarray(part.resize((20, 20), Image.Resampling.BICUBIC))
        assert np.array_equal(applied(crop, image, seed), wanted)
        jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
        order, factors = jitter.draw(np.random.default_rng(seed))
        changed = image
        for name in order:
            changed = CHANGES[name](changed, factors[name])
        assert np.array_equal(applied(jitter, image, seed), changed)
        rng, augmented = np.random.default_rng(seed), Image.fromarray(image)
        for _ in range(3):
            name, by = RandAugment(num_ops=3).draw(*lengths, rng)
            augmented = OPERATIONS[name].apply(augmented, by)
        assert np.array_equal(applied(RandAugment(num_ops=3), image, seed), np.asarray(augmented))


def test_the_numbers_of_a_seed_stay_the_same() -> None:
    """Other numbers make other samples: they would need another `version`."""
    crop, rng = RandomResizedCrop(8), np.random.default_rng
    assert crop.box(300, 400, rng(0)) == (28, 242, 137, 103)
    assert crop.box(50, 400, rng(5)) == (1, 223, 43, 58)
    order, factors = ColorJitter(0.4, 0.4, 0.4, 0.1).draw(rng(0))
    assert order == ["saturation", "brightness", "contrast", "hue"]
    assert factors["hue"] == pytest.approx(0.08255111545554436)
    numbers = rng(0)
    drawn = [RandAugment().draw(40, 60, numbers) for _ in range(3)]
    assert [name for name, _ in drawn] == ["solarize", "contrast", "translate_y"]
    assert [by for _, by in drawn] == pytest.approx([76.5, -0.27, -5.438066465256798])
